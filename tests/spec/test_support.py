"""The support matrix: every technique and every row reached by a job, and nothing else in the way of a plain one."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from interop.frameworks.random_jobs import drawn
from shardwise.pipeline import build
from shardwise.spec import Cluster, Job
from shardwise.spec.fine_tuning import BASE_FORMATS
from shardwise.spec.schedules import job_schedules, schedule_record
from shardwise.spec.support import MATRIX, STATUSES, Finding, techniques_of, verdict
from shardwise.spec.techniques import TECHNIQUES
from shardwise.spec.training import OPTIMIZERS, RECIPES
from spec.jobs import jobs
from tables import table

SCHEDULES = job_schedules()

DENSE = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 4, "ffn": 3072, "vocab": 1000}
EXPERTS = {"moe": {"experts": 8, "top_k": 2, "ffn": 1024}}
LATENT = {"mla": {"kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}}
Fields = dict[str, Any]


def pipelined(schedule: str) -> Fields:
    return {"pp": 2, "schedule": schedule, "interleave": 2 if schedule == "interleaved" else 1}


# What a job says to use a technique: fields of the strategy; of the model and the training under their names.
USING: dict[str, Fields] = {
    "zero-0": {},
    "zero-1": {"zero": 1},
    "zero-2": {"zero": 2},
    "zero-3": {"zero": 3},
    "zero-3-kept": {"zero": 3, "keep_parameters": True},
    "hybrid-shard": {"zero": 1, "shard_group": 2},
    "accumulate-local": {"zero": 2, "accumulate": "local"},
    "accumulate-sharded": {"zero": 2},
    "uneven-shares": {"dp_shares": [1, 2, 2, 1]},
    "no-dp-overlap": {"overlap": {"dp": False}},
    "buckets": {"bucket": "1MiB"},
    "compression": {"compression": {"method": "int8", "error_feedback": False}},
    "error-feedback": {"compression": {"method": "int8"}},
    "compressed-momentum": {"compression": {"method": "1bit-adam", "exact_steps": 2, "error_feedback": False}},
    "local-steps": {"synchronise": {"method": "diloco"}},
    "async": {"synchronise": {"method": "async"}},
    "experts": {"model": EXPERTS},
    "tp": {"tp": 2},
    "sp": {"tp": 2},
    "tp-plain": {"tp": 2, "sequence_parallel": False},
    "tp-overlap": {"tp": 2, "overlap": {"tp": True}},
    "repeated-kv-heads": {"tp": 2, "model": {"kv_heads": 1}},
    "cp-ring": {"cp": 2},
    "cp-all-gather": {"cp": 2, "context_method": "all-gather"},
    "cp-ulysses": {"cp": 2, "context_method": "ulysses"},
    "uneven-kv-heads": {"cp": 4, "model": {"kv_heads": 6}},
    "odd-chunks": {"cp": 4, "training": {"seq": 1020}},
    "ep": {"ep": 2, "model": EXPERTS},
    "ep-overlap": {"ep": 2, "overlap": {"ep": True}, "model": EXPERTS},
    "expert-tp": {"tp": 2, "model": EXPERTS},
    "experts-across-tp": {"tp": 2, "expert_tp": 2, "order": ("dp", "tp", "cp", "pp"), "model": EXPERTS},
    "expert-tp-unlike-tp": {"tp": 4, "expert_tp": 2, "model": EXPERTS},
    "experts-across-replicas": {"ep": 2, "model": EXPERTS, "dp_shares": [1, 2, 2, 1]},
    "deduplicated-dispatch": {"ep": 2, "dispatch": "deduplicated", "model": EXPERTS},
    "no-pipeline": {},
    "pp": {"pp": 2},
    **{name: pipelined(name) for name in SCHEDULES},
    "odd-pipeline": {"pp": 3},
    "tied-ends-on-one-rank": {**pipelined("zbv"), "model": {"tied_embeddings": True}},
    "own-stages": {"pp": 2, "stage_layers": [5, 7]},
    "unlike-stages": {"pp": 2, "stage_dp": [4, 4]},
    "unlike-tied-ends": {"pp": 2, "stage_dp": [4, 2], "stage_tp": [1, 2], "model": {"tied_embeddings": True}},
    "pp-overlap": {"pp": 2, "overlap": {"pp": True}},
    "recompute-selective": {"recompute": "selective"},
    "recompute-full": {"recompute": "full"},
    "recompute-of-some-layers": {"recompute": "full", "recompute_layers": 1},
    "repeated-matmuls": {"recompute": "selective", "recompute_operators": ["alternate-products"]},
    "repeated-attention": {"recompute": "selective", "training": {"attention": "unfused"}},
    "repeated-up-projection": {"recompute": "selective", "recompute_operators": ["up-projection"]},
    "repeated-mlp-up": {"recompute": "selective", "recompute_operators": ["mlp-up"]},
    "repeated-experts": {"recompute": "selective", "recompute_operators": ["experts"], "model": EXPERTS},
    "repeated-missing-mlp-up": {"recompute": "selective", "recompute_operators": ["mlp-up"], "model": EXPERTS},
    "offload-optimizer": {"offload": {"optimizer": 0.5}},
    "offload-gradients": {"offload": {"optimizer": 1, "gradients": 0.5}},
    "offload-weights": {"offload": {"optimizer": 1, "weights": 1}},
    "offload-activations": {"offload": {"activations": 0.1}},
    "offload-cpu": {"offload": {"activations": 1}},
    "offload-nvme": {"offload": {"optimizer": 1, "target": "nvme"}},
    "no-offload-overlap": {"offload": {"optimizer": 1}, "overlap": {"offload": False}},
    "weights-beyond-optimizer": {"zero": 3, "offload": {"optimizer": 0.5, "weights": 1}},
    "gradients-beyond-optimizer": {"zero": 2, "offload": {"optimizer": 0.5, "gradients": 1}},
    **{name: {"training": {"precision": name}} for name in RECIPES},
    **{name: {"training": {"optimizer": name}} for name in OPTIMIZERS},
    "dropout": {"training": {"dropout": True}},
    "unfused-attention": {"training": {"attention": "unfused"}},
    "compile": {"training": {"compile": True}},
    "adapters": {"training": {"adapters": {}}},
    "dora": {"training": {"adapters": {"method": "dora"}}},
    "adapters-on-experts": {"training": {"adapters": {"experts": True}}, "model": EXPERTS},
    "adapter-dropout": {"training": {"adapters": {"dropout": 0.1}}},
    "frozen-parts": {"training": {"trained": ["norms"]}},
    **{
        f"base-{name}": {"training": {"adapters": {}, "base_precision": name}}
        for name in BASE_FORMATS
        if name != "computed"
    },
    "ragged-base": {"training": {"adapters": {}, "base_precision": "nf4"}, "model": {"ffn": 3088}},
    "dpo": {"training": {"task": "dpo", "adapters": {}}},
    "reference-copy": {"training": {"task": "dpo"}},
    "tied-embeddings": {"model": {"tied_embeddings": True}},
    "mtp": {"model": {"mtp_layers": 1}},
    "encoder": {"model": {"causal": False}},
    "plain-attention": {},
    "other-norms": {"model": {"norms_per_layer": 3}},
    "wide-layer-norm": {"model": {"qk_norm": True, "qk_norm_whole": True, "norm": "layernorm"}},
    "other-factors": {
        "model": {
            "numerics": {
                "rope_scaling": {
                    "kind": "longrope",
                    "factor": 2.0,
                    "original_seq": 512,
                    "short_factors": [1.0],
                    "long_factors": [2.0],
                }
            }
        }
    },
    "bert-parts": {"model": {"token_types": 2}},
    "latent-sinks": {"model": {**LATENT, "attention_sinks": True}},
    "latent-qk-norm": {"model": {**LATENT, "qk_norm": True}},
    "latent-qkv-bias": {"model": {**LATENT, "qkv_bias": True}},
    "scaled-biased-head": {"model": {"lm_head_bias": True, "numerics": {"logit_scale": 0.5}}},
    "delta-net": {
        "model": {
            "pattern": [{"mixer": "delta"}],
            "delta": {"key_heads": 4, "value_heads": 8, "key_dim": 8, "value_dim": 8},
        }
    },
    "attention-gate": {"model": {"attention_gate": True}},
    "counted": {"model": {"counted": {"code": "a network"}}},
    "odd-rotation": {"model": {"head_dim": 63}},
    "sliding-window": {"model": {"sliding_window": 512}},
    "capped-scores": {"model": {"numerics": {"attention_softcap": 50.0}}},
    "longrope": {
        "model": {
            "numerics": {
                "rope_scaling": {
                    "kind": "longrope",
                    "factor": 2.0,
                    "original_seq": 512,
                    "short_factors": [1.0] * 32,
                    "long_factors": [2.0] * 32,
                }
            }
        }
    },
    "ragged-widths": {"model": {"ffn": 3080}},
    "ragged-blocks": {"model": {"ffn": 3088}},
    "ragged-experts": {"model": {"moe": {"experts": 8, "top_k": 2, "ffn": 1028}}},
    "rank-order": {"order": ["tp", "cp", "pp", "dp"]},
    "named-collective": {"collective": "ring"},
    "in-network-collective": {"collective": "nvls"},
}
PLAIN = {"zero-0", "no-pipeline", "bf16", "adamw", "plain-attention"}


def job(**fields: Any) -> Job:
    """A small job on just the devices it needs, two of them data parallel."""
    strategy = {name: value for name, value in fields.items() if name not in ("model", "training")}
    degrees = [strategy.get(name, 1) for name in ("tp", "cp", "pp")]
    devices = {"size": 4 * int(np.prod(degrees)), "bandwidth": "50GB/s", "latency": "2us"}
    return Job.from_dict(
        {
            "model": {**DENSE, **fields.get("model", {})},
            "cluster": Cluster.from_dict({"device": "h100-sxm", "levels": [devices]}),
            "strategy": {"dp": 4, **strategy},
            "training": {"global_batch": 48, "seq": 3072, **fields.get("training", {})},
        }
    )


def merged(*parts: Fields) -> Fields:
    """All the fields; nested ones together, of one field said twice the larger (a pipeline of 3, not of 2)."""
    whole: Fields = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                whole[name] = merged(whole.get(name, {}), value)
            elif isinstance(value, int) and name in whole:
                whole[name] = max(value, whole[name])
            else:
                whole[name] = value
    return whole


def using(*techniques: str) -> Job:
    return job(**merged(*(USING[name] for name in techniques)))


def between(*techniques: str) -> Finding:
    """The finding for exactly these techniques, in any order; "runs" where the matrix has none."""
    found = (one for one in MATRIX if set(one.techniques) == set(techniques))
    return next(found, Finding(techniques, "runs", "", ""))


def identity(finding: Finding) -> str:
    return " × ".join(finding.techniques)


# -- the table itself --------------------------------------------------------------------------------


def test_a_plain_job_runs() -> None:
    assert set(techniques_of(job())) == PLAIN
    assert (verdict(job()).status, verdict(job()).findings) == ("runs", ())


@table("name", TECHNIQUES)
def test_every_technique_is_used_by_a_job(name: str) -> None:
    assert name in techniques_of(using(name))


def test_the_jobs_here_are_of_known_techniques() -> None:
    assert set(USING) == set(TECHNIQUES)
    assert set(SCHEDULES) | set(RECIPES) | set(OPTIMIZERS) <= set(TECHNIQUES)


def test_every_row_names_known_techniques_once_and_says_what_to_do() -> None:
    sets = [frozenset(one.techniques) for one in MATRIX]
    assert len(set(sets)) == len(sets)
    for one in MATRIX:
        assert set(one.techniques) <= set(TECHNIQUES)
        assert 1 <= len(one.techniques) == len(set(one.techniques)) <= 2
        assert one.status in STATUSES[1:]
        assert one.reason and one.remedy, one
        assert "\n" not in one.reason + one.remedy
        assert (one.value is not None) == (one.status == "needs")


def test_order_does_not_matter() -> None:
    for first, second in combinations(TECHNIQUES, 2):
        one, other = between(first, second), between(second, first)
        assert (one.status, one.reason) == (other.status, other.reason)
    assert between("tp", "pp").status == "runs"
    assert between("tied-ends-on-one-rank", "zero-3").status == "needs"


@table("row", MATRIX)
def test_every_row_is_reached_by_a_job(row: Finding) -> None:
    found = verdict(using(*row.techniques))
    assert row in found.findings
    assert STATUSES.index(found.status) >= STATUSES.index(row.status)
    assert found.status == max((one.status for one in found.findings), key=STATUSES.index) == found.findings[0].status


@table("row", [row for row in MATRIX if row.status == "needs"])
def test_the_option_that_a_row_needs_lifts_it(row: Finding) -> None:
    before = using(*row.techniques).to_dict()
    *parents, last = row.field.split(".")
    place = before
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = row.value
    after = verdict(Job.from_dict(before))
    assert row not in after.findings
    assert after.status in ("runs", "priced only")  # and brings nothing worse


# -- against what was run, and against the schedules themselves --------------------------------------


@table("name", SCHEDULES)
def test_the_schedules_that_split_the_backward_pass_are_those_that_do(name: str) -> None:
    kinds = {action.kind for actions in build(name, 4, 12, 2 if name == "interleaved" else None).actions
             for action in actions}  # fmt: skip
    assert ("W" in kinds) == (schedule_record(name).splits_backward)


@table("name", ["gpipe", "1f1b", "interleaved", "zbv", "zb-h1", "dualpipev"])
def test_sharding_and_schedules_as_run_by_the_engine(name: str) -> None:
    """Every stage of ZeRO with every schedule; but not where one rank gathers a matrix for both ends of the model."""
    for sharding in ("zero-0", "zero-1", "zero-2", "zero-3-kept"):
        assert verdict(using(name, sharding, "tied-embeddings")).status == "runs"
    assert verdict(using(name, "zero-3")).status == "runs"
    wrong = name in ("zbv", "dualpipev")
    assert verdict(using(name, "zero-3", "tied-embeddings")).status == ("needs" if wrong else "runs")
    assert verdict(using(name, "tp", "recompute-full")).status == "runs"


def test_worst_first() -> None:
    found = verdict(using("fp8", "ragged-widths", "dualpipe", "cp-ring", "unfused-attention"))
    assert [one.status for one in found.findings] == ["refused", "priced only", "needs"]
    assert found.status == "refused"


# -- for a search ------------------------------------------------------------------------------------


def test_what_a_search_leaves_out() -> None:
    pairs = {frozenset(one.techniques) for one in MATRIX if one.status in ("needs", "refused")}
    assert frozenset(("zero-3", "tied-ends-on-one-rank")) in pairs
    assert frozenset(("dualpipe",)) not in pairs
    assert between("dualpipe").status == "priced only"
    for candidate in drawn(None, seed=3, number=300):
        used = set(techniques_of(candidate))
        left_out = any(used.issuperset(pair) for pair in pairs)
        assert left_out == any(one.status in ("needs", "refused") for one in verdict(candidate).findings)


def test_columns_of_a_table_may_stand_in_for_a_strategy() -> None:
    """Techniques of the strategy alone, asked for many strategies of one model at once."""
    cases = [using("ep", name) for name in ("zero-3", "zero-3-kept", "zbv", "tp-plain", "cp-ring", "offload-weights",
                                            "recompute-full", "hybrid-shard", "expert-tp-unlike-tp")]  # fmt: skip
    model, training = cases[0].model, cases[0].training
    nested = {
        name: SimpleNamespace(**{field: np.array([getattr(getattr(one.strategy, name), field) for one in cases])
                                 for field in fields})
        for name, fields in {
            "overlap": ("tp", "ep", "pp", "dp", "offload"),
            "offload": ("optimizer", "gradients", "weights", "activations", "target", "any")
        }.items()
    }  # fmt: skip
    plain = ("tp", "cp", "pp", "ep", "zero", "keep_parameters", "accumulate", "sequence_parallel", "context_method",
             "schedule", "recompute", "dispatch", "sharding_group", "gradient_group",
             "expert_tensor_parallel")  # fmt: skip
    columns = {name: np.array([getattr(one.strategy, name) for one in cases]) for name in plain}
    table: Any = SimpleNamespace(**columns, **nested)
    scalars_only = {"recompute-of-some-layers", "repeated-matmuls", "repeated-attention",
                    "repeated-up-projection", "repeated-mlp-up", "repeated-experts", "repeated-missing-mlp-up",
                    "uneven-kv-heads", "ragged-widths", "ragged-blocks", "ragged-experts", "own-stages", "rank-order",
                    "named-collective", "in-network-collective", "experts-across-tp", "buckets", "compression",
                    "compressed-momentum", "error-feedback", "local-steps", "async", "uneven-shares", "unlike-stages",
                    "unlike-tied-ends", "experts-across-replicas"}  # fmt: skip
    for name, uses in TECHNIQUES.items():
        if name not in scalars_only:
            expected = [bool(uses(one.strategy, training, model)) for one in cases]
            assert np.broadcast_to(uses(table, training, model), len(cases)).tolist() == expected, name


# -- any job at all ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_any_job_gets_a_verdict(candidate: Job) -> None:
    check(candidate)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 10**6))
def test_any_mixture_of_techniques_gets_a_verdict(seed: int) -> None:
    for candidate in drawn(None, seed, number=3):
        check(candidate)


def check(candidate: Job) -> None:
    used, found = techniques_of(candidate), verdict(candidate)
    assert len(used) == len(set(used))
    for group in (RECIPES, OPTIMIZERS, ("zero-0", "zero-1", "zero-2", "zero-3", "zero-3-kept")):
        assert len(set(used) & set(group)) == 1
    assert len(set(used) & {*SCHEDULES, "no-pipeline"}) == 1
    assert (found.status == "runs") == (not found.findings)
    for one in found.findings:
        assert set(one.techniques) <= set(used)
