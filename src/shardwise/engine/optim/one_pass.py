"""AdamW of lists of tensors on a GPU in one pass over memory: a kernel that reads their addresses from a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.engine.optim import eight_bits
from shardwise.engine.optim.tables import TensorTables, aligned, triton_type
from shardwise.engine.optim.updates import Update


class OnePassPart(NamedTuple):
    """The tensors that the update of one parameter reads and writes: contiguous, with equal numbers of elements."""

    gradient: Tensor
    value: Tensor
    """What is trained; in int16 the lower half of a master (`masters`)."""
    first: Tensor
    """Moment; in uint8, with scales behind the codes (`eight_bits`)."""
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
        from shardwise.engine.optim.adamw_kernel import BLOCK, FIELDS, WARPS, adamw

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
    from shardwise.engine.optim.adamw_kernel import SCALARS, step_scalars

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
