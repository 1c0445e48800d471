"""Prediction against measurement: where the time of profiled steps went, what was predicted, and likely causes."""
