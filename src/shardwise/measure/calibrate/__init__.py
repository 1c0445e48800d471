"""Calibration: from measurements of a machine to the cluster file that `plan` reads."""
