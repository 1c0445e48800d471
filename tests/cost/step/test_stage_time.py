"""The predicted seconds of a stage: what is in them, and that they agree with the floor about what is run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cost.builders import MIXTURE
from shardwise.api.given import arguments_of
from shardwise.api.inputs import job_from
from shardwise.cost.compute.flops import attended_tokens, recomputed_flops_per_token
from shardwise.cost.compute.operators import OperatorRole, layer_operators
from shardwise.cost.step.prediction import predict, stage_compute
from shardwise.cost.step.stage_time import layer_shape, seconds_by_kind, stage_seconds, step_overhead
from shardwise.layout.stages import rank_contents
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model
from shardwise.spec.presets import load
from shardwise.spec.stack import Stack


def job(model: str | Model, seq: int = 8192, **strategy: Any) -> Job:
    fields = {"model": model, "cluster": "dgx-h100", "strategy": strategy, "training": {"seq": seq}}
    return Job.from_dict(fields)


def test_a_sliding_window_shortens_attention_as_it_shortens_its_flops() -> None:
    windowed = load("model", Model, "mistral-7b")
    cases = [job(model, seq=32768) for model in (windowed, replace(windowed, sliding_window=None))]
    predicted, ideal = (
        [stage(case, rank_contents(case, 0)) for case in cases] for stage in (stage_seconds, stage_compute)
    )
    launch = cases[0].cluster.device.efficiency.operator_seconds * windowed.layers
    seconds = [one.attention.forward - launch for one in predicted]
    # PyTorch's kernel for windows is of the class before the newest.
    older = cases[0].cluster.device.efficiency.older_attention
    assert seconds[0] / seconds[1] == pytest.approx(ideal[0].attention_forward / ideal[1].attention_forward / older)
    assert seconds[0] < 0.5 * seconds[1]


def test_dropout_of_stored_scores_is_a_kernel_of_its_own() -> None:
    stored = Stack(attention="unfused")
    cases = [replace(job("gpt3-1.3b", seq=2048), stack=stored) for _ in range(2)]
    cases[1] = replace(cases[1], training=replace(cases[1].training, dropout=True))
    plain, dropped = (stage_seconds(case, rank_contents(case, 0)).attention for case in cases)
    model, device = cases[0].model, cases[0].cluster.device
    scores = model.layers * model.heads * 2048**2
    moved = device.memory_bandwidth * device.efficiency.memory / device.efficiency.stored_scores_traffic
    assert dropped.forward - plain.forward == pytest.approx(5 * scores / moved)
    assert dropped.backward - plain.backward == pytest.approx(5 * scores / moved)


def test_a_prediction_module_adds_its_layer_its_projection_and_a_head() -> None:
    with_module = load("model", Model, "deepseek-v3")
    cases = [job(model, seq=4096, ep=8) for model in (with_module, replace(with_module, mtp_layers=0))]
    more, less = (stage_seconds(case, rank_contents(case, 0)).total for case in cases)
    # One layer of 62 and a second head: between one and a half and three layers' worth.
    assert 1.0 < (more - less) / (less / 61) < 3.0


def test_every_second_product_of_llama_is_36_percent_of_its_products() -> None:
    """Key, output and the second wide matrix: (1024 + 4096 + 14336) of (2·4096 + 2·1024 + 3·14336)."""
    plain, again = (
        job("llama3-8b", recompute=mode, recompute_operators=["alternate-products"]) for mode in ("none", "selective")
    )
    ideal = stage_compute(again, rank_contents(again, 0))
    layers = stage_compute(plain, rank_contents(plain, 0)).matrices_forward
    head = 2 * 4096 * 128256 * plain.microbatch_tokens / plain.cluster.device.peak_flops("bf16")
    assert ideal.matrices_recomputed / (layers - head) == pytest.approx(19456 / 53248)
    assert ideal.attention_recomputed == 0


def test_the_recomputed_input_matmuls_of_the_mlp_are_two_thirds_of_it() -> None:
    """Gate and up: 2·14336 of (2·4096 + 2·1024 + 3·14336)."""
    plain, again = (job("llama3-8b", recompute=mode, recompute_operators=["mlp-up"]) for mode in ("none", "selective"))
    ideal = stage_compute(again, rank_contents(again, 0))
    layers = stage_compute(plain, rank_contents(plain, 0)).matrices_forward
    head = 2 * 4096 * 128256 * plain.microbatch_tokens / plain.cluster.device.peak_flops("bf16")
    assert ideal.matrices_recomputed / (layers - head) == pytest.approx(28672 / 53248)
    priced = [stage_seconds(one, rank_contents(one, 0)) for one in (plain, again)]
    assert priced[0].recomputed == 0
    assert priced[1].recomputed > ideal.matrices_recomputed
    assert recomputed_flops_per_token(again.model, 8192, "selective", again.recomputed_operators) == pytest.approx(
        32 * 2 * 4096 * 28672
    )


def test_the_only_expert_of_a_device_is_a_matmul_like_any_other() -> None:
    """As a dense model whose MLP has the expert's width sees as many tokens."""
    moe = {"experts": 8, "top_k": 1, "ffn": 8192}
    shared = {"layers": 1, "hidden": 4096, "heads": 32, "vocab": 32000}
    alone, grouped = (job(Model.from_dict({**shared, "ffn": 8192, "moe": moe}), ep=ep) for ep in (8, 4))
    dense = job(Model.from_dict({**shared, "ffn": 8192}))
    products = [seconds_by_kind(one, rank_contents(one, 0))["product"] for one in (alone, grouped, dense)]
    router = 2 * 3 * 4096 * 8 * alone.microbatch_tokens / alone.cluster.device.peak_flops("bf16")
    assert products[0] == pytest.approx(products[2] + router, rel=0.01)
    assert products[1] > 1.02 * products[0]


def on_gpus(cluster: str = "dgx-h200", gpus: int = 1, **training: Any) -> Job:
    fields = {f"training.{name}": value for name, value in {"seq": 1024, **training}.items()}
    return job_from(arguments_of({"model": "gpt2", "cluster": cluster, "gpus": gpus, **fields}), runs_here=True)[0]


def test_what_our_engine_runs_is_what_is_priced() -> None:
    """A recorded step has neither launches nor a host's cost; a compiled one moves fewer bytes. Others stay."""
    plain, recorded, compiled = (
        on_gpus(graphs=graphs, compile=compiled)
        for graphs, compiled in ((False, False), ("auto", False), ("auto", True))
    )
    assert predict(plain).step_seconds > predict(recorded).step_seconds + step_overhead(plain)
    assert predict(recorded).step_seconds > predict(compiled).step_seconds
    assert step_overhead(recorded) == 0
    for job in (on_gpus(gpus=2), on_gpus("laptop"), replace(recorded, stack=load("stack", Stack, "nemo"))):
        assert step_overhead(job) == job.cluster.device.efficiency.step_seconds
        assert job.running_stack.cuda_graphs == "none"
    assert job.running_stack is job.stack


def test_the_host_of_one_device_is_hidden_by_kernels_that_take_longer() -> None:
    """Its cost is that of clusters' frameworks; ours waits for nothing in a step, unless ranks exchange tokens."""
    short, long = (on_gpus(graphs=False, seq=seq, global_batch=8) for seq in (64, 1024))
    fixed = short.cluster.device.efficiency.step_seconds
    assert 0 < step_overhead(short) < fixed and step_overhead(long) < step_overhead(short)
    other = replace(long, stack=load("stack", Stack, "nemo"))
    assert step_overhead(other) == fixed


@pytest.mark.parametrize(("strategy", "waits"), [({}, False), ({"dp": 2}, False), ({"dp": 2, "ep": 2}, True)])
def test_only_tokens_that_ranks_exchange_make_the_host_wait(strategy: dict[str, int], waits: bool) -> None:
    gpus = strategy.get("dp", 1)
    fields = {"training.graphs": False, "training.seq": 1024, "training.global_batch": 8}
    fields |= {f"strategy.{name}": value for name, value in strategy.items()}
    arguments = arguments_of({"model": "mixtral-8x7b", "cluster": "dgx-h200", "gpus": gpus, **fields})
    job, _ = job_from(arguments, runs_here=True)
    assert (job.running_stack.routing == "dropless") == waits


def test_padded_experts_compute_the_rows_of_the_fullest_one() -> None:
    """Of 8 experts and two for a token: at most four times the mean, where all tokens choose the same two."""
    fields = {"model": "mixtral-8x7b", "cluster": "dgx-h100:1", "strategy": {"dp": 8, "zero": 3}}
    case = Job.from_dict({**fields, "training": {"seq": 4096, "global_batch": 8}, "stack": "pytorch"})
    padded = replace(case, stack=case.stack.changed(experts="padded"))
    rows = [
        [one.rows for one in layer_operators(job.model, layer_shape(job), MIXTURE) if one.role is OperatorRole.EXPERTS]
        for job in (case, padded)
    ]
    assert rows[1] == [4 * balanced for balanced in rows[0]]
    assert case.model.moe
    many = replace(case.model, moe=replace(case.model.moe, experts=64))
    assert padded.stack.rows_of_experts(many) == pytest.approx(4.38)
    assert padded.stack.most_rows_of_experts(many) == 32


def test_hooks_of_zero_3_set_the_pace_of_small_microbatches() -> None:
    """Qwen-7B by DeepSpeed on two A100: 4.0 s for 8 microbatches, of 256 tokens as of 512 (QwenLM/Qwen README)."""
    fields = {"model": "qwen2.5-7b", "cluster": "dgx-a100:1", "stack": "deepspeed"}
    seconds = {}
    for zero in (2, 3):
        for seq in (256, 512):
            strategy = {"dp": 8, "zero": zero, "recompute": "full"}
            training = {"seq": seq, "global_batch": 8}
            case = Job.from_dict({**fields, "strategy": strategy, "training": training})
            compute = stage_seconds(case, rank_contents(case, 0))
            seconds[zero, seq] = float(compute.forward + compute.backward) / case.model.layers
    assert seconds[3, 512] / seconds[3, 256] < 1.1
    assert seconds[3, 256] == pytest.approx(13.6e-3, rel=0.05)
    assert seconds[2, 256] < 0.6 * seconds[3, 256]


def test_a_stage_takes_as_long_as_its_own_layers_attend() -> None:
    """Every fourth of twelve layers attends to all keys: of four stages the first has none of them."""
    model = replace(load("model", Model, "mistral-7b"), layers=12, sliding_window=1024, sliding_window_every=4)
    case = job(model, seq=32768, pp=4)
    contents = [rank_contents(case, rank) for rank in range(4)]
    windowed, full = model.kinds
    assert [dict(one.kinds)[full] for one in contents] == [0, 1, 1, 1]
    first, *others = (stage_compute(case, held).attention_forward for held in contents)
    few, many = (attended_tokens(model, 32768, kind) for kind in (windowed, full))
    assert [seconds / first for seconds in others] == [pytest.approx((2 * few + many) / (3 * few))] * 3
    predicted = [stage_seconds(case, held).attention.forward for held in contents]
    assert predicted[1:] == [predicted[1]] * 3 and predicted[1] > 3 * predicted[0]


def test_layers_without_rotary_positions_rotate_nothing() -> None:
    pattern = (LayerRecord(repeat=3), LayerRecord(rotary=False))
    case = job(replace(load("model", Model, "llama3.2-1b"), pattern=pattern))
    rotated, bare = (layer_operators(case.model, layer_shape(case), kind) for kind in case.model.kinds)
    assert [one.role for one in rotated if one not in bare and one.kind == "traffic"] == [
        OperatorRole.ROTARY,
        OperatorRole.STARTS,
    ]
