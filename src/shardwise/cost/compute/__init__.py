"""Computation: the FLOPs of a job, the operators of its layers, and the seconds of an operator."""
