"""How far the clocks of the ranks are apart, so that their records can lie beside each other."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

_MEETINGS = 11


def clock_offset() -> tuple[int, int]:
    """This rank's wall clock minus rank 0's, and how much it may be wrong, in nanoseconds; all ranks call it together.

    Ranks on one machine have one clock. All others leave a barrier at nearly the same moment; of several the median,
    for a rank may be late to notice.
    """
    left, world = [], dist.get_world_size()
    for _ in range(_MEETINGS):
        dist.barrier()
        left.append(time.time_ns())
    said: list[Any] = [None] * world
    dist.all_gather_object(said, (_machine(), left))
    machine, first = said[0]
    if machine and machine == _machine():
        return 0, 0
    offsets = [mine - other for mine, other in zip(left, first)]
    middle = int(statistics.median(offsets))
    return middle, int(statistics.median(abs(one - middle) for one in offsets))


def _machine() -> str:
    """What tells a running kernel from all others; empty if it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return ""
