"""Measurements: of a layout against a single process, of a step or a run against its prediction, of a machine."""
