"""Adapters and frozen parts under every kind of layout: the same loss, gradients and weights as one process, which
computes with the sums of weights and adapters."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.layouts import Layout, covering, job_of, model_named
from engine.parity import check
from shardwise.engine import engine as engine_module
from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.torch_private import Store
from shardwise.measure.dryrun.world import posing_as
from shardwise.measure.reference import share
from shardwise.models.adapters import is_of_adapter
from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import Adapters, Preference
from shardwise.spec.job import Job
from shardwise.spec.parameters import trained_parameters
from shardwise.spec.support import verdict

LORA, DORA = Adapters(rank=4, alpha=8), Adapters(rank=4, alpha=6, method="dora", scaling="rank-stabilised")
DROPPING = Adapters(rank=4, alpha=8, dropout=0.3)
EACH: dict[str, Any] = {"adapters": Adapters(rank=4, alpha=8, experts=True)}
TUNINGS: dict[str, dict[str, Any]] = {
    "lora": {"adapters": LORA},
    "dora": {"adapters": DORA},
    "dropout": {"adapters": DROPPING},
    "few": {"adapters": Adapters(rank=4, targets=("o_proj", "up_proj"), layers=(2,)), "trained": ("norms",)},
    "head": {"trained": ("head",)},
    "middle": {"trained": ("layers.1", "norms")},
    "embedding": {"trained": ("embedding", "layers.0.attention")},
}  # fmt: skip


def tuned(job: Job, **training: Any) -> Job:
    return replace(job, training=replace(job.training, **training))


def of_layout(layout: Layout, tuning: str) -> Job:
    job = layout.job()
    assert job is not None
    fields = EACH if tuning == "lora" and job.model.moe else TUNINGS[tuning]
    if tuning == "head" and job.model.tied_embeddings:
        fields = TUNINGS["embedding"]
    return tuned(job, **fields)


# Each dimension with both methods, and with gradients that end in some stage or begin behind others.
QUICK = [
    ("lora", Layout.of("tiny", data="zero-3")),
    ("dora", Layout.of("tiny", data="hybrid-2", tensor="plain")),
    ("dora", Layout.of("tiny-mla", tensor="overlapped", recompute="full")),
    ("lora", Layout.of("tiny-mla", tensor="plain", data="zero-1")),
    ("lora", Layout.of("tiny-moe", tensor="sp", experts="ep-expert-tp", data="zero-3")),
    ("lora", Layout.of("tiny-moe", tensor="plain", experts="ep-expert-tp", data="zero-0")),
    ("lora", Layout.of("tiny", context="ulysses", pipeline="zbv", data="zero-3")),
    ("few", Layout.of("tied-gpt", pipeline="interleaved", data="zero-1")),
    ("dropout", Layout.of("tiny", pipeline="1f1b", tensor="sp", recompute="full")),
    ("dropout", Layout.of("tiny-mla", context="ring", tensor="overlapped", data="zero-3")),
    ("dropout", Layout.of("tiny-moe", tensor="plain", data="zero-1")),
    ("head", Layout.of("tiny", pipeline="zb-h1", data="zero-3")),
    ("embedding", Layout.of("tied-gpt", pipeline="1f1b", tensor="sp")),
    ("middle", Layout.of("tiny", pipeline="1f1b", context="ring", recompute="selective")),
]


@pytest.mark.parametrize(("tuning", "layout"), QUICK, ids=lambda value: str(value))
def test_tuning_equals_one_process(tuning: str, layout: Layout) -> None:
    check(of_layout(layout, tuning), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "layout"), list(enumerate(covering("quick"))), ids=lambda value: str(value))
def test_every_pair_of_techniques_equals_one_process(number: int, layout: Layout) -> None:
    tunings = list(TUNINGS)
    check(of_layout(layout, tunings[number % len(tunings)]))


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 2, "zero": 2, "offload": {"optimizer": 1, "gradients": 1}},
        {"dp": 2, "zero": 1, "offload": {"optimizer": 0.5, "activations": 1}},
    ],
    ids=["states-and-gradients", "activations"],
)
def test_offloaded_states_of_adapters_equal_one_process(fields: dict[str, Any]) -> None:
    from shardwise.spec.strategy import Offload

    job = job_of(model_named("tiny"), {**fields, "offload": Offload(**fields["offload"])})
    assert job is not None
    check(tuned(job, adapters=DORA), steps=2)


def wide(layout: Layout, form: str, **changes: Any) -> Job:
    """A model whose matrices have whole blocks on every rank."""
    model = model_named(dict(layout.values)["model"])
    changed = {"hidden": 128, "ffn": 256, "head_dim": None, "published_parameters": None, **changes}
    if model.moe is not None:
        changed["moe"] = replace(model.moe, ffn=128, shared_ffn=model.moe.shared_ffn and 128)
    job = job_of(replace(model, **changed), layout.fields)
    assert job is not None
    adapters = DORA if form in ("nf4", "int8") and model.moe is None else LORA
    return tuned(job, adapters=adapters, base_precision=form)


STORED = [
    ("nf4", Layout.of("tiny", data="hybrid-3", recompute="full")),
    ("nf4-double", Layout.of("tiny-moe", tensor="sp", experts="ep-expert-tp", data="zero-1")),
    ("nf4-double", Layout.of("tiny", data="zero-3", tensor="overlapped")),
    ("int8", Layout.of("tiny", tensor="plain", pipeline="zbv", data="zero-3")),
    ("fp8", Layout.of("tiny-moe", data="zero-3", experts="ep")),
    ("bf16", Layout.of("tiny", pipeline="1f1b", recompute="selective", data="zero-0")),
]


@pytest.mark.parametrize(("form", "layout"), STORED, ids=lambda value: str(value))
def test_bases_in_fewer_bits_equal_one_process(form: str, layout: Layout) -> None:
    check(wide(layout, form), steps=2)


WHOLE_BLOCKS = {"hidden": 512, "ffn": 512, "heads": 4, "kv_heads": 4}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4-double", "fp8", "int8", "nf4", "bf16", "computed"])
@pytest.mark.parametrize(("model", "recompute"), [("tiny", "none"), ("tiny-moe", "full"), ("tiny", "selective")])
def test_compiled_layers_train_the_same(form: str, model: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler for C++; a graph that breaks is an error."""
    job = wide(Layout.of(model, recompute=recompute), form, **WHOLE_BLOCKS)
    monkeypatch.setattr(engine_module, "apply_compile", partial(engine_module.apply_compile, backend="aot_eager"))
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        with process_group(0, 1, _alone()):
            engine = Engine(tuned(job, compile=compiled))
            losses = [float(engine.step(share(engine, step, 0)).loss) for step in range(2)]
            ends.append((losses, [held.parameter.detach().clone() for held in engine.trained]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["computed", "nf4-double"])
@pytest.mark.parametrize("tensor", ["one", "sp"])
def test_compiled_layers_equal_one_process(form: str, tensor: str) -> None:
    check(tuned(wide(Layout.of("tiny", tensor=tensor, data="zero-3"), form, **WHOLE_BLOCKS), compile=True), steps=2)


FORMS = ("bf16", "fp8", "int8", "nf4", "nf4-double")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "layout"), list(zip(cycle(FORMS), covering("quick"))), ids=lambda value: str(value))
def test_bases_in_fewer_bits_in_every_layout(form: str, layout: Layout) -> None:
    job = (
        wide(layout, form, **WHOLE_BLOCKS)
        if model_named(dict(layout.values)["model"]).mla is None
        else wide(layout, "int8")
    )
    if verdict(job).status == "runs":
        check(job, steps=2)


PREFERENCE: dict[str, Any] = {"task": "dpo", "preference": Preference(beta=0.5, label_smoothing=0.1)}
COMPARED = [
    Layout.of("tiny", tensor="plain", data="zero-3"),
    Layout.of("tiny", tensor="sp", pipeline="zbv", data="zero-1"),
    Layout.of("tiny-moe", experts="ep", data="zero-0", recompute="full"),
    Layout.of("tiny-mla", context="ulysses", data="hybrid-2"),
    Layout.of("tied-gpt", context="all-gather", pipeline="1f1b", batch="two-sequences"),
]


@pytest.mark.parametrize("layout", COMPARED, ids=str)
def test_preferences_equal_one_process(layout: Layout) -> None:
    """With the reference run by the same weights, and the formula as TRL has it over whole logits."""
    tuning = "lora" if "moe" in str(layout) else "dora"
    check(tuned(of_layout(layout, tuning), **PREFERENCE), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", covering("quick"), ids=str)
def test_preferences_equal_one_process_in_every_layout(layout: Layout) -> None:
    job = tuned(of_layout(layout, "lora"), **PREFERENCE)
    if verdict(job).status == "runs":
        check(job, steps=2)


def test_preferences_begin_at_the_logarithm_of_two_and_are_learned() -> None:
    """At first the policy is its reference."""
    job = tuned(of_layout(Layout.of("tiny"), "lora"), **PREFERENCE)
    faster = replace(job.training.optimization, learning_rate=0.01, clip_norm=None)
    job = tuned(job, optimization=faster, preference=Preference(beta=0.5))
    with process_group(0, 1, _alone()):
        engine = Engine(job)
        batch = share(engine, 0, 0)
        losses = [float(engine.step(batch).loss) for _ in range(8)]
        held_out = float(engine.evaluate(batch))
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5) and held_out < losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_the_engine_trains_what_is_counted(tuning: str, model: str) -> None:
    job = of_layout(Layout.of(model), tuning)
    with posing_as(0, 1):
        engine = Engine(job)
    assert sum(held.parameter.numel() for held in engine.trained) == trained_parameters(job.model, job.training.tuning)
    adapters_alone = job.training.adapters is not None and not job.training.trained
    assert all(is_of_adapter(held.name) for held in engine.trained) == adapters_alone


def flops_of(job: Job) -> int:
    with process_group(0, 1, _alone()):
        engine = Engine(job)
        tokens = torch.randint(job.model.vocab, (len(engine.rows), job.training.seq + 1))
        with FlopCounterMode(display=False) as counter:
            engine.step(Batch.of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        return counter.get_total_flops()


def _alone() -> Store:
    import torch.distributed as dist

    return dist.HashStore()


def test_frozen_weights_have_no_weight_products() -> None:
    """Of a forward pass and twice as much behind it, the half that makes weight gradients is left out."""
    job = of_layout(Layout.of("tiny"), "lora")
    everything, adapters = flops_of(tuned(job, adapters=None)), flops_of(tuned(job, adapters=Adapters(rank=1)))
    assert adapters < 0.72 * everything


def test_a_stage_below_all_adapters_passes_nothing_back() -> None:
    """Nor does a process that trains the head alone."""
    job = of_layout(Layout.of("tiny"), "head")
    everything = flops_of(tuned(job, trained=()))
    assert flops_of(job) < 0.5 * everything


def test_networks_of_others_are_not_given_adapters() -> None:
    from shardwise.engine.parallelize import parallelize

    job = of_layout(Layout.of("tiny"), "lora")
    with process_group(0, 1, _alone()), pytest.raises(SpecError, match="of our own decoder"):
        parallelize(torch.nn.Linear(2, 2), job, loss=lambda outputs, batch: outputs.sum())
