"""fp32 masters of bf16 weights in two bytes: a weight is the upper half of its master, the rest is kept beside it.

The weight is the nearest bf16 number, as PyTorch rounds. Read as integers, the bits of a master are 2^16 times those of
its weight, plus a rest from -2^15 to 2^15. A rest of 2^15 does not fit into 16 bits and is kept as 2^15 - 1: a master
exactly half way between two weights may change in the last of its 24 bits. Otherwise nothing is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor


def master_values(weight: Tensor, rest: Tensor) -> Tensor:
    """The fp32 values of a bf16 ``weight`` and its int16 ``rest``."""
    bits = weight.view(torch.int16).to(torch.int32) << 16
    return bits.add_(rest).view(torch.float32)


def split_(values: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Writes fp32 ``values`` as a bf16 ``weight`` and its int16 ``rest``."""
    weight.copy_(values)
    upper = weight.view(torch.int16).to(torch.int32) << 16
    rest.copy_(values.contiguous().view(torch.int32).sub(upper).clamp_(max=2**15 - 1))
