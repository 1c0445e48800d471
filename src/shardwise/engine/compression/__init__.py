"""Compressed sums of gradients, equal on every rank: which kind a strategy asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.reductions import Pending
from shardwise.engine.compression.powersgd import LowRankSum
from shardwise.engine.compression.quantised import ExchangedSum, MomentumSum, codec_of
from shardwise.spec.less_communication import Compression


class CompressedSum(Protocol):
    """Sums the same bucket over a group, step after step; see `ExchangedSum`."""

    states: dict[str, Tensor]

    @property
    def sent_bytes(self) -> int: ...

    def start(self, flat: Tensor) -> Pending: ...


def compressed_sum(
    compression: Compression, shapes: Sequence[torch.Size], group: dist.ProcessGroup, device: torch.device
) -> CompressedSum | None:
    """The sum of a bucket that holds tensors of these shapes one after the other; None without compression."""
    if not compression.is_used:
        return None
    if compression.method == "powersgd":
        return LowRankSum(compression.rank, shapes, group, device, error_feedback=compression.error_feedback)
    elements = sum(shape.numel() for shape in shapes)
    codec = codec_of(compression)
    exchanged = ExchangedSum(codec, elements, group, device, error_feedback=compression.error_feedback)
    return MomentumSum(exchanged) if compression.compresses_momentum else exchanged
