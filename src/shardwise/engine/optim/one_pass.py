"""Many tensors in one kernel launch, above all AdamW in one pass over memory, on a GPU.

A table on the device holds the addresses of the tensors and the tensor of each program.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.engine.optim import eight_bits
from shardwise.engine.optim.updates import Update

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


# -- AdamW by a kernel that reads the addresses of its tensors from a table ------------------------


class OnePassPart(NamedTuple):
    """The tensors that the update of one parameter reads and writes: contiguous, with equal numbers of elements."""

    gradient: Tensor
    value: Tensor  # what is trained; in int16 the lower half of a master (`masters`)
    first: Tensor  # moment; in uint8, with scales behind the codes (`eight_bits`)
    second: Tensor
    weight: Tensor | None
    """The value in another format, or the upper half of a master; None if the value is the weight itself."""

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in self)

    @property
    def formats(self) -> tuple[torch.dtype | None, ...]:
        """Of gradient, value, moments and weight."""
        weight = None if self.weight is None else self.weight.dtype
        return self.gradient.dtype, self.value.dtype, self.first.dtype, torch.int16 if self.split else weight

    @property
    def split(self) -> bool:
        return self.value.dtype == torch.int16


class OnePass:
    """AdamW of all tensors of a step, by a few launches."""

    def __init__(self) -> None:
        self.tables = TensorTables()

    @torch.no_grad()
    def __call__(self, update: Update, parts: Iterable[OnePassPart], scalars: Tensor | None = None) -> None:
        """One step of AdamW, with a launch for each combination of formats; if ``update.bad`` is 1, nothing is written.

        ``scalars`` are those of the update, if they were computed before (`scalars_of`).
        """
        alike: dict[tuple[Any, ...], list[OnePassPart]] = {}
        for part in parts:
            if part.value.numel():
                alike.setdefault((*part.formats, aligned(part.addresses)), []).append(part)
        if not alike:
            return
        scalars = scalars_of(update) if scalars is None else scalars
        for (*formats, whole), some in alike.items():
            self._launch(update, some, scalars, formats, whole)

    def _launch(
        self, update: Update, parts: Sequence[OnePassPart], scalars: Tensor, formats: Sequence[torch.dtype | None],
        is_aligned: bool,
    ) -> None:  # fmt: skip
        from shardwise.engine.optim.kernels import BLOCK, FIELDS, WARPS, adamw

        settings = update.settings
        numbers = [(*part.addresses, part.value.numel()) for part in parts]
        table = self.tables.of(parts[0].value.device, numbers, BLOCK)
        types = (None if dtype is None else triton_type(dtype) for dtype in formats)
        adamw[(table.programs,)](
            table.rows, table.owners, scalars, settings.beta1, 1 - settings.beta1, settings.beta2,
            1 - settings.beta2, settings.epsilon, *types, parts[0].split,
            eight_bits.BLOCK if parts[0].first.dtype == torch.uint8 else 1, is_aligned, BLOCK, FIELDS,
            num_warps=WARPS,
        )  # fmt: skip


def scalars_of(update: Update) -> Tensor:
    """What all elements of an update share, as the kernel reads it."""
    from shardwise.engine.optim.kernels import SCALARS, step_scalars

    settings, rate = update.settings, update.learning_rate
    if not isinstance(rate, Tensor):  # as it is in a recorded step, so that the kernel compiled before is the same
        rate = torch.full((), rate, dtype=torch.float32, device=update.step.device)
    scalars = torch.empty(SCALARS, dtype=torch.float32, device=update.step.device)
    divisor, bad = (scalars if scalar is None else scalar for scalar in (update.divisor, update.bad))
    logarithms = (math.log2(beta) if beta else -1e4 for beta in (settings.beta1, settings.beta2))
    step_scalars[(1,)](
        scalars, update.step, divisor, bad, rate, update.weight_decay, *logarithms, update.divisor is not None,
        update.bad is not None,
    )  # fmt: skip
    return scalars
