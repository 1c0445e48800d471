"""Many tensors in one kernel launch: a table on the device holds their addresses and the tensor of each program."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

TABLES = 8  # kept: in most steps allocators give gradients the addresses that they had before


class TensorTable(NamedTuple):
    """On the device: a row of each tensor, and the row of each program of the kernel."""

    rows: Tensor
    owners: Tensor
    sources: tuple[Tensor, ...]  # in host memory: a captured graph copies them again

    @property
    def programs(self) -> int:
        return self.owners.numel()


class TensorTables:
    """Keeps the tables of recent steps, so that a step with the same addresses copies nothing to the device."""

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple[Any, ...], TensorTable] = OrderedDict()
        self._captured: list[TensorTable] = []  # of graphs, for as long as they may be replayed

    def __len__(self) -> int:
        return len(self._recent)

    def of(self, device: torch.device, numbers: Sequence[tuple[int, ...]], block: int) -> TensorTable:
        """A table with a row of ``numbers`` per tensor, its size the last of them; a program has ``block`` elements.

        The number of a tensor's first program is appended to its row.
        """
        rows, program = [], 0
        for row in numbers:
            rows.append((*row, program))
            program += -(-row[-1] // block)
        key = (block, *rows)
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not captured and key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        counts = torch.tensor([-(-row[-1] // block) for row in numbers])
        owners = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(counts)
        table = _sent_to(device, torch.tensor(rows), owners)
        if captured:
            self._captured.append(table)
            return table
        self._recent[key] = table
        if len(self._recent) > TABLES:
            self._recent.popitem(last=False)
        return table


def _sent_to(device: torch.device, rows: Tensor, owners: Tensor) -> TensorTable:
    """Copies a table from pinned memory, so that the host need not wait."""
    if device.type != "cuda":
        return TensorTable(rows, owners, ())
    sources = rows.pin_memory(), owners.pin_memory()
    there, whose = (source.to(device, non_blocking=True) for source in sources)
    return TensorTable(there, whose, sources)


def aligned(addresses: Sequence[int]) -> bool:
    """Whether a thread can read 16 bytes at once."""
    return all(address % 16 == 0 for address in addresses)


def triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    known = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int16: tl.int16}
    known[torch.uint8] = tl.uint8
    return known.get(dtype, tl.float32)
