"""Arithmetic of a job: its FLOPs, the operators of its layers, the seconds of an operator."""
