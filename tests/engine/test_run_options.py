"""Options of a run that change how a layer is computed, and nothing else: compiled layers, unfused attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.layouts import Layout
from engine.parity import check
from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.models.dot_product import AttentionArguments, dot_product_attention, unfused_attention
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.support import verdict


def with_training(layout: Layout, **fields: object) -> Job:
    job = layout.job()
    assert job is not None
    return replace(job, training=replace(job.training, **fields))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout.of("tiny", data="zero-0", recompute="selective"), marks=pytest.mark.slow),
        pytest.param(Layout.of("tiny-moe", data="zero-3", experts="ep"), marks=pytest.mark.slow),
        pytest.param(Layout.of("tiny", tensor="sp", recompute="full"), marks=pytest.mark.slow),
        pytest.param(Layout.of("tied-gpt", data="zero-1", pipeline="interleaved"), marks=pytest.mark.slow),
        pytest.param(Layout.of("tiny", context="ring"), marks=pytest.mark.slow),
        pytest.param(Layout.of("tiny-mla", data="hybrid-2"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_compiled_run_computes_the_same(layout: Layout) -> None:
    check(with_training(layout, compile=True))


def compiled_layers(job: Job) -> list[bool]:
    """Of every layer whether `torch.compile` will be called; what it makes then is in test_compile.py."""
    (decoder,) = Engine(job).stages.values()
    return [layer._compiled_call_impl is not None for layer in decoder.layers.values()]


@pytest.mark.parametrize("asked", [True, False], ids=["compiled", "plain"])
def test_a_run_compiles_its_layers_if_asked(asked: bool) -> None:
    job = with_training(Layout.of("tiny", data="zero-0"), compile=asked)
    for found in on_ranks(job.strategy.world, compiled_layers, job):
        assert found == [asked] * job.model.layers


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout.of("tiny", context="ulysses", tensor="sp"),
        Layout.of("tiny-mla", recompute="selective"),
        pytest.param(Layout.of("tiny", data="zero-3", recompute="full"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_unfused_attention_computes_the_same(layout: Layout) -> None:
    check(with_training(layout, attention="unfused"))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_unfused_equals_fused(causal: bool, window: int | None, packed: bool) -> None:
    """With grouped heads, and values of other sizes than keys."""
    torch.manual_seed(0)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]]) if packed else None
    arguments = AttentionArguments(causal, window, 0.3, documents)
    tensors = [torch.randn(2, 7, heads, size, requires_grad=True) for heads, size in ((4, 6), (2, 6), (2, 5))]
    results = []
    for attend in (unfused_attention, dot_product_attention):
        out = attend(*tensors, arguments)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


def test_unfused_keeps_one_score_per_pair() -> None:
    """As it is priced: the softmax, in the format that is computed in."""
    kept: dict[int, int] = {}
    batch, seq, heads = 2, 64, 4

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        query, key, value = (torch.empty(batch, seq, n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
        unfused_attention(query, key, value, AttentionArguments(True, None, 1.0))
    scores = batch * heads * seq * seq * 2
    assert scores <= sum(one for one in kept.values() if one > 2 * seq * seq) <= 1.01 * scores


@pytest.mark.parametrize(("precision", "width", "status"), [("bf16", 12, "refused"), ("fp32", 12, "runs")])
def test_widths_that_the_grouped_product_does_not_take(precision: str, width: int, status: str) -> None:
    job = with_training(Layout.of("tiny-moe", data="zero-0"), precision=precision)
    assert job.model.moe is not None
    job = replace(job, model=replace(job.model, moe=replace(job.model.moe, ffn=width), published_parameters=None))
    assert verdict(job).status == status


def test_a_split_backward_is_not_compiled() -> None:
    with pytest.raises(SpecError, match=r"training\.compile: .*compile: false"):
        check(with_training(Layout.of("tiny", pipeline="zbv"), compile=True))
