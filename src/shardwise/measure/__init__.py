"""Measurements: a layout against one process, a traced step or a run against its prediction, a machine."""
