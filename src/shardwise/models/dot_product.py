"""Scaled dot-product attention, the default ``attend`` of the attention modules, and its kernel for packed rows.

A mask would cost as much as attention over whole rows, with keys repeated for every query head.
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

from shardwise.models.loss import softly_capped

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


# -- dot product -----------------------------------------------------------------------------------
#
# Scaled dot-product attention: the default of what the attention modules call ``attend``.


SCORES_AT_ONCE = 2**26  # a quarter of a GiB in fp32


@dataclass(frozen=True)
class AttentionArguments:
    """Which keys a query sees, and how their products are scaled.

    ``window`` is the number of keys a query sees, itself among them. ``documents`` [batch, seq] numbers the
    documents packed into each row: a query sees only keys of its own. ``positions`` are those the caller gave
    (None: 0, 1, 2 ... along the row); who attends over rows in another order finds the order there. ``bounds`` say the
    same as ``documents`` where they are known (`document_bounds`). ``softcap`` c makes c·tanh(x/c) of the scaled
    products.
    """

    causal: bool
    window: int | None
    scale: float
    documents: Tensor | None = None
    positions: Tensor | None = None
    bounds: Tensor | None = None
    softcap: float | None = None


def dot_product_attention(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
    """Attention of tensors [batch, seq, heads, features]; each key head serves an equal share of query heads.

    The tokens of a row stand in the order of time.
    """
    if arguments.softcap is not None:
        return _capped_attention(query, key, value, arguments)
    bounds = _bounds(query, arguments) if takes(query, key, value) else None
    if bounds is not None:
        reach = _window(query.shape[1], arguments)
        return packed_attention(query, key, value, bounds, causal=arguments.causal, window=reach, scale=arguments.scale)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask = attention_mask(query.shape[2], query.device, arguments)
    grouped = key.shape[1] != query.shape[1]
    if grouped and mask is not None:
        # With a mask, only kernels that know nothing of grouped heads are quick.
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        grouped = False
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=arguments.causal and mask is None,
        scale=arguments.scale,
        enable_gqa=grouped,
    )
    return attended.transpose(1, 2)


def unfused_attention(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
    """The same by plain matmuls: the scores of all pairs of tokens exist, and their softmax is kept."""
    return _attended_from(query, key, value, arguments, 0)


def _attended_from(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments, start: int) -> Tensor:
    """Of the queries from place ``start`` on, to all keys."""
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
    shares = scores.softmax(-1).view(batch, groups, -1, seq)
    return (shares @ value.transpose(1, 2)).view(batch, heads, rows, -1).transpose(1, 2)


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
    """Some queries at a time, whose scores are made again in the backward pass: torch's fused kernels have no cap."""
    batch, seq, heads, _ = query.shape
    each = max(1, SCORES_AT_ONCE // (batch * heads * seq))
    parts = [
        checkpoint(_attended_from, query[:, at : at + each], key, value, arguments, at, use_reentrant=False)
        for at in range(0, seq, each)
    ]
    return torch.cat(parts, dim=1)


def _bounds(query: Tensor, arguments: AttentionArguments) -> Tensor | None:
    """Of what a query sees, where more than plain attention has to be said and it is known."""
    if arguments.documents is not None:
        return arguments.bounds
    batch, seq = query.shape[:2]
    return None if _window(seq, arguments) is None else row_bounds(batch, seq, query.device)


def _window(seq: int, arguments: AttentionArguments) -> int | None:
    return arguments.window if arguments.window is not None and arguments.window < seq else None


def attention_mask(
    seq: int, device: torch.device, arguments: AttentionArguments, rows: slice = slice(None)
) -> Tensor | None:
    """True where a query of ``rows`` sees a key [columns]; None where plain (causal) attention says it all."""
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
