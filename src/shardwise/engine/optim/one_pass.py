"""AdamW of lists of tensors on a GPU in one pass over memory: a kernel that reads their addresses from a table."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.engine.optim.updates import Update

TABLES = 8  # that are kept: allocators give the gradients of most steps the addresses they had before


class OnePassPart(NamedTuple):
    """A tensor and what one element of it needs: all are flat in memory and of one size.

    ``weight`` follows ``value`` in another format; None where the value is the weight itself. A value of int16 is the
    rest of a master (`masters`), of which the weight is the upper half.
    """

    gradient: Tensor
    value: Tensor
    first: Tensor
    second: Tensor
    weight: Tensor | None

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(0 if one is None else one.data_ptr() for one in self)

    @property
    def aligned(self) -> bool:
        """Whether 16 bytes can be read at once."""
        return all(address % 16 == 0 for address in self.addresses)

    @property
    def formats(self) -> tuple[torch.dtype | None, ...]:
        """Of gradient, value, moments and weight."""
        weight = None if self.weight is None else self.weight.dtype
        return self.gradient.dtype, self.value.dtype, self.first.dtype, torch.int16 if self.split else weight

    @property
    def split(self) -> bool:
        return self.value.dtype == torch.int16


class _Table(NamedTuple):
    """On the device: the addresses of the tensors, and which tensor each program of the kernel has."""

    tensors: Tensor
    owners: Tensor
    sources: tuple[Tensor, ...]  # in host memory: a captured graph copies them again


class OnePass:
    """Keeps the tables of recent steps, so that a step with the same addresses copies nothing to the device."""

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple[Any, ...], _Table] = OrderedDict()
        self._captured: list[_Table] = []  # of graphs, for as long as they may be replayed

    @torch.no_grad()
    def __call__(self, update: Update, parts: Iterable[OnePassPart]) -> None:
        """One step of AdamW; nothing is written if ``update.bad`` is 1. There is a launch for every format there is."""
        alike: dict[tuple[Any, ...], list[OnePassPart]] = {}
        for one in parts:
            if one.value.numel():
                alike.setdefault((*one.formats, one.aligned), []).append(one)
        if not alike:
            return
        scalars = _scalars(update)
        for (*formats, aligned), some in alike.items():
            self._launch(update, some, scalars, formats, aligned)

    def _launch(
        self, update: Update, parts: Sequence[OnePassPart], scalars: Tensor, formats: Sequence[torch.dtype | None],
        aligned: bool,
    ) -> None:  # fmt: skip
        from shardwise.engine.optim.adamw_kernel import BLOCK, FIELDS, WARPS, adamw

        settings = update.settings
        table = self._table(parts, BLOCK)
        types = (None if one is None else _triton_type(one) for one in formats)
        adamw[(table.owners.numel(),)](
            table.tensors, table.owners, scalars, settings.beta1, 1 - settings.beta1, settings.beta2,
            1 - settings.beta2, settings.epsilon, *types, parts[0].split, aligned, BLOCK, FIELDS,
            num_warps=WARPS,
        )  # fmt: skip

    def _table(self, parts: Sequence[OnePassPart], block: int) -> _Table:
        rows, program = [], 0
        for one in parts:
            rows.append((*one.addresses, one.value.numel(), program))
            program += -(-one.value.numel() // block)
        device, key = parts[0].value.device, tuple(rows)
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not captured and key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        counts = torch.tensor([-(-one.value.numel() // block) for one in parts])
        owners = torch.arange(len(parts), dtype=torch.int32).repeat_interleave(counts)
        table = _sent_to(device, torch.tensor(rows), owners)
        if captured:
            self._captured.append(table)
            return table
        self._recent[key] = table
        if len(self._recent) > TABLES:
            self._recent.popitem(last=False)
        return table


def _sent_to(device: torch.device, tensors: Tensor, owners: Tensor) -> _Table:
    """Without a wait of the host, for which it has to be pinned memory."""
    if device.type != "cuda":
        return _Table(tensors, owners, ())
    sources = tensors.pin_memory(), owners.pin_memory()
    there, whose = (one.to(device, non_blocking=True) for one in sources)
    return _Table(there, whose, sources)


def _scalars(update: Update) -> Tensor:
    from shardwise.engine.optim.adamw_kernel import SCALARS, step_scalars

    settings, rate = update.settings, update.learning_rate
    scalars = torch.empty(SCALARS, dtype=torch.float32, device=update.step.device)
    divisor, bad = (scalars if one is None else one for one in (update.divisor, update.bad))
    step_scalars[(1,)](
        scalars, update.step, divisor, bad, rate, update.weight_decay, math.log2(settings.beta1),
        math.log2(settings.beta2), update.divisor is not None, update.bad is not None, isinstance(rate, Tensor),
    )  # fmt: skip
    return scalars


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    known = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int16: tl.int16}
    return known.get(dtype, tl.float32)
