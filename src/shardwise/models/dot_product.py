"""Scaled dot-product attention, the default ``attend`` of the attention modules, and its kernel for packed rows.

The kernel needs no mask: with one, attention would cost as much as over whole rows, and keys would have to be repeated
for every query head.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from shardwise.models import flash_attention_4, flexible_attention
from shardwise.models.loss import softly_capped

MOST_FEATURES = 256  # of a head, in FlashAttention-2
# From PyTorch 2.12 on, grouped heads must be declared.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def document_bounds(documents: Tensor, most: int) -> Tensor:
    """Where the documents of all rows [batch, seq], laid end to end, begin and end: int32 [batch · most + 1].

    ``most`` is at least the number of documents in any row; the host has to know it without waiting for the device.
    """
    tokens = documents.numel()
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.nonzero_static(begins.flatten(), size=documents.shape[0] * most, fill_value=tokens)
    return torch.cat([starts[:, 0], starts.new_full((1,), tokens)]).to(torch.int32)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the packed kernel can run on these tensors: on a GPU only."""
    return query.is_cuda and shapes_taken(query, key, value)


def shapes_taken(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether their formats and shapes suit it: half precision, heads of one size."""
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


SCORES_AT_ONCE = 2**26  # a quarter of a GiB in fp32


@dataclass(frozen=True)
class AttentionArguments:
    """Which keys a query sees, how scores are scaled, and what else a layer has to know of its tokens."""

    causal: bool
    window: int | None  # number of keys that a query sees, its own included
    scale: float
    documents: Tensor | None = None
    """Numbers of the documents packed into each row [batch, seq]: a query sees only keys of its own."""
    positions: Tensor | None = None
    """Given by the caller (None: 0, 1, 2 ... along the row); the order of tokens for those who reorder rows."""
    bounds: Tensor | None = None  # the same as `documents`, by `document_bounds`; where known
    softcap: float | None = None  # makes c·tanh(x/c) of the scaled scores
    sinks: Tensor | None = None  # a logit of each query head, in the denominator of its softmax alone [heads]
    query_factor: Tensor | None = None  # of each token's queries [batch or 1, seq, 1, 1], before they meet keys
    token_keys: Tensor | None = None  # what dropout follows (`models.dropout.keys_in_layer`); None: without it


def dot_product_attention(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
    """Attention of tensors [batch, seq, heads, features]; each key head serves an equal share of query heads.

    The tokens of a row are in sequence order.
    """
    reach = _window(query.shape[1], arguments)
    bounded = arguments.documents is None or arguments.bounds is not None
    if arguments.softcap is None and bounded and flash_attention_4.takes(query, key, value):
        bounds = None if arguments.documents is None else arguments.bounds
        return flash_attention_4.attention(
            query, key, value, bounds, arguments.sinks, causal=arguments.causal, window=reach, scale=arguments.scale
        )
    changed = arguments.softcap is not None or arguments.sinks is not None
    if changed and flexible_attention.takes(query, value):
        return flexible_attention.attention(
            query, key, value, arguments.documents, arguments.sinks,
            causal=arguments.causal, window=reach, scale=arguments.scale, softcap=arguments.softcap,
        )  # fmt: skip
    if changed:
        return _attention_in_pieces(query, key, value, arguments)
    bounds = _bounds(query, arguments) if takes(query, key, value) else None
    if bounds is not None:
        return packed_attention(query, key, value, bounds, causal=arguments.causal, window=reach, scale=arguments.scale)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask = attention_mask(query.shape[2], query.device, arguments)
    grouped = key.shape[1] != query.shape[1]
    if grouped and mask is not None:
        # With a mask, only kernels without grouped heads are fast.
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        grouped = False
    causal = arguments.causal and mask is None
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=arguments.scale, enable_gqa=grouped
    )
    return attended.transpose(1, 2)


def unfused_attention(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
    """The same by plain matmuls: all scores are materialised, and their softmax is kept for the backward pass."""
    return attention_from(query, key, value, arguments, 0)


def attention_from(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments, start: int) -> Tensor:
    """Attention of the queries from position ``start`` on to all keys, whose ``documents`` are given."""
    batch, rows, heads, features = query.shape
    groups, seq = key.shape[2], key.shape[1]
    # The query heads of a key head lie one after the other, so that no key is repeated.
    grouped = (query * arguments.scale).transpose(1, 2).reshape(batch, groups, -1, features)
    scores = (grouped @ key.permute(0, 2, 3, 1)).view(batch, heads, rows, seq)
    scores = softly_capped(scores, arguments.softcap)
    mask = attention_mask(seq, query.device, arguments, slice(start, start + rows))
    if mask is None and arguments.causal:
        mask = torch.ones((rows, seq), dtype=torch.bool, device=query.device).tril(start)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if arguments.sinks is None:
        shares = scores.softmax(-1)
    else:
        sinks = arguments.sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, -1, rows, -1)
        shares = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    shares = shares.reshape(batch, groups, -1, seq)
    return (shares @ value.transpose(1, 2)).view(batch, heads, rows, -1).transpose(1, 2)


def _attention_in_pieces(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
    """Some queries at a time, with scores recomputed in the backward pass: for a CPU, and for fp32."""
    batch, seq, heads, _ = query.shape
    each = max(1, SCORES_AT_ONCE // (batch * heads * seq))
    parts = [
        checkpoint(
            attention_from,
            query[:, at : at + each],
            key,
            value,
            arguments,
            at,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for at in range(0, seq, each)
    ]
    return torch.cat(parts, dim=1)


def _bounds(query: Tensor, arguments: AttentionArguments) -> Tensor | None:
    """Bounds for the packed kernel; None for plain attention, or if the documents' bounds are not known."""
    if arguments.documents is not None:
        return arguments.bounds
    batch, seq = query.shape[:2]
    if _window(seq, arguments) is None:
        return None
    return torch.arange(0, batch * seq + 1, seq, dtype=torch.int32, device=query.device)


def _window(seq: int, arguments: AttentionArguments) -> int | None:
    return arguments.window if arguments.window is not None and arguments.window < seq else None


def attention_mask(
    seq: int, device: torch.device, arguments: AttentionArguments, rows: slice = slice(None)
) -> Tensor | None:
    """True where a query of ``rows`` sees a key [columns]; None where plain (causal) attention suffices."""
    window = _window(seq, arguments)
    if window is None and arguments.documents is None:
        return None
    index = torch.arange(seq, device=device)
    behind = index[rows, None] - index[None, :]
    seen = behind >= 0 if arguments.causal else torch.ones_like(behind, dtype=torch.bool)
    if window is not None:
        seen = seen & (behind < window) if arguments.causal else behind.abs() < window
    if arguments.documents is None:
        return seen
    same = arguments.documents[:, rows, None] == arguments.documents[:, None, :]
    return (seen & same)[:, None]
