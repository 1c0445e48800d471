"""How our own parts enter the autograd graph: gradient functions, saved views, weight gradients computed later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.engine.torch_private import grouped_mm

Move = Callable[[Tensor], Tensor]


def with_gradient(tensor: Tensor, forward: Move, backward: Move) -> Tensor:
    """``forward(tensor)``, whose gradient with respect to ``tensor`` is ``backward`` of the output's gradient."""
    result: Tensor = _WithGradient.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return result


def same(tensor: Tensor) -> Tensor:
    """The tensor itself, as a view: a function's output must not be its input."""
    return tensor.view_as(tensor)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.gradient_of = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient_of(gradient), None, None


def autocast_now(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context with the current autocast settings, which the thread of the backward pass does not have."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype)


# -- What autograd saves instead of a tensor that is recomputed or fetched later: a view of a storage to come ----------


@dataclass(frozen=True)
class SavedView:
    """A view whose storage is made when it is needed."""

    content: Callable[[], Tensor]  # returns a tensor that begins where the storage does
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    @classmethod
    def of(cls, tensor: Tensor, content: Callable[[], Tensor]) -> SavedView:
        return cls(content, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def unpack(saved: Tensor | SavedView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.content().view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)


# -- Weight gradients that are computed later than input gradients: the W of split pipeline schedules, after the I ----
# PyTorch's own split (`torch.distributed.pipelining._backward`) asks autograd once for every group of weights: under
# recompute each call runs the layer again, all activations are kept until W, and before 2.13 the gradients of a
# function with several outputs are mixed up. Here the matmuls themselves are deferred: the inputs of a linear layer and
# the gradient of its outputs are kept, everything else is freed after I. All other gradients (norms, biases, functions
# that do not support this) are computed in I, which is early but correct.

Compute = Callable[[], Sequence[Tensor]]
Waiting = list[tuple[tuple[Tensor, ...], Compute]]

# One backward pass runs at a time in a process; on a GPU it runs on a thread of its own, so no thread-local value.
_waiting: Waiting | None = None
_at_once = False


@contextmanager
def deferring() -> Iterator[Waiting]:
    """Backward passes inside append their weight gradients to the list, for `compute`."""
    global _waiting
    waiting: Waiting = []
    _waiting = waiting
    try:
        yield waiting
    finally:
        _waiting = None


@contextmanager
def not_deferring() -> Iterator[None]:
    """Makes forward passes inside compute weight gradients at once: deferred, they would keep the activations of a
    recomputed layer."""
    global _at_once
    before, _at_once = _at_once, True
    try:
        yield
    finally:
        _at_once = before


def may_defer() -> bool:
    """Whether weight gradients may be deferred; asked in the forward pass, remembered for its backward pass."""
    return not _at_once


def defer(compute_now: Compute, *weights: Tensor) -> Sequence[Tensor | None]:
    """For the backward of a function: the gradients of ``weights``, or Nones if they are deferred.

    ``weights`` are the parameters themselves, not what `ctx.saved_tensors` gives back for them.
    """
    if _waiting is None:
        return compute_now()
    _waiting.append((weights, compute_now))
    return (None,) * len(weights)


def is_deferring() -> bool:
    """Whether the running backward pass defers weight gradients, so that what they need is not fetched yet."""
    return _waiting is not None


@torch.no_grad()
def compute(waiting: Waiting) -> None:
    """Computes what was deferred and adds it to the gradients, as autograd would have; empties the list."""
    while waiting:
        weights, gradients_of = waiting.pop(0)  # each frees what it needed before the next begins
        for weight, gradient in zip(weights, gradients_of()):
            if weight.grad is None:
                weight.grad = gradient.to(getattr(weight, "grad_dtype", None) or gradient.dtype)
            else:
                weight.grad += gradient


class Deferrable(TorchFunctionMode):
    """Forward passes inside use linear layers whose weight gradients can be deferred.

    Enter it around backward passes too, since a layer that is recomputed there has to do what it did before. Such a
    pass has to start at a `GradientEdge`: started at a tensor, it is one function call, inside which modes are off.
    ``exempt`` are modules whose own ``weight`` is never deferred.
    """

    def __init__(self, exempt: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.exempt = tuple(exempt)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is None or _at_once:
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            result = replacement(self, *args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def takes(self, inputs: Any, weight: Any) -> bool:
        return (
            isinstance(weight, nn.Parameter)
            and weight.requires_grad
            and inputs.dtype == weight.dtype
            and not torch.is_autocast_enabled(weight.device.type)
            and all(weight is not module.weight for module in self.exempt)
        )


def _linear(mode: Deferrable, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return _Linear.apply(input, weight, bias) if mode.takes(input, weight) else None  # type: ignore[no-untyped-call]


def _grouped(
    mode: Deferrable, input: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    plain = offs is not None and bias is None and out_dtype is None and input.dim() == 2 and mat2.dim() == 3
    return _Grouped.apply(input, mat2, offs) if plain and mode.takes(input, mat2) else None  # type: ignore[no-untyped-call]


_REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {F.linear: _linear, grouped_mm: _grouped}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight  # not saved: recompute restores another tensor, whose gradient is never read
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        of_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        flat, rows = gradient.flatten(0, -2), inputs.flatten(0, -2)
        (of_weight,) = defer(lambda: (flat.T @ rows,), weight)
        return of_inputs, of_weight, flat.sum(0) if ctx.needs_input_grad[2] else None


class _Grouped(torch.autograd.Function):
    """Rows times the matrix of their expert; rows of expert e end at ``ends[e]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.matrices = matrices
        return grouped_mm(rows, matrices, offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows, ends), matrices = ctx.saved_tensors, ctx.matrices
        gradient = gradient.contiguous()
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = grouped_mm(gradient, matrices.transpose(-2, -1), offs=ends)
        (of_matrices,) = defer(lambda: (grouped_mm(rows.T, gradient, offs=ends),), matrices)
        return of_rows, of_matrices, None
