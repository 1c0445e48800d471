"""Every parameter of a model lies on exactly one (tp, pp, ep) shard, except what is known to be replicated."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import pytest

from cost.builders import GPT, LLAMA, MLA_MOE, MOE, job, preset, switched
from shardwise.cost.analysis import analyze
from shardwise.cost.step.prediction import rank_floors
from shardwise.layout.mesh import rank_places
from shardwise.layout.stages import rank_contents
from shardwise.spec import presets
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count, trained_parameters
from tables import table

CATALOGUE = presets.names("model")


def held_once(case: Job) -> float:
    """Parameters on all pipeline ranks, one tensor- and expert-parallel rank each."""
    return sum(rank_contents(case, rank).total for rank in range(case.strategy.pp))


def on_all_shards(case: Job) -> float:
    """Parameters on all (tp, pp) shards, with the experts of all expert shards."""
    strategy = case.strategy
    ranks = [rank_contents(case, rank) for rank in range(strategy.pp)]
    dense = sum(contents.dense for contents in ranks) * strategy.tp
    return dense + sum(contents.experts for contents in ranks) * strategy.ep * strategy.expert_tensor_parallel


def replicated_by_tensor_parallelism(model: Model) -> float:
    """What every tensor-parallel rank holds whole, counted from the model's own description."""
    h = model.hidden
    norm = h * (2 if model.norm == "layernorm" and model.norm_bias else 1)
    layer = model.norms_per_layer * norm + (h if model.attention_out_bias else 0)
    if model.qk_norm and not model.qk_norm_whole:
        layer += 2 * (model.head_dim or 0)
    if model.mla:
        q, kv, rope = model.mla.q_rank or 0, model.mla.kv_rank, model.mla.rope_dim
        layer += h * (q + kv + rope) + q + kv
    total = model.layers * layer
    total += (model.layers - model.moe_layers) * (h if model.mlp_bias else 0)
    if model.moe:
        router = h * model.moe.experts + model.moe.experts * (model.moe.router_bias + model.moe.router_logit_bias)
        router += h if model.moe.shared_gate else 0
        total += model.moe_layers * (router + (h if model.mlp_bias and model.moe.shared_ffn else 0))
    total += (norm if model.final_norm else 0) + (norm if model.embedding_norm else 0)
    total += model.token_types * h + (model.max_seq * h if model.positions == "learned" else 0)
    total += h * (h + 1) if model.pooler else 0
    return total + (h * (h + 1) + norm + model.vocab if model.mlm_head else 0)


def biases_of_experts(model: Model) -> int:
    """Output biases of all experts: ranks that split one expert hold them whole."""
    return model.moe_layers * model.moe.experts * model.hidden if model.moe and model.mlp_bias else 0


def without_modules(name: str) -> Model:
    return replace(preset(name), mtp_layers=0)


@table("name", CATALOGUE)
def test_one_device_holds_the_whole_model(name: str) -> None:
    model = preset(name)
    assert held_once(job(model, dp=1)) == parameter_count(model, with_prediction_modules=True)


@table("name", CATALOGUE)
def test_pipeline_ranks_hold_the_model_between_them(name: str) -> None:
    """Both ends hold a tied embedding, and nothing else twice: positions stay on the first stage."""
    model = without_modules(name)
    case = job(model, dp=1, pp=4, stage_layers="balanced")
    twice = model.vocab * model.hidden if model.tied_embeddings else 0
    assert held_once(case) == parameter_count(model) + twice


@table("name", CATALOGUE)
def test_tensor_parallel_ranks_hold_the_model_between_them(name: str) -> None:
    model = without_modules(name)
    kv = model.key_value_heads
    tp = next(n for n in (4, 5, 2, 3, model.heads) if model.heads % n == 0 and 0 in (kv % n, n % kv))
    case = job(model, dp=1, tp=tp, sequence_parallel=False)
    copies = tp / min(tp, model.key_value_heads) - 1  # fewer key-value heads than ranks are repeated
    keys = 0 if model.mla else 2 * model.key_value_heads * (model.head_dim or 0) * model.layers
    repeated = copies * keys * (model.hidden + (1 if model.qkv_bias else 0))
    expected = parameter_count(model) + (tp - 1) * (replicated_by_tensor_parallelism(model) + biases_of_experts(model))
    assert on_all_shards(case) == pytest.approx(expected + repeated, rel=1e-12)


@table("name", [name for name in CATALOGUE if preset(name).moe])
@table("ep", [2, 8])
def test_expert_parallel_ranks_hold_the_experts_between_them(name: str, ep: int) -> None:
    model = without_modules(name)
    assert model.moe is not None
    case = job(model, dp=8, ep=gcd(ep, model.moe.experts), pp=2, stage_layers="balanced")
    assert on_all_shards(case) == pytest.approx(parameter_count(model), rel=1e-12)


SCHEDULES = ["1f1b", "interleaved", "zbv", "v-half", "v-min", "dualpipev", "gpipe", "zb-h1"]


@table("schedule", SCHEDULES)
@table("model", [LLAMA, MOE])
def test_every_schedule_places_every_layer_once(schedule: str, model: Model) -> None:
    case = job(model, dp=1, pp=4, schedule=schedule, interleave=2 if schedule == "interleaved" else 1,
               training={"global_batch": 8})  # fmt: skip
    ranks = [rank_contents(case, rank) for rank in range(4)]
    assert sum(contents.layers for contents in ranks) == 8
    assert sum(contents.moe_layers for contents in ranks) == model.moe_layers
    assert held_once(case) == parameter_count(model)


def test_interleaved_chunks_are_not_contiguous() -> None:
    """MOE's two dense layers lead: with one layer per chunk and 4 ranks they lie on ranks 0 and 1."""
    case = job(MOE, dp=1, pp=4, schedule="interleaved", interleave=2, training={"global_batch": 8})
    assert [dict(rank_contents(case, rank).kinds)[MOE.kinds[0]] for rank in range(4)] == [1, 1, 0, 0]
    plain = job(MOE, dp=1, pp=4)
    assert [dict(rank_contents(plain, rank).kinds)[MOE.kinds[0]] for rank in range(4)] == [2, 0, 0, 0]


def test_v_schedules_fold_both_ends_onto_the_first_rank() -> None:
    case = job(GPT, dp=1, pp=4, schedule="zbv", training={"global_batch": 8})
    first = rank_contents(case, 0)
    assert first.has_embedding
    assert first.has_head
    # The tied embedding is one tensor there.
    assert held_once(case) == parameter_count(GPT)


def test_dualpipe_holds_every_layer_twice() -> None:
    """Two directions over the same ranks: a rank has its own stage and its mirror's (DualPipe README: 2×)."""
    case = job(LLAMA, dp=1, pp=4, schedule="dualpipe", training={"global_batch": 8})
    assert held_once(case) == 2 * parameter_count(LLAMA)
    assert sum(rank_contents(case, rank).layers for rank in range(4)) == 8  # but works on each once


def test_uneven_stages() -> None:
    case = job(LLAMA, dp=1, pp=4, stage_layers=[1, 3, 3, 1])
    assert [rank_contents(case, rank).layers for rank in range(4)] == [1, 3, 3, 1]
    assert held_once(case) == parameter_count(LLAMA)


def test_the_slowest_of_uneven_stages_sets_the_time() -> None:
    for position in range(4):
        layers = [1, 1, 1, 1]
        layers[position] = 5
        analysis = analyze(job(LLAMA, dp=1, pp=4, stage_layers=layers))
        longest = max(rank_floors(analysis.step.prediction), key=lambda rank: rank.step_seconds(0.0))
        assert analysis.dimension_rank("tp") == longest.contents.rank == position


def test_prediction_modules_sit_beside_the_head_with_an_embedding_of_their_own() -> None:
    model = MLA_MOE
    case = job(model, dp=1, pp=2)
    embedding = model.vocab * model.hidden
    assert held_once(case) == parameter_count(model, with_prediction_modules=True) + embedding
    assert [rank_contents(case, rank).layers for rank in range(2)] == [4, 5]


def test_expert_coordinates_name_the_ranks_that_hold_the_same_experts() -> None:
    """16 ranks, tp 2, ep 4, expert_tp 1: groups of 4 ranks with 4 different coordinates; 4 copies of each."""
    case = job(MOE, switched(16), tp=2, dp=8, ep=4, expert_tp=1)
    places = rank_places(case)
    groups: dict[int, list[int]] = {}
    for place in places:
        groups.setdefault(place.groups["ep"], []).append(place.coordinates["ep"])
    assert len(groups) == 4
    assert all(sorted(members) == [0, 1, 2, 3] for members in groups.values())


@table("order", [("tp", "cp", "dp", "pp"), ("pp", "dp", "cp", "tp"), ("cp", "pp", "tp", "dp")])
def test_groups_of_a_dimension_differ_in_that_coordinate_only(order: tuple[str, ...]) -> None:
    case = job(LLAMA, switched(4, 6), order=list(order), tp=2, cp=2, dp=3, pp=2)
    places = rank_places(case)
    assert len({tuple(place.coordinates[name] for name in order) for place in places}) == 24
    for name, degree in (("tp", 2), ("cp", 2), ("dp", 3), ("pp", 2)):
        groups: dict[int, list[dict[str, int]]] = {}
        for place in places:
            groups.setdefault(place.groups[name], []).append(place.coordinates)
        assert len(groups) == 24 // degree
        for members in groups.values():
            assert sorted(member[name] for member in members) == list(range(degree))
            others = {tuple(member[other] for other in order if other != name) for member in members}
            assert len(others) == 1


@pytest.mark.parametrize("layers", ["layers.0-1", "layers.1-3", "layers.2-2"])
@pytest.mark.parametrize("pp", [1, 2])
def test_layers_trained_beside_a_prediction_module_that_is_not(layers: str, pp: int) -> None:
    """The module is like the last layer, and its tuning is its own."""
    model = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 512, "max_seq": 64, "mtp_layers": 1,
             "moe": {"experts": 4, "top_k": 2, "ffn": 32, "dense_layers": 1}}  # fmt: skip
    training = {"seq": 64, "global_batch": 8, "trained": [layers]}
    given = {"model": model, "cluster": "laptop:2", "strategy": {"pp": pp}, "training": training}
    tuned = Job.from_dict(given)
    held = sum(rank_contents(tuned, rank).total for rank in range(pp))
    assert held == trained_parameters(tuned.model, tuned.training.tuning)
