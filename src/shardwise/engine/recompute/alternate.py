"""Every second matrix product of a layer is kept and the rest computed again: TorchTitan's default recompute.

The layer runs under PyTorch's selective checkpoint, since nearly all of it is repeated. Of seven products query, value
and gate stay, and what attention has made; the last one's output is read by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten: Any = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.linear.default)
_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def alternate_products(layer: nn.Module) -> Callable[..., Any]:
    """The layer's forward pass, which keeps its input and every second product."""
    forward, last = layer.forward, sum(isinstance(one, nn.Linear) for one in layer.modules()) - 1
    contexts = partial(_contexts, last)

    @wraps(forward)
    def forward_twice(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **named)

    return forward_twice


def _contexts(last: int) -> tuple[Any, Any]:
    products = count(), count()  # in the first pass and, before 2.12, in the second

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        kept = operator in _ATTENTION
        if operator in _PRODUCTS:
            number = next(products[context.is_recompute])
            kept = number % 2 == 0 and number < last
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]
