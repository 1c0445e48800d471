"""First values: of each parameter by itself, whatever else is there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from models.shapes import SHAPES
from shardwise.models import Decoder, decoder, initial_value, initialise

MOE = SHAPES["moe"]


def values(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_every_parameter_has_its_initial_value_whichever_comes_first(model: object) -> None:
    assert model in SHAPES.values()
    decoder = Decoder(model)  # type: ignore[arg-type]
    initialise(reversed(list(decoder.named_parameters())), 5, decoder.model)
    for name, value in values(decoder).items():
        assert torch.equal(value, initial_value(name, value.shape, 5, decoder.model)), name


def test_a_part_of_a_model_starts_like_the_whole() -> None:
    whole, part = Decoder(MOE), Decoder(MOE)
    part.embedding = None
    del part.layers["0"], part.layers["1"]
    initialise(whole, 1, MOE)
    initialise(part, 1, MOE)
    expected = values(whole)
    assert all(torch.equal(value, expected[name]) for name, value in values(part).items())


def test_some_experts_are_a_slice_of_all() -> None:
    name, shape = "layers.1.mlp.experts.down", (8, 16, 32)
    whole = initial_value(name, shape, 0, MOE)
    assert torch.equal(initial_value(name, shape, 0, MOE, experts=range(2, 5)), whole[2:5])
    assert not torch.equal(whole[0], whole[1])


def test_a_tied_head_that_lives_apart_starts_as_the_embedding() -> None:
    model = SHAPES["gpt"]
    shape = (model.vocab, model.hidden)
    head, embedding = (initial_value(name, shape, 0, model) for name in ("head.weight", "embedding.weight"))
    assert torch.equal(head, embedding)
    untied = replace(model, tied_embeddings=False)
    assert not torch.equal(initial_value("head.weight", shape, 0, untied), embedding)


def test_sizes_are_those_of_gpt2() -> None:
    model = SHAPES["dense"]
    draw = initial_value("layers.0.attention.query.weight", (400, 400), 0, model)
    assert float(draw.std()) == pytest.approx(0.02, rel=0.02) and abs(float(draw.mean())) < 2e-4
    for name in ("layers.0.attention.output.weight", "layers.0.mlp.down.weight", "layers.1.mlp.shared.down.weight"):
        back = initial_value(name, (400, 400), 0, model)
        assert float(back.std()) == pytest.approx(0.02 / (2 * model.layers) ** 0.5, rel=0.02)
    assert torch.equal(initial_value("layers.0.attention.query_norm.weight", (9,), 0, model), torch.ones(9))
    assert torch.equal(initial_value("layers.0.attention.query.bias", (9,), 0, model), torch.zeros(9))
    assert torch.equal(initial_value("layers.0.mlp.experts.up_bias", (8, 9), 0, model), torch.zeros(8, 9))


@pytest.mark.slow
def test_values_differ_by_seed_and_name_and_not_by_process() -> None:
    def value(name: str, seed: int) -> list[float]:
        return initial_value(name, (2, 2), seed, MOE).flatten().tolist()

    assert value("head.weight", 0) != value("head.weight", 1) != value("embedding.weight", 1)
    code = (
        "from shardwise.models import initial_value; from shardwise.spec.model import Model;"
        "m = Model(layers=1, hidden=2, heads=1, ffn=2, vocab=2);"
        "print(initial_value('head.weight', (2, 2), 0, m).flatten().tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(value("head.weight", 0))


def test_a_model_made_on_no_device_is_filled_wholly() -> None:
    with torch.device("meta"):
        decoder = Decoder(SHAPES["mla"])
    decoder.to_empty(device="cpu")
    initialise(decoder, 0, SHAPES["mla"])
    fresh = Decoder(SHAPES["mla"])
    initialise(fresh, 0, SHAPES["mla"])
    assert all(torch.equal(a, b) for a, b in zip(decoder.buffers(), fresh.buffers()))
    ids = torch.arange(12)[None]
    assert torch.equal(decoder(ids), fresh(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_drawn_in_parts_is_the_whole_one_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = initial_value("embedding.weight", (100, 48), 7, MOE)
    monkeypatch.setattr(decoder, "DRAWN_AT_ONCE", 1024)
    assert torch.equal(initial_value("embedding.weight", (100, 48), 7, MOE, dtype), whole.to(dtype))
