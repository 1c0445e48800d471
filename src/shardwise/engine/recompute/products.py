"""A layer that keeps its input and the results of some operators, and computes the rest again.

It runs under PyTorch's selective checkpoint. By itself that is TorchTitan's default recompute, every second matmul: of
seven, query, value and gate stay, and the attention output; the last one's output is never read. Where the compiler
takes a whole layer, all that is costly stays: left alone, it keeps whatever a product reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.engine.recompute.remade import Function

aten: Any = torch.ops.aten
Keeps = Callable[[int, torch.Size], bool]  # of a product, by its number in the layer and the shape of its matrix
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_COSTLY = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._grouped_mm.default,
    aten.topk.default,
    aten.sort.stable,
    aten.index_select.default,  # tokens on their way to experts and back
)


def every_second_product(layer: nn.Module) -> Function:
    """The layer's forward pass, which keeps its input and every second matmul but the last."""
    last = sum(isinstance(one, nn.Linear) for one in layer.modules()) - 1
    return _keeping(layer.forward, lambda number, shape: number % 2 == 0 and number < last)


def all_but_cheap(layer: nn.Module, up_projections: bool) -> Function:
    """The layer's forward pass, which computes again what selective recompute names, and all that is as cheap."""
    again = [
        getattr(one, name).weight.shape[::-1]
        for one in layer.modules()
        for name in ("query_up", "key_value_up")
        if up_projections and hasattr(one, name)
    ]
    return _keeping(layer.forward, lambda number, shape: shape not in again)


def nothing_kept() -> tuple[Any, Any]:
    """Contexts for a whole layer that the compiler takes: left alone, it keeps what it finds worth keeping."""
    again = CheckpointPolicy.MUST_RECOMPUTE
    return create_selective_checkpoint_contexts(lambda *_, **__: again)  # type: ignore[no-any-return, no-untyped-call]


def _keeping(forward: Function, keeps: Keeps) -> Function:
    contexts = partial(_contexts, keeps)

    @wraps(forward)
    def forward_twice(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **named)

    return forward_twice


def _contexts(keeps: Keeps) -> tuple[Any, Any]:
    products = count(), count()  # in the first pass and, before PyTorch 2.12, in the second

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        # Operators of our own are products, or attention over ranks.
        kept = operator in _COSTLY or operator.namespace == "shardwise"
        if operator in _PRODUCTS:
            kept = keeps(next(products[context.is_recompute]), arguments[-1].shape)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]
