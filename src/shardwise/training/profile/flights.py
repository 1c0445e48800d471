"""What the backend itself wrote down of its collectives: PyTorch's flight recorder, beside the engine's own names.

gloo's has collectives only, and not how long they took; NCCL's has messages too.
"""

from __future__ import annotations

import json
import os
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.engine.labels import backend_operation
from shardwise.training.profile.record import Flight

_BUFFER, _ENTRIES = "TORCH_FR_BUFFER_SIZE", "20000"  # the newest of the run
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}  # others take 1


def record_flights() -> None:
    """Before the process group is made: from then on the backend records."""
    os.environ.setdefault(_BUFFER, _ENTRIES)


def flights(begin_ns: int, end_ns: int, zero_ns: int) -> tuple[Flight, ...]:
    """What began between two moments, in seconds since a third."""
    backend: Any = torch._C._distributed_c10d
    recorded: list[dict[str, Any]] = json.loads(backend._dump_fr_trace_json()).get("entries", [])
    members = {group.group_name: tuple(dist.get_process_group_ranks(group)) for group in _groups()}
    return tuple(
        Flight(
            backend_operation(one["profiling_name"]),
            members[one["process_group"][0]],
            sum(prod(size) * _BYTES.get(kind, 1) for size, kind in zip(one["input_sizes"], one["input_dtypes"])),
            (one["time_created_ns"] - zero_ns) / 1e9,
        )
        for one in recorded
        if begin_ns <= one["time_created_ns"] <= end_ns and one["process_group"][0] in members
    )


def _groups() -> list[dist.ProcessGroup]:
    """This rank's."""
    return [group for group in distributed_c10d._world.pg_map if group is not None]
