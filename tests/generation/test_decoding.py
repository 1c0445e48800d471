"""Tokens: those of transformers for every family, the same with and without a cache, in any batch, on any ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.workers import on_ranks
from generation.cases import NEW, PROMPTS, folder_of, model_of, theirs, tokens_of, tokens_on_rank
from models.families import CASES
from models.shapes import SHAPES, decoder_of, tokens
from shardwise.generation import decoding as caches
from shardwise.generation.decoding import NextToken, cached, next_tokens, random_numbers
from shardwise.generation.request import GenerationRequest, Sampling
from shardwise.models import Decoder
from shardwise.models.dot_product import dot_product_attention

# Learned positions, grouped heads, a window, normed heads, experts, latent attention, two kinds of layers with caps.
QUICK = ["gpt2", "llama", "mistral-window", "qwen3", "mixtral", "deepseek-v2", "deepseek-v3-yarn", "gemma2"]
LONGROPE = "phi3-long"  # refused beyond its original length, which these prompts pass
FAMILIES: list[Any] = [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in CASES if one not in QUICK)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", [one for one in FAMILIES if LONGROPE not in getattr(one, "values", ())])
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In one batch of prompts of unequal length, against each prompt by itself."""
    library, request = folder_of(case, tmp_path)
    # Given a window that it does not have, the library's Gemma keeps no more keys than that.
    wanted = theirs(library, use_cache=case != "gemma")
    model = model_of(request)
    found = tokens_of(model, request)
    assert found == wanted
    assert found == tokens_of(model, request, cache=False)
    assert found == [tokens_of(model, request, [prompt])[0] for prompt in PROMPTS]
    assert all(len(one) == NEW for one in found) and len({token for one in found for token in one}) > 1


def test_a_text_ends_at_the_token_that_ends_it(tmp_path: Path) -> None:
    """Each row by itself, as the library does; the others go on in a smaller batch."""
    library, request = folder_of("llama", tmp_path)
    model = model_of(request)
    free = tokens_of(model, request)
    ends = (free[0][2], free[1][5])
    wanted = [
        one[: next((place for place, token in enumerate(one) if token in ends), NEW) + 1]
        for one in theirs(library, eos_token_id=list(ends))
    ]
    assert len({len(one) for one in wanted}) > 1
    for cache in (True, False):
        assert tokens_of(model, request, stop=ends, cache=cache) == wanted


@pytest.mark.quick(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_changes_nothing(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many allocations, with windows left behind, in every kind of layer."""
    monkeypatch.setattr(caches, "ROOM", 3)
    decoder = decoder_of(SHAPES[shape]).eval()
    model, request = NextToken(decoder), GenerationRequest("", max_new_tokens=30)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (17, 3, 8)]
    assert tokens_of(model, request, prompts) == tokens_of(model, request, prompts, cache=False)


@torch.inference_mode()
@pytest.mark.parametrize("shape", ["window", "mla"])
def test_a_decoder_is_as_before_when_the_cache_is_gone(shape: str) -> None:
    decoder, ids = decoder_of(SHAPES[shape]).eval(), tokens()
    before = decoder(ids)
    with cached(decoder):
        parts = [decoder(ids[:, :9]), *(decoder(ids[:, at : at + 1], positions=torch.tensor([[at]])) for at in (9, 10))]
    torch.testing.assert_close(torch.cat(parts, 1), before[:, :11], rtol=1e-4, atol=1e-4)
    for layer in decoder.layers.values():
        attention: Any = layer.attention
        assert attention.attend is dot_product_attention and "expand" not in attention.__dict__
    assert torch.equal(decoder(ids), before)


def test_what_a_cache_keeps_is_what_later_tokens_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's keys are dropped; of latent attention one vector a token is kept, whatever the number of heads."""
    monkeypatch.setattr(caches, "ROOM", 4)
    with torch.inference_mode():
        for shape, index, features, most in (("window", "0", 8, 9), ("window", "1", 8, 44), ("mla", "0", 12, 44)):
            decoder = decoder_of(SHAPES[shape]).eval()
            with cached(decoder) as cache:
                decoder(tokens(2, 30))
                for at in range(30, 40):
                    decoder(tokens(2, 1), positions=torch.tensor([[at]]))
                layer: Any = cache.layers[decoder.layers[index].attention]  # type: ignore[index]
                kept = (layer.columns if shape == "mla" else layer.keys)._kept
            heads = 1 if shape == "mla" else 2
            assert kept.shape[:2] == (2, heads) and kept.shape[3] == features and kept.shape[2] <= most


# -- ranks -------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("case", "tp"),
    [("gpt2", 2), ("mixtral", 2), ("deepseek-v3", 2), ("llama-biased", 4),
     *(pytest.param(one, 2, marks=pytest.mark.slow) for one in ("qwen2-moe", "gemma2", "olmo2", "mistral-window"))],
)  # fmt: skip
def test_tensor_parallel_ranks_give_the_same_tokens(case: str, tp: int, tmp_path: Path) -> None:
    """The vocabulary of 61 is padded; with 4 ranks two hold the same key-value head."""
    library, request = folder_of(case, tmp_path)
    found = on_ranks(tp, tokens_on_rank, replace(request, tp=tp))
    assert found == [theirs(library)] * tp


def drawn_differently(request: GenerationRequest) -> list[list[int]]:
    """Ranks whose random numbers differ, as their logits might."""
    import torch.distributed as dist

    return tokens_on_rank(replace(request, sampling=Sampling(1.0, seed=dist.get_rank())))


def test_ranks_that_would_choose_differently_follow_the_first(tmp_path: Path) -> None:
    _, request = folder_of("llama", tmp_path)
    alone = tokens_of(model_of(request), request, sampling=Sampling(1.0))
    assert on_ranks(2, drawn_differently, replace(request, tp=2)) == [alone, alone]


# -- sampling ----------------------------------------------------------------------------------------------


def frequencies(sampling: Sampling, logits: torch.Tensor, draws: int = 5_000) -> torch.Tensor:
    generators = [random_numbers(sampling, number) for number in range(draws)]
    counts = Counter(next_tokens(logits.expand(draws, -1), sampling, generators).tolist())
    return torch.tensor([counts[token] / draws for token in range(logits.numel())])


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 1.9])
    plain = (logits / 0.8).softmax(0)
    torch.testing.assert_close(frequencies(Sampling(0.8), logits), plain, rtol=0, atol=0.025)
    three = plain.where(torch.tensor([False, True, False, True, False, True]), 0.0)
    torch.testing.assert_close(frequencies(Sampling(0.8, top_k=3), logits), three / three.sum(), rtol=0, atol=0.025)
    assert plain[[1, 5]].sum() < 0.8 < plain[[1, 5, 3]].sum()
    torch.testing.assert_close(frequencies(Sampling(0.8, top_p=0.8), logits), three / three.sum(), rtol=0, atol=0.025)
    two = three.where(torch.tensor([False, True, False, False, False, True]), 0.0)
    both = Sampling(0.8, top_k=3, top_p=float(two.sum() / three.sum()) - 0.01)
    torch.testing.assert_close(frequencies(both, logits), two / two.sum(), rtol=0, atol=0.025)
    for certain in (Sampling(0.8, top_p=1e-9), Sampling(5.0, top_k=1)):
        assert frequencies(certain, logits, 50)[1] == 1


def test_a_text_drawn_depends_on_its_seed_and_place_not_on_its_batch() -> None:
    decoder: Decoder = decoder_of(SHAPES["dense"]).eval()
    model, request = NextToken(decoder), GenerationRequest("", max_new_tokens=9, sampling=Sampling(1.2, seed=4))
    together = tokens_of(model, request, [PROMPTS[0]] * 3)
    assert len({tuple(one) for one in together}) == 3
    assert together == tokens_of(model, request, [PROMPTS[0]] * 3)
    assert tokens_of(model, request, [PROMPTS[0], *PROMPTS])[0] == together[0]
    assert tokens_of(model, request, [PROMPTS[0]], sampling=Sampling(1.2, seed=5))[0] != together[0]
