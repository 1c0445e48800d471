"""MLPs of recomputed layers for some tokens at a time, so that no tensor as wide as an MLP has all tokens.

What a recomputed layer makes again for its backward pass is mostly its MLP's. PyTorch's checkpoint around each piece
would compute the pieces twice more, and add up gradients of weights in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from shardwise.engine.autograd import autocast_now, not_deferring
from shardwise.layout.pieces import mlp_tokens_at_once
from shardwise.models.adapters import adapter_of
from shardwise.models.loss import gradient_format
from shardwise.models.mlp import MLP


def compute_in_pieces(layer: nn.Module) -> None:
    """The layer's MLP is computed, and later computed again, for some tokens at a time."""
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, MLP):
        return
    forward = mlp.forward

    @wraps(forward)
    def forward_in_pieces(hidden: Tensor, residual: Tensor | None = None, *, unread: bool = False) -> Tensor:
        """``unread``: only for its graph, so that the last matmul need not be computed."""
        if unread:
            inner = mlp.activation(*mlp.project(hidden, *mlp.projections()))
            with _Unread(mlp.down.out_features) if _may_leave_out(mlp.down) else nullcontext():
                return mlp.down(inner)  # type: ignore[no-any-return]
        tokens = hidden.shape[:-1].numel()
        if mlp_tokens_at_once(tokens, mlp.up.out_features) >= tokens:  # as every piece is
            return forward(hidden, residual)
        trained = {name: weight for name, weight in mlp.named_parameters() if weight.requires_grad}
        saved = _Saved.apply(hidden)  # type: ignore[no-untyped-call]
        outputs: Tensor = _InPieces.apply(mlp, [*trained], saved, residual, *trained.values())  # type: ignore[no-untyped-call]
        return outputs

    mlp.forward = forward_in_pieces  # type: ignore[method-assign]


class _Saved(torch.autograd.Function):
    """Its input, saved: the last tensor that a recomputed layer makes again, which stops before its MLP."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _InPieces(torch.autograd.Function):
    """An MLP that keeps nothing: its backward pass computes each piece again, from the input that `_Saved` keeps."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        mlp, names, hidden, residual, *_ = given  # and the trained weights by these names
        ctx.mlp, ctx.names, ctx.autocast = mlp, names, autocast_now(hidden.device.type)
        ctx.saved = hidden.grad_fn if ctx.needs_input_grad[2] else ctx
        if ctx.saved is ctx:  # no gradient reaches the input
            ctx.save_for_backward(hidden)
        rows, beside = hidden.flatten(0, -2), None if residual is None else residual.flatten(0, -2)
        outputs: Tensor | None = None
        for piece in _pieces(mlp, len(rows)):
            made = mlp(rows[piece], None if beside is None else beside[piece])
            outputs = torch.empty_like(rows, dtype=made.dtype) if outputs is None else outputs
            outputs[piece] = made
        assert outputs is not None
        return outputs.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        mlp, (hidden,) = ctx.mlp, ctx.saved.saved_tensors
        rows, of_outputs = hidden.flatten(0, -2), gradient.flatten(0, -2)
        of_hidden = torch.empty_like(rows) if ctx.needs_input_grad[2] else None
        trained = [mlp.get_parameter(name) for name in ctx.names]
        leaves = [weight.detach().requires_grad_() for weight in trained]  # no hooks of the weights themselves
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
        for piece in _pieces(mlp, len(rows)):
            inputs = rows[piece].detach().requires_grad_(of_hidden is not None)
            with torch.enable_grad(), ctx.autocast(), not_deferring():
                outputs = functional_call(mlp, dict(zip(ctx.names, leaves)), (inputs,), {"unread": True})
            wanted = leaves if of_hidden is None else [*leaves, inputs]
            found = torch.autograd.grad(outputs, wanted, of_outputs[piece].to(outputs.dtype))
            for total, part in zip(sums, found):
                total += part
            if of_hidden is not None:
                of_hidden[piece] = found[-1]
        of_weights = (total.to(gradient_format(weight)) for total, weight in zip(sums, trained))
        of_inputs = None if of_hidden is None else of_hidden.view_as(hidden)
        return None, None, of_inputs, gradient if ctx.needs_input_grad[3] else None, *of_weights


def _may_leave_out(last: nn.Linear) -> bool:
    """Whether no gradient reads the product: that of a DoRA's lengths does."""
    adapter = adapter_of(last)
    return adapter is None or (adapter.magnitude is None and len(adapter.a) != last.out_features)


class _Unread(TorchFunctionMode):
    """Linear layers inside return what is no product, of the same shape, with the gradients of one.

    Not the first, narrow matmul of an adapter, which its second one multiplies.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args[1]) == self.outputs:
            inputs, weight, *bias = args
            product = _NoProduct.apply(inputs, weight)  # type: ignore[no-untyped-call]
            return product if not bias or bias[0] is None else product + bias[0]
        if func is torch.addmm:
            added, inputs, weight = args
            return added + _NoProduct.apply(inputs, weight.T)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _NoProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(*((inputs,) if ctx.needs_input_grad[1] else ()))
        ctx.weight = weight
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        of_inputs = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_inputs, None
        (inputs,) = ctx.saved_tensors
        return of_inputs, gradient.flatten(0, -2).T @ inputs.flatten(0, -2)


def _pieces(mlp: MLP, tokens: int) -> Iterator[slice]:
    at_once = mlp_tokens_at_once(tokens, mlp.up.out_features)
    return (slice(start, start + at_once) for start in range(0, tokens, at_once))
