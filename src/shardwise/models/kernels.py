"""Triton kernels for what takes PyTorch several passes over memory; each has a plain version besides."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def run_on(device: torch.device) -> bool:
    """Whether kernels run there: on a GPU, where Triton is installed. Elsewhere the plain version computes the same."""
    return device.type == "cuda" and _TRITON_IS_THERE


_TRITON_IS_THERE = find_spec("triton") is not None
