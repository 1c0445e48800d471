"""Attention of packed documents and of sliding windows on a GPU, by the kernel for sequences of unequal lengths.

A mask would cost as much as attention over whole rows, with keys repeated for every query head.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

MOST_FEATURES = 256  # of a head, in FlashAttention-2
# Before PyTorch 2.12 it is not said that a key serves several query heads.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def document_bounds(documents: Tensor, most: int) -> Tensor:
    """Where the documents of all rows [batch, seq] begin and end, one behind the other: int32 [batch · most + 1].

    ``most`` is at least the number of documents in any row, which the host has to know: it does not wait to count.
    """
    tokens = documents.numel()
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = torch.nonzero_static(begins.flatten(), size=documents.shape[0] * most, fill_value=tokens)
    return torch.cat([found[:, 0], found.new_full((1,), tokens)]).to(torch.int32)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel does: on a GPU only."""
    return query.is_cuda and shapes_taken(query, key, value)


def shapes_taken(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Half precision, heads of one size."""
    features = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and features == value.shape[-1] and features <= MOST_FEATURES and features % 8 == 0


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, causal: bool, window: int | None, scale: float
) -> Tensor:
    """Attention within ``bounds``, of tensors [batch, seq, heads, features]; ``window`` counts the query's own key."""
    batch, seq = query.shape[:2]
    reach = -1 if window is None else window - 1
    rows, keys, values = (tensor.flatten(0, 1) for tensor in (query, key, value))
    seen = (reach, 0 if causal else reach)
    attended: Any = varlen_attn(rows, keys, values, bounds, bounds, seq, seq, scale=scale, window_size=seen, **_GROUPED)
    result: Tensor = torch.unflatten(attended, 0, (batch, seq))
    return result


def row_bounds(batch: int, seq: int, device: torch.device) -> Tensor:
    """The bounds of whole rows."""
    return torch.arange(0, batch * seq + 1, seq, dtype=torch.int32, device=device)
