"""Bytes that context parallelism sends in a step, derived by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cost.builders import (
    GPT,
    LLAMA,
    job,
    named,
    ring,
    sent,
    traffics,
)

# One sequence of 128 tokens over 4 ranks; keys and values of 2 heads of 8, 2 bytes.
KEYS_VALUES = 128 * 2 * 2 * 8 * 2


def test_ring_attention_sends_keys_and_values_and_their_gradients() -> None:
    case = job(LLAMA, dp=1, cp=4)
    forward, backward = traffics(case, "cp")
    assert forward.bytes_sent == pytest.approx(8 * 3 / 4 * KEYS_VALUES)
    assert backward.bytes_sent == pytest.approx(8 * 2 * 3 / 4 * KEYS_VALUES)
    assert (forward.window, backward.window) == ("attention forward", "attention backward")


def test_gathered_context_is_gathered_twice_and_its_gradients_scattered() -> None:
    found = traffics(ring(LLAMA, cp=4, context_method="all-gather"), "cp")
    assert sent(found) == pytest.approx(8 * 3 * 3 / 4 * KEYS_VALUES)
    assert {t.window for t in found} == {"none"}


def test_ulysses_exchanges_queries_keys_values_and_output() -> None:
    """(2h + 2h_kv)·b·s/c·e·(c−1)/c each way; 2 key-value heads are repeated to one per rank, 4."""
    found = traffics(job(LLAMA, dp=1, cp=4, context_method="ulysses", collective="direct"), "cp")
    one_way = (2 * 64 + 2 * 4 * 8) * 128 / 4 * 2 * 3 / 4
    assert sent(found) == pytest.approx(8 * 2 * one_way)


def test_ulysses_of_multi_head_attention_is_the_papers_4_n_h_over_p() -> None:
    found = traffics(job(GPT, dp=1, cp=4, context_method="ulysses", collective="direct"), "cp")
    (forward,) = named(found, "q, k, v and output, forward")
    assert forward.count * forward.size_bytes == pytest.approx(8 * 4 * 128 * 64 / 4 * 2)


def test_tensor_parallelism_divides_what_context_parallelism_sends() -> None:
    whole, split, repeated = (sent(traffics(job(LLAMA, dp=1, cp=2, tp=tp), "cp")) for tp in (1, 2, 4))
    assert split == whole / 2
    assert repeated == split  # 2 key-value heads


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [
        ({}, 1),
        ({"recompute": "full"}, 2),
        ({"recompute": "full", "recompute_layers": 2}, 1.25),
    ],
)
def test_recompute_repeats_the_forward_exchange(strategy: dict[str, Any], passes: float) -> None:
    forward, _ = traffics(job(LLAMA, dp=1, cp=4, **strategy), "cp")
    assert forward.bytes_sent == pytest.approx(passes * 8 * 3 / 4 * KEYS_VALUES)
