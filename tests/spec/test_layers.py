"""Layers as data: what a pattern stands for, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import SpecError
from shardwise.spec.layers import LayerRecord, layers_of_pattern, pattern_of_layers
from shardwise.spec.model import MixtureOfExperts, Model

SHAPE: dict[str, Any] = {"layers": 12, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 64}
EXPERTS = MixtureOfExperts(experts=4, top_k=2, ffn=32)
DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8}
FULL, WINDOW = LayerRecord(), LayerRecord(mixer="window")
MIXTURE = LayerRecord(feed_forward="mixture")


@given(st.lists(st.sampled_from([FULL, WINDOW, MIXTURE, LayerRecord(rotary=False)]), min_size=1, max_size=40))
def test_the_shortest_pattern_of_layers_stands_for_them(layers: list[LayerRecord]) -> None:
    pattern = pattern_of_layers(layers)
    assert layers_of_pattern(pattern, len(layers)) == tuple(layers)
    assert sum(record.repeat for record in pattern) <= len(layers)


def test_a_pattern_begins_again() -> None:
    model = Model(**SHAPE, sliding_window=16, pattern=(replace(WINDOW, repeat=3), FULL))
    assert model.every_layer == 3 * (WINDOW, WINDOW, WINDOW, FULL)
    assert [(kind.mixer, count) for kind, count in model.layers_of_kinds] == [("window", 9), ("full", 3)]


@pytest.mark.parametrize("every", [1, 2, 5])
def test_windows_follow_without_a_pattern(every: int) -> None:
    usual = Model(**SHAPE, sliding_window=16, sliding_window_every=every)
    written = replace(usual, sliding_window_every=1, pattern=pattern_of_layers(usual.every_layer))
    assert written.every_layer == usual.every_layer
    assert [layer.mixer for layer in usual.every_layer].count("full") == (12 // every if every > 1 else 0)


def test_experts_follow_without_a_pattern() -> None:
    usual = Model(**SHAPE, moe=replace(EXPERTS, dense_layers=2, every=3), mtp_layers=1)
    assert [index for index, layer in enumerate(usual.every_layer) if layer.feed_forward == "mixture"] == [4, 7, 10, 12]
    assert usual.moe_layers == 3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pattern": [{"mixer": "window"}]}, "sliding_window"),
        ({"pattern": [{"mixer": "chunk"}]}, "attention_chunk"),
        ({"pattern": [{"feed_forward": "mixture"}]}, "moe"),
        ({"pattern": [{"mixer": "delta"}]}, "delta"),
        ({"pattern": [{}], "delta": DELTA}, "delta"),
        ({"delta": {**DELTA, "key_heads": 3}}, "delta.key_heads"),
        ({"pattern": [{}], "attention_chunk": 8}, "attention_chunk"),
        ({"pattern": [{}], "moe": EXPERTS}, "moe"),
        ({"pattern": [{"mixer": "window"}], "sliding_window": 4, "sliding_window_every": 2}, "sliding_window_every"),
        ({"pattern": [{"feed_forward": "mixture"}], "moe": replace(EXPERTS, every=2)}, "moe.every"),
        ({"pattern": [{"mixer": "mamba"}]}, "pattern[0].mixer"),
        ({"pattern": [{"repeat": 0}]}, "pattern[0].repeat"),
        ({"pattern": [{"repeat": 10**9}]}, "pattern[0].repeat"),
    ],
)
def test_a_pattern_that_contradicts_the_model_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        Model.from_dict({**SHAPE, **fields})
    assert refused.value.field == field
