"""Predicted beside measured: where the time of profiled steps went, what was expected, and what may explain it."""
