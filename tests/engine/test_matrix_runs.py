"""The support matrix and the engine are one: what is said to run changes what the engine does, the rest is refused.

Every technique is in one of three: it runs, with a job that differs from another only by it; it is a circumstance,
which nobody switches on; or the matrix has a row about it alone, and no command starts a process for it.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.what_is_done import operators_of
from shardwise.engine.engine import Engine
from shardwise.launch.preflight import preflight
from shardwise.measure.dryrun.run import dry_run
from shardwise.measure.dryrun.world import posing_as
from shardwise.measure.verify import verify
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.schedules import job_schedules
from shardwise.spec.support import MATRIX, Finding, techniques_of, verdict
from shardwise.spec.techniques import TECHNIQUES
from spec.test_support import LATENT, USING, Fields, between, using
from tables import table

SCHEDULES = job_schedules()

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 96, "name": "small"}
EXPERTS: Fields = {"model": {"moe": {"experts": 8, "top_k": 2, "ffn": 32}}}
BLOCKS: Fields = {"hidden": 128, "kv_heads": 4, "ffn": 128}
TWELVE: Fields = {"training": {"global_batch": 12}}
ACCUMULATED: Fields = {"training": {"global_batch": 8}}

# What is neither done nor left undone: names for when another row holds, or for plain cases of other techniques.
CIRCUMSTANCES = {
    "zero-0": "nothing is sharded: what the other stages of ZeRO are compared with",
    "no-pipeline": "pp is 1: what pipelines are compared with",
    "tp": "with sp or tp-plain, which are the two ways to do it",
    "plain-attention": "no latent attention",
    "odd-pipeline": "an odd pp, which dualpipe cannot pair",
    "tied-ends-on-one-rank": "tied embeddings under a folded schedule, which ZeRO-3 minds",
    "repeated-kv-heads": "fewer key-value heads than tensor-parallel ranks",
    "uneven-kv-heads": "key-value heads that cp neither divides nor repeats, which Ulysses minds",
    "ragged-widths": "widths that 8-bit products would not take",
    "ragged-blocks": "widths that are not whole blocks of 128, which block scaling minds",
    "accumulate-sharded": "ZeRO-2 and 3 as they are, which replicas of unlike numbers of microbatches mind",
    "experts-across-replicas": "experts spread over data-parallel ranks, which unlike numbers of microbatches mind",
    "unlike-tied-ends": "refused: an embedding at both ends of a pipeline, on unlike ranks",
    "experts-across-tp": "an expert's ranks are others than tp's, which plain tensor parallelism minds",
    "weights-beyond-optimizer": "refused: more weights than optimizer states are offloaded",
    "gradients-beyond-optimizer": "refused: more gradients than optimizer states are offloaded",
    "repeated-missing-mlp-up": "refused: every MLP is a routed expert",
    "odd-chunks": "refused: sequences that do not divide into 2·cp chunks",
    "ragged-experts": "refused: rows of experts that are not a multiple of 16 bytes",
    "ragged-base": "refused: blocks of scales that tensor parallelism would cut",
    "scaled-biased-head": "refused: scaled logits of a head with a bias",
    "odd-rotation": "refused: heads with an odd number of features",
}

# What a job with the technique is compared with, where that is not the plain one.
PIPELINE: Fields = {"pp": 2, "model": {"layers": 4}, "training": {"global_batch": 16}}
LONG: Fields = {"kind": "longrope", "factor": 2.0, "original_seq": 512,
                "short_factors": [1.0] * 4, "long_factors": [2.0] * 4}  # fmt: skip
SHARDED, OFFLOADED = {"zero": 3}, {"offload": {"optimizer": 1}}
BESIDE: dict[str, tuple[Fields, Fields]] = {
    "zero-2": ({**ACCUMULATED, "zero": 1}, {**ACCUMULATED, "zero": 2}),
    "zero-3": ({**ACCUMULATED, "zero": 2}, {**ACCUMULATED, "zero": 3}),
    "zero-3-kept": ({**ACCUMULATED, "zero": 3}, {**ACCUMULATED, "zero": 3, "keep_parameters": True}),
    "accumulate-local": ({**ACCUMULATED, "zero": 2}, {**ACCUMULATED, "zero": 2, "accumulate": "local"}),
    "hybrid-shard": ({"zero": 1}, {"zero": 1, "shard_group": 2}),
    "uneven-shares": (TWELVE, {**TWELVE, "dp_shares": [1, 2, 2, 1]}),
    "unlike-stages": (PIPELINE, {**PIPELINE, "stage_dp": [4, 2], "stage_tp": [1, 2]}),
    "buckets": ({}, {"bucket": "4KiB"}),
    "error-feedback": ({"compression": {"method": "int8", "error_feedback": False}}, {"compression": "int8"}),
    "compressed-momentum": ({"compression": "1bit"}, {"compression": {"method": "1bit-adam", "exact_steps": 2}}),
    "ep-overlap": ({**EXPERTS, "ep": 2}, {**EXPERTS, "ep": 2, "overlap": {"ep": True}}),
    "tp-overlap": ({"tp": 2}, {"tp": 2, "overlap": {"tp": True}}),
    "tp-plain": ({"tp": 2}, {"tp": 2, "sequence_parallel": False}),
    "ep": (EXPERTS, {**EXPERTS, "ep": 2}),
    "expert-tp": ({**EXPERTS, "tp": 2, "expert_tp": 1}, {**EXPERTS, "tp": 2}),
    "expert-tp-unlike-tp": ({**EXPERTS, "tp": 4, "model": {**EXPERTS["model"], "kv_heads": 4}},
                            {**EXPERTS, "tp": 4, "expert_tp": 2, "model": {**EXPERTS["model"], "kv_heads": 4}}),
    "deduplicated-dispatch": ({**EXPERTS, "ep": 2}, {**EXPERTS, "ep": 2, "dispatch": "deduplicated"}),
    "cp-all-gather": ({"cp": 2}, {"cp": 2, "context_method": "all-gather"}),
    "cp-ulysses": ({"cp": 2}, {"cp": 2, "context_method": "ulysses"}),
    **{name: (PIPELINE, {**PIPELINE, "schedule": name, "interleave": 2 if name == "interleaved" else 1})
       for name in SCHEDULES},
    "1f1b": ({**PIPELINE, "schedule": "gpipe"}, PIPELINE),
    "pp": ({**PIPELINE, "pp": 1}, PIPELINE),
    "own-stages": (PIPELINE, {**PIPELINE, "stage_layers": [1, 3]}),
    "repeated-matmuls": ({"recompute": "selective"},
                          {"recompute": "selective", "recompute_operators": ["alternate-products"]}),
    "repeated-attention": ({"training": {"attention": "unfused"}},
                           {"recompute": "selective", "training": {"attention": "unfused"}}),
    "repeated-up-projection": (
        {"recompute": "selective", "recompute_operators": ["norm"], "model": LATENT},
        {"recompute": "selective", "recompute_operators": ["up-projection"], "model": LATENT},
    ),
    "repeated-mlp-up": ({"recompute": "selective", "recompute_operators": ["activation"]},
                        {"recompute": "selective", "recompute_operators": ["activation", "mlp-up"]}),
    "offload-gradients": ({"zero": 2, **OFFLOADED}, {"zero": 2, "offload": {"optimizer": 1, "gradients": 1}}),
    "offload-weights": ({**SHARDED, **OFFLOADED}, {**SHARDED, "offload": {"optimizer": 1, "weights": 1}}),
    "offload-cpu": ({}, OFFLOADED),
    "offload-nvme": (OFFLOADED, {"offload": {"optimizer": 1, "target": "nvme"}}),
    "bf16": ({"training": {"precision": "fp32"}}, {}),
    "fp8-blockwise": ({"model": BLOCKS, "training": {"seq": 128}},
                      {"model": BLOCKS, "training": {"seq": 128, "precision": "fp8-blockwise"}}),
    "adamw": ({"training": {"optimizer": "sgd"}}, {}),
    "encoder": ({}, {"model": {"causal": False}}),
    "sliding-window": ({}, {"model": {"sliding_window": 16}}),
    "longrope": ({}, {"model": {"numerics": {"rope_scaling": LONG}}}),
    "experts": ({}, EXPERTS),
    "dpo": ({"training": {"adapters": {}}}, {"training": {"adapters": {}, "task": "dpo"}}),
    "dora": ({"training": {"adapters": {}}}, {"training": {"adapters": {"method": "dora"}}}),
    "adapter-dropout": ({"training": {"adapters": {}}}, {"training": {"adapters": {"dropout": 0.1}}}),
    **{f"base-{name}": ({"model": BLOCKS, "training": {"adapters": {}}},
                        {"model": BLOCKS, "training": {"adapters": {}, "base_precision": name}})
       for name in ("fp8", "int8", "nf4", "nf4-double")},
    "base-bf16": ({"training": {"precision": "fp32", "adapters": {}}},
                  {"training": {"precision": "fp32", "adapters": {}, "base_precision": "bf16"}}),
    "adapters-on-experts": ({**EXPERTS, "training": {"adapters": {}}},
                            {**EXPERTS, "training": {"adapters": {"experts": True}}}),
    "rank-order": (PIPELINE, {**PIPELINE, "order": ["tp", "cp", "pp", "dp"]}),
}  # fmt: skip
# What the operators of a step on a rank alone do not show, and where it is shown.
OTHERWISE = {
    "local-steps": "test_workers_that_meet_seldom_have_meetings",
    "async": "test_workers_that_meet_seldom_have_meetings",
    "compile": "test_compiled_layers_are_compiled",
    "named-collective": "test_named_collectives.py: which schedules were run, on ranks that can",
}
# One of each kind; the others are slow.
QUICK = ("zero-1", "compression", "sp", "recompute-full", "offload-optimizer", "bf16-fp32-grads")
ALONE = [name for name in TECHNIQUES if between(name).status == "runs" and name not in CIRCUMSTANCES]
REFUSED = [name for name in TECHNIQUES if between(name).status != "runs"]


def small(**fields: Any) -> Job:
    strategy = {name: value for name, value in fields.items() if name not in ("model", "training")}
    world = 4
    for name in ("tp", "cp", "pp"):
        world *= strategy.get(name, 1)
    training = {"global_batch": 4, "seq": 32, "precision": "bf16", **fields.get("training", {})}
    model = {**SMALL, **fields.get("model", {})}
    cluster = f"laptop:{world}"
    return Job.from_dict({"model": model, "cluster": cluster, "strategy": {"dp": 4, **strategy}, "training": training})


def pair(name: str) -> tuple[Job, Job]:
    """A job without the technique, and the same with it."""
    without, using_it = BESIDE.get(name, ({}, USING[name]))
    return small(**without), small(**using_it)


def test_every_technique_is_in_one_class() -> None:
    """A new one has to say which: run, with its evidence; a circumstance; or refused alone."""
    assert set(ALONE) | set(REFUSED) | set(CIRCUMSTANCES) == set(TECHNIQUES)
    assert set(BESIDE) <= set(TECHNIQUES)
    for name in set(REFUSED) & set(CIRCUMSTANCES):
        assert CIRCUMSTANCES[name].startswith("refused")


def changes_what_is_done(name: str) -> None:
    without, using_it = pair(name)
    assert name not in techniques_of(without) and name in techniques_of(using_it)
    assert verdict(using_it).status == "runs", verdict(using_it)
    assert operators_of(using_it) != operators_of(without)


def test_the_same_job_does_the_same() -> None:
    job = small()
    assert operators_of(job) == operators_of.__wrapped__(job)


@pytest.mark.parametrize("name", QUICK)
def test_what_runs_changes_what_the_engine_does(name: str) -> None:
    changes_what_is_done(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in ALONE if one not in (*OTHERWISE, *QUICK)])
def test_whatever_runs_changes_what_the_engine_does(name: str) -> None:
    changes_what_is_done(name)


@pytest.mark.parametrize("name", ["local-steps", "async"])
def test_workers_that_meet_seldom_have_meetings(name: str) -> None:
    job = small(**USING[name])
    with posing_as(0, job.strategy.world):
        engine = Engine(job)
    assert (engine.outer is not None) == (name == "local-steps") and (engine.late is not None) == (name == "async")


def test_compiled_layers_are_compiled() -> None:
    found = []
    for compiled in (False, True):
        job = small(training={"compile": compiled})
        with posing_as(0, job.strategy.world):
            engine = Engine(job)
        found.append([module for module in engine.stages[0].modules() if module._compiled_call_impl is not None])
    assert not found[0] and found[1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_run_is_refused_before_a_process_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = using(name)
    assert name in techniques_of(job)

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("shardwise.launch.pool.Pool.__init__", started)
    for command in (verify, preflight, dry_run):
        with pytest.raises(SpecError) as raised:
            command(job)
        assert raised.value.remedy and "\n" not in str(raised.value)


@table("row", MATRIX)
def test_every_row_is_refused_with_its_reason(row: Finding) -> None:
    job = using(*row.techniques)
    with pytest.raises(SpecError) as raised:
        Engine(job)
    worst = verdict(job).findings[0]  # the row, or a worse one that its techniques bring with them
    assert row in verdict(job).findings
    assert worst.reason in str(raised.value) and worst.remedy in str(raised.value)


@table("row", MATRIX[:1])
def test_no_process_is_started_to_verify_what_is_refused(row: Finding) -> None:
    job: Job = using(*row.techniques)
    with pytest.raises(SpecError, match=row.remedy):
        verify(job, pool=None)
