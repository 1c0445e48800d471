"""Attention with capped scores or sinks, also with a window or within documents: PyTorch's FlexAttention, for GPUs.

It compiles a kernel with the cap, which PyTorch's other fused kernels do not support. Blocks of keys that no query of a
block sees are skipped; they are found from the first and last token of each block, not from a mask of all scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from shardwise.models.sinks import share_of_keys

BLOCK = 128  # tokens, as FlexAttention's own masks have
MOST_FEATURES = 256  # of a head
# Tiles for wide heads on Hopper: 1.4 times as fast forward, 1.3 times backward as those FlexAttention takes there
# (PyTorch 2.11, H200, heads of 256, two rows of 8,192 tokens).
WIDE_ON_HOPPER = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 8, "bwd_num_warps": 8,
}  # fmt: skip
_Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def takes(query: Tensor, value: Tensor) -> bool:
    """Whether its kernel is for these tensors: on a GPU, in half precision."""
    return query.is_cuda and fits(query.dtype, query.shape[-1], value.shape[-1])


def fits(dtype: torch.dtype, features: int, value_features: int) -> bool:
    sizes = (features, value_features)
    return dtype in (torch.bfloat16, torch.float16) and min(sizes) >= 16 and max(sizes) <= MOST_FEATURES


def attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, sinks: Tensor | None = None, *,
    causal: bool, window: int | None, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention of tensors [batch, seq, heads, features]; ``window`` counts the query's own key."""
    blocks = block_mask(query.shape[1], query.device, documents, causal=causal, window=window)
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    attended: Any = attend(
        query, key, value, None if softcap is None else _capped(softcap), blocks, scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
        kernel_options=_options(query, plain=window is None and documents is None),
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is not None:
        attended, more = attended
        attended = attended * share_of_keys(more.lse, sinks).unsqueeze(-1).to(attended.dtype)
    result: Tensor = attended.transpose(1, 2)
    return result


def block_mask(
    seq: int, device: torch.device, documents: Tensor | None, *, causal: bool, window: int | None
) -> BlockMask:
    """Which blocks of keys a block of queries sees in part, which completely; ``documents`` are numbered in order."""
    first = torch.arange(0, seq, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp(max=seq - 1)
    nearest, farthest = first[:, None] - last[None, :], last[:, None] - first[None, :]  # keys behind queries
    some, whole = torch.ones_like(nearest, dtype=torch.bool), torch.ones_like(nearest, dtype=torch.bool)
    if causal:
        some, whole = some & (farthest >= 0), whole & (nearest >= 0)
    if window is not None:
        some, whole = some & (nearest < window), whole & (farthest < window)
        if not causal:
            some, whole = some & (farthest > -window), whole & (nearest > -window)
    some, whole = some[None], whole[None]
    if documents is not None:
        begins, ends = documents[:, first], documents[:, last]
        some = some & (begins[:, :, None] <= ends[:, None, :]) & (begins[:, None, :] <= ends[:, :, None])
        same = (begins == ends)[:, :, None] & (begins == ends)[:, None, :]
        whole = whole & same & (begins[:, :, None] == begins[:, None, :])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=_seen(causal, window, documents),
        seq_lengths=(seq, seq),
    )  # fmt: skip


def _options(query: Tensor, *, plain: bool) -> dict[str, Any]:
    """Options that let the kernel skip checks; ``plain``: there is neither a window nor documents.

    Then the blocks that a query sees are adjacent, and every query sees a key of the first one. With a window, a query
    may see no key of a block that another query needs: without the check its sums would be NaN.
    """
    wide = query.shape[-1] > 128 and _is_hopper(query.device)
    return {"ROWS_GUARANTEED_SAFE": plain, "BLOCKS_ARE_CONTIGUOUS": plain, **(WIDE_ON_HOPPER if wide else {})}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9 and torch.version.cuda is not None


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, the number of marked blocks of keys, and all blocks of keys with the marked first."""
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()


def _seen(causal: bool, window: int | None, documents: Tensor | None) -> _Seen:
    within, numbered = _within(causal, window), documents
    if numbered is None:
        return within

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return within(batch, head, query, key) & (numbered[batch, query] == numbered[batch, key])

    return same_document


def _within(causal: bool, window: int | None) -> _Seen:
    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        behind = query - key
        seen = behind >= 0 if causal else behind == behind
        if window is None:
            return seen
        return seen & (behind < window) if causal else (behind < window) & (behind > -window)

    return within


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # c·tanh(x/c), by the exponential that the softmax has too: tanh itself takes a kernel several times as long
        return softcap * (2 * torch.sigmoid(score * (2 / softcap)) - 1)

    return capped


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)
