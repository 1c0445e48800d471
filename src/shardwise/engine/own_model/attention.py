"""Attention of Hugging Face models through our functions: their registry of attention functions leads to ``attend``.

Their masks are made from the length of the hidden states, which is a part of the sequence under sequence and context
parallelism; an implementation that their registry of masks does not know gets none, and the rules of who sees whom
come with the call instead.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from shardwise.engine.patterns import Patterns, matching
from shardwise.models.dot_product import AttentionArguments, dot_product_attention

IMPLEMENTATION = "shardwise"


def route_attention(module: Any, patterns: Patterns) -> None:
    """Gives every attention module of a Hugging Face network an ``attend``, which it calls from now on."""
    interface: Any = importlib.import_module("transformers").AttentionInterface
    interface.register(IMPLEMENTATION, _attend)
    module.config._attn_implementation = IMPLEMENTATION
    for _, attention in matching(module, patterns.attention):
        attention.attend = dot_product_attention  # type: ignore[assignment]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Tensors come as [batch, heads, seq, features] and go as [batch, seq, heads, features]."""
    arguments = AttentionArguments(module.is_causal, sliding_window, scaling, documents, position_ids, softcap=softcap)
    heads_inside = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return module.attend(*heads_inside, arguments), None


def dropout_of(module: nn.Module) -> float:
    """The largest share of elements that anything in the network drops while it trains."""
    attention = float(getattr(getattr(module, "config", None), "attention_dropout", 0.0) or 0.0)
    return max([attention, *(one.p for one in module.modules() if isinstance(one, nn.modules.dropout._DropoutNd))])
