"""Many tensors in one kernel launch, on a GPU: AdamW in one pass over memory, and the norm of all gradients.

A table on the device holds the addresses of the tensors and the tensor of each program.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.labels import Called, StepPhase
from shardwise.engine.optim import eight_bits
from shardwise.engine.optim.updates import Update
from shardwise.engine.profiler_ranges import named, sent
from shardwise.engine.torch_private import foreach_norm
from shardwise.models import kernels

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


# -- The norm of the gradients of the whole network, however it is divided, and clipping by it -----

REFUSED = -torch.inf  # the norm of a step that a rank wants skipped, whatever its gradients are


class GradientNorm:
    """The norm of all gradients: a tensor that ``copies`` ranks hold counts for its share on each of them.

    One number is sent, over ``group`` (the world unless given). The norm equals that of
    `torch.nn.utils.clip_grad_norm_` for the undivided network. A tensor with zero copies is not counted: it is the
    second copy of a tied one.
    """

    def __init__(
        self, copies: Sequence[float], device: torch.device | str, group: dist.ProcessGroup | None = None
    ) -> None:
        self.weights = torch.tensor([1 / ranks if ranks else 0.0 for ranks in copies], device=device)
        self.zero = torch.zeros((), device=device)
        self.group = group
        self.tables = TensorTables()

    @torch.no_grad()
    def __call__(
        self,
        gradients: Sequence[Tensor | None],
        refused: Tensor | None = None,
        elsewhere: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """The norm of local ``gradients``, in the order of ``copies``; None: the tensor has none in this step.

        ``elsewhere`` are the norms of those that are not on the device, in the same order. The result is REFUSED if
        ``refused`` is true on any rank and all gradients are finite.
        """
        with named(StepPhase.GRADIENT_NORM):
            total = self._in_one_pass(gradients) if kernels.run_on(self.zero.device) else self._plain(gradients)
            if elsewhere is not None:
                zero = next((torch.zeros_like(norm) for norm in elsewhere if norm is not None), self.zero)
                norms = torch.stack([zero if norm is None else norm for norm in elsewhere]).to(total.device)
                total = total + (norms * norms * self.weights).sum()
            if refused is not None:
                # Not `torch.where` with a number: it would be copied to the device, and the host would wait.
                total = total + self.zero.masked_fill(refused, REFUSED)
            group = self.group or dist.group.WORLD  # None without processes
            if group is not None:
                with sent("world", Called.GRADIENT_NORM, total):
                    all_reduce_sum(total, group)
            norm = total.sqrt()
            return norm if refused is None else norm.masked_fill(total == REFUSED, REFUSED)

    def _plain(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The sum of squares."""
        there = [gradient for gradient in gradients if gradient is not None]
        if not there:
            return self.zero.clone()
        norms = iter(foreach_norm(there, 2, dtype=torch.float32))
        each = torch.stack([self.zero if gradient is None else next(norms) for gradient in gradients])
        return (each * each * self.weights).sum()

    def _in_one_pass(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The same by a launch for each format."""
        from shardwise.engine.optim.kernels import NORM_BLOCK, NORM_WARPS, squares

        there = [
            (place, gradient.contiguous())
            for place, gradient in enumerate(gradients)
            if gradient is not None and gradient.numel()
        ]
        alike: dict[tuple[torch.dtype, bool], list[tuple[int, int, int]]] = {}
        for place, gradient in there:
            row = (place, gradient.data_ptr(), gradient.numel())
            alike.setdefault((gradient.dtype, aligned([row[1]])), []).append(row)
        sums_of_squares = []
        for (dtype, is_aligned), rows in alike.items():
            table = self.tables.of(self.zero.device, rows, NORM_BLOCK)
            sums = torch.empty(table.programs, dtype=torch.float32, device=self.zero.device)
            kind = (triton_type(dtype), is_aligned, NORM_BLOCK)
            squares[(table.programs,)](table.rows, table.owners, self.weights, sums, *kind, num_warps=NORM_WARPS)
            sums_of_squares.append(sums.sum())
        return torch.stack(sums_of_squares).sum() if sums_of_squares else self.zero.clone()


def clip_divisor(norm: Tensor, maximum: float) -> Tensor:
    """What all gradients are divided by to clip them; 1 if their norm is small enough.

    The optimizer divides as it reads them: clipping takes no pass of its own.
    """
    return ((norm + 1e-6) / maximum).clamp(min=1.0)  # as torch.nn.utils.clip_grad_norm_
