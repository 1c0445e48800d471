"""Multi-token prediction: by hand on one device, and under every layout as in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.layouts import job_of, model_named
from engine.parity import check
from shardwise.engine.batch import Batch
from shardwise.layout.stages import built_layers, embedding_on_both_ends
from shardwise.models import Decoder, initialise
from shardwise.models.layer import Layer, PredictionLayer, ahead_of
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count
from shardwise.spec.support import verdict


def predicting(name: str, modules: int = 1) -> Model:
    model = model_named(name)
    return replace(model, mtp_layers=modules, published_parameters=None)


def run(name: str, modules: int = 1, **fields: Any) -> None:
    job = job_of(predicting(name, modules), fields)
    assert job is not None and verdict(job).status == "runs"
    check(job)


CHUNKS = {"schedule": "interleaved", "interleave": 2}
QUICK = {
    "one device": ("tiny-mla", {"dp": 1}),
    "stages and tensors": ("tiny-mla", {"pp": 2, "tp": 2, "dp": 1, "schedule": "1f1b"}),
    "stages and experts": ("tiny-mla", {"pp": 2, "dp": 2, "ep": 2, "zero": 1} | CHUNKS),
    "ends on one rank": ("tiny-mla", {"pp": 2, "dp": 2, "zero": 2, "schedule": "dualpipev"}),
    "sequence cut": ("tiny", {"cp": 2, "dp": 2, "zero": 3}),
    "a tied head": ("tied-gpt", {"pp": 2, "tp": 2, "dp": 1, "schedule": "1f1b"}),
    "a tied head, ends on one rank": ("tied-gpt", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zbv"}),
}  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", QUICK.values(), ids=QUICK)
def test_it_trains_as_in_one_process(layout: tuple[str, dict[str, Any]]) -> None:
    """Two modules, so that one reads another's output."""
    name, fields = layout
    run(name, 2, **fields)


SLOW: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tiny", {"dp": 2}),
    ("tiny", {"dp": 2, "zero": 1}),
    ("tiny", {"dp": 2, "zero": 2}),
    ("tiny", {"dp": 4, "zero": 3, "shard_group": 2}),
    ("tiny", {"tp": 2, "sequence_parallel": False}),
    ("tiny", {"tp": 2, "dp": 2, "zero": 3}),
    ("tiny", {"cp": 2, "context_method": "all-gather", "tp": 2}),
    ("tiny", {"cp": 2, "context_method": "ulysses", "pp": 2}),
    ("tiny", {"pp": 2, "dp": 2, "zero": 3}),
    ("tiny", {"pp": 2, "dp": 4, "zero": 2, "shard_group": 2}),
    ("tiny", {"pp": 4, "schedule": "zb-h1"}),
    ("tiny", {"pp": 2, "schedule": "zbv", "tp": 2}),
    ("tiny", {"pp": 2, "schedule": "zbv", "dp": 2, "zero": 3, "keep_parameters": True}),
    ("tiny", {"pp": 2, "schedule": "gpipe", "stage_layers": (4, 0)}),
    ("tiny-moe", {"dp": 2, "ep": 2, "tp": 2, "expert_tp": 1}),
    ("tiny-moe", {"pp": 2, "dp": 2, "ep": 2, "dispatch": "deduplicated", "schedule": "v-half"}),
    ("tiny-mla", {"recompute": "selective", "recompute_operators": ("norm", "activation", "up-projection")}),
    ("tiny-mla", {"pp": 2, "dp": 2, "zero": 1, "recompute": "full"}),
    ("tiny-mla", {"pp": 2, "dp": 2, "recompute": "full", "recompute_layers": 1, "schedule": "zb-h2"}),
    ("tiny-mla", {"pp": 2, "tp": 2, "cp": 2, "zero": 3, "keep_parameters": True}),
    ("tied-gpt", {"dp": 2, "zero": 3, "tp": 2}),
    ("tied-gpt", {"pp": 2, "dp": 2, "zero": 3, "cp": 2}),
    ("tied-gpt", {"pp": 2, "dp": 2, "zero": 1} | CHUNKS),
    ("tied-gpt", {"pp": 2, "schedule": "dualpipev", "tp": 2, "recompute": "full"}),
    ("tied-gpt", {"pp": 2, "schedule": "v-half", "dp": 2, "zero": 3, "keep_parameters": True}),
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW, ids=lambda one: f"{one[0]} {one[1]}")
def test_other_layouts_too(layout: tuple[str, dict[str, Any]]) -> None:
    name, fields = layout
    run(name, **fields)


def test_the_loss_is_that_of_the_paper() -> None:
    """Equations 21 to 25 of arXiv 2412.19437, written out for two modules."""
    model = replace(predicting("tiny", 2), layers=2)
    decoder = Decoder(model)
    initialise(decoder, 0, model)
    text = torch.randint(model.vocab, (2, 13), generator=torch.Generator().manual_seed(1))
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    labels[0, 3] = -100
    plain = Decoder(replace(model, mtp_layers=0))
    plain.load_state_dict({name: one for name, one in decoder.state_dict().items() if name in plain.state_dict()})
    expected = plain(tokens, labels)
    plain.head = None
    hidden = plain(tokens)
    assert decoder.embedding is not None and decoder.head is not None
    for distance, module in enumerate((decoder.layers["2"], decoder.layers["3"]), start=1):
        assert isinstance(module, PredictionLayer)
        ahead = decoder.embedding(tokens[:, distance:])
        joined = torch.cat((module.token_norm(ahead), module.hidden_norm(hidden[:, :-1])), -1) @ module.joined.weight.T
        inner = Decoder(replace(model, layers=1, mtp_layers=0))
        inner.embedding = inner.norm = inner.head = None
        layer = inner.layers["0"]
        assert isinstance(layer, Layer)
        layer.load_state_dict({name: one for name, one in module.state_dict().items() if name in layer.state_dict()})
        hidden = module.norm(inner(joined))
        logits = decoder.head(hidden)
        lost = F.cross_entropy(logits.flatten(0, 1), labels[:, distance:].flatten(), reduction="sum")
        expected = expected + model.numerics.prediction_loss / 2 * lost
    torch.testing.assert_close(decoder(tokens, labels), expected)


def test_tokens_ahead_end_with_their_document() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    labels = torch.tensor([[2, 3, -100, 5, 6, 7]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    ahead = ahead_of(tokens, labels, documents, 2)
    assert ahead.labels[0, :, 0].tolist() == [3, -100, -100, 6, 7, -100]
    assert ahead.labels[0, :, 1].tolist() == [-100, -100, -100, 7, -100, -100]
    assert ahead.tokens[0, :2, 0].tolist() == [2, 3] and ahead.tokens[0, 0, 1] == 3
    cut = Batch.of(tokens, labels, documents=documents).with_ahead(2).changed(lambda one: one[:, 3:])
    assert cut.ahead is not None and cut.ahead.labels[0, :, 0].tolist() == [6, 7, -100]


def test_every_parameter_of_a_module_is_counted() -> None:
    model = predicting("tiny-mla", 2)
    built = sum(one.numel() for _, one in Decoder(model).named_tensors())
    assert built == parameter_count(model, with_prediction_modules=True)


def test_the_last_stage_builds_the_modules_and_reads_the_embedding() -> None:
    job = job_of(predicting("tiny"), {"pp": 2, "dp": 1})
    assert job is not None and embedding_on_both_ends(job)
    assert built_layers(job) == (range(2), range(2, 5))
