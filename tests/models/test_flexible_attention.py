"""Which keys FlexAttention is told a query sees: those of the mask that plain attention has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from shardwise.models import flexible_attention
from shardwise.models.dot_product import AttentionArguments, attention_from
from shardwise.models.flexible_attention import BLOCK, _options, block_mask


@given(
    st.integers(1, 700),
    st.booleans(),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 5),
    st.integers(0, 99),
)
def test_blocks_and_scores_are_those_of_the_mask(
    seq: int, causal: bool, window: int | None, documents: int | None, seed: int
) -> None:
    torch.manual_seed(seed % 99)
    numbered = None if documents is None else torch.randint(0, documents, (2, seq)).sort(dim=1).values
    blocks = block_mask(seq, torch.device("cpu"), numbered, causal=causal, window=window)
    # Values that are the keys' places show in the output whom a query sees, however little it gives to each.
    query = key = torch.zeros(2, seq, 1, 1, dtype=torch.float64)
    shares = attention_from(
        query, key, torch.eye(seq, dtype=torch.float64).expand(2, 1, -1, -1).transpose(1, 2),
        AttentionArguments(causal, window, 1.0, numbered), 0,
    )[:, :, 0]  # fmt: skip
    batch, row, column = torch.arange(2)[:, None, None], torch.arange(seq)[None, :, None], torch.arange(seq)
    assert torch.equal(blocks.mask_mod(batch, batch, row, column).expand(2, seq, seq), shares > 0)

    count = -(-seq // BLOCK)
    padded = torch.zeros(2, count * BLOCK, count * BLOCK, dtype=torch.bool)
    padded[:, :seq, :seq] = shares > 0
    padded[:, seq:, :seq], padded[:, :, seq:] = padded[:, seq - 1 : seq, :seq], padded[:, :, seq - 1 : seq]
    tiles = padded.unflatten(2, (count, BLOCK)).unflatten(1, (count, BLOCK)).transpose(2, 3)
    whole, partly = (
        _tiles(blocks.full_kv_num_blocks, blocks.full_kv_indices),
        _tiles(blocks.kv_num_blocks, blocks.kv_indices),
    )
    assert not (whole & partly).any()
    assert (tiles.flatten(3).all(-1) | ~whole).all()  # no mask is applied to these
    assert ((whole | partly) | ~tiles.flatten(3).any(-1)).all()  # others are skipped
    options = _options(torch.zeros(1, seq, 1, 64), plain=window is None and documents is None)
    if options["ROWS_GUARANTEED_SAFE"]:  # the kernel takes a key that each query sees for granted in its first block
        first = torch.where(partly.any(-1), partly.int().argmax(-1), whole.int().argmax(-1))
        seen_first = tiles.gather(2, first[..., None, None, None].expand(-1, -1, 1, BLOCK, BLOCK))[:, :, 0]
        assert seen_first.any(-1).all()


def _tiles(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """As a table [2, blocks of queries, blocks of keys]."""
    found = torch.zeros(indices[:, 0].shape, dtype=torch.bool)
    for place in zip(*torch.nonzero(torch.ones_like(counts[:, 0]), as_tuple=True)):
        found[(*place, indices[:, 0][place][: counts[:, 0][place]].long())] = True
    return found.expand(2, -1, -1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_sinks_and_caps_are_those_of_plain_matmuls(
    window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it has no backward pass; `test_flexible_attention_gpu.py` has that."""
    monkeypatch.setattr(flexible_attention, "_compiled", lambda: flex_attention)
    random = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, 200, heads, 16, generator=random) for heads in (4, 2, 2)]
    documents = torch.randint(0, 4, (2, 200), generator=random).sort(dim=1).values if packed else None
    for sinks, softcap in ((torch.linspace(-1, 2, 4), None), (torch.linspace(-1, 2, 4), 1.5), (None, 1.5)):
        found = flexible_attention.attention(
            *tensors, documents, sinks, causal=True, window=window, scale=0.25, softcap=softcap
        )
        arguments = AttentionArguments(True, window, 0.25, documents, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(found, attention_from(*tensors, arguments, 0), rtol=0, atol=1e-5)
