"""The price of fine-tuning: what frozen weights save, what adapters add, and what published runs show of it."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.cost.analysis import Analysis, analyze
from shardwise.cost.compute.flops import flops_per_token
from shardwise.spec import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.stack import stack_from

GIB = 2**30
Fields = dict[str, Any]


def tuned(
    model: Any = "llama3-8b", cluster: str = "dgx-h100:1", strategy: Fields | None = None,
    stack: str = "shardwise", **training: Any,
) -> Analysis:  # fmt: skip
    fields = {"seq": 4096, "global_batch": 16, **training}
    strategy = {"microbatch": 2, **(strategy or {})}
    job = {"model": model, "cluster": cluster, "strategy": strategy, "training": fields, "stack": stack_from(stack)}
    return analyze(Job.from_dict(job))


def test_adapters_alone_have_gradients_and_states() -> None:
    memory = tuned(adapters={}).memory
    assert memory.gradients == pytest.approx(2 * 41_943_040)
    assert memory.optimizer < 13 * 41_943_040
    assert memory.weights == pytest.approx(2 * (parameter_count(tuned().job.model) + 41_943_040))


@pytest.mark.parametrize(("name", "each"), [("bf16", 2), ("int8", 1), ("nf4", 0.5625), ("nf4-double", 0.515869)])
def test_frozen_linear_layers_have_their_own_format(name: str, each: float) -> None:
    model = tuned().job.model
    linear = model.layers * sum(m.parameters for m in (*model.attention_matrices, *model.mlp_matrices(model.ffn)))
    kept = tuned(adapters={}, base_precision=name).memory.weights
    others = 2 * (parameter_count(model) - linear + 41_943_040)
    assert kept == pytest.approx(each * linear + others, rel=1e-6)


def test_lora_takes_four_flops_of_a_weight_and_token() -> None:
    """NVIDIA counts 402e12 / 12,472.87 = 32.2 GFLOP a token of Llama-3 8B at 4,096 (NeMo AutoModel's page)."""
    job = tuned(adapters={"rank": 8}).job
    counted = flops_per_token(job.model, 4096, "full-attention", job.training.tuning)
    full = flops_per_token(job.model, 4096, "full-attention")
    assert 0.66 < counted / full < 0.7
    assert counted == pytest.approx(32.2e9, rel=0.12)


def test_layers_below_the_first_trained_one_have_no_backward_pass() -> None:
    whole, last, head = tuned(), tuned(trained=["layers.28-31"]), tuned(trained=["head"])
    assert last.memory.activations < 0.2 * whole.memory.activations
    assert head.step.step_seconds < last.step.step_seconds < 0.6 * whole.step.step_seconds


def test_only_trained_weights_are_reduced_and_all_are_gathered() -> None:
    def sent(zero: int, **training: Any) -> dict[str, float]:
        traffics = tuned(strategy={"zero": zero}, **training).dimension_traffics("dp")
        sizes: dict[str, float] = {}
        for traffic in traffics:
            if traffic.in_pass == "backward" and zero == 3:
                continue
            name = str(traffic.payload.role.value)
            sizes[name] = sizes.get(name, 0.0) + traffic.size_bytes * traffic.count
        return sizes

    everything = parameter_count(tuned().job.model)
    reduced = sent(0, adapters={})
    assert sum(reduced.values()) == pytest.approx(2 * 41_943_040, rel=0.01)
    gathered = max(sent(3, adapters={}).values())
    assert gathered == pytest.approx(2 * (everything + 41_943_040), rel=0.1)
    quantised = max(sent(3, adapters={}, base_precision="nf4").values())
    assert quantised < 0.45 * gathered


def test_a_quantised_base_costs_time_for_each_use_and_again_under_recompute() -> None:
    def slower(recompute: str) -> float:
        plain, codes = (
            tuned(adapters={}, base_precision=name, strategy={"recompute": recompute}).step.step_seconds
            for name in ("bf16", "nf4")
        )
        return codes - plain

    assert 0 < slower("none") < slower("full")


def test_a_reference_runs_forward_once_more_and_may_be_a_copy() -> None:
    plain, adapted, copied = tuned(adapters={}), tuned(adapters={}, task="dpo"), tuned(task="dpo")
    assert plain.step.step_seconds < adapted.step.step_seconds < 1.6 * plain.step.step_seconds
    assert adapted.memory.total == plain.memory.total
    model_bytes = 2 * parameter_count(copied.job.model)
    assert copied.memory.weights - tuned().memory.weights == pytest.approx(model_bytes)


def test_dropout_keeps_an_input_for_each_adapter_unless_it_is_drawn_again() -> None:
    dropping, plain = tuned(adapters={"dropout": 0.1}), tuned(adapters={})
    assert dropping.memory.activations == plain.memory.activations
    assert plain.step.step_seconds < dropping.step.step_seconds < 1.2 * plain.step.step_seconds
    peft = [tuned(stack="pytorch", adapters={"dropout": share}).memory.activations for share in (0.0, 0.1)]
    inputs = 6 * 4096 + 14_336  # of a layer's seven matrices; what is left of them in 16 bit, and a mask
    read = 5 * 4096 + 14_336  # what nothing reads any more; attention keeps its output itself
    assert peft[1] - peft[0] == pytest.approx(32 * 2 * 4096 * (3 * inputs - 2 * read))


@pytest.mark.parametrize(
    "strategy",
    [{"tp": 8}, {"pp": 4}, {"cp": 4}, {"zero": 1}, {"zero": 3}, {"recompute": "full"}, {"recompute": "selective"}],
)
@pytest.mark.parametrize(
    "training", [{"adapters": {}}, {"trained": ["norms"]}, {"adapters": {}, "base_precision": "nf4"}]
)
def test_less_is_trained_in_less_time_and_memory_in_every_layout(strategy: Fields, training: Fields) -> None:
    whole, part = tuned(strategy=strategy), tuned(strategy=strategy, **training)
    assert part.floor_seconds <= part.step.step_seconds
    assert part.memory.total < whole.memory.total
    assert part.floor_seconds < whole.floor_seconds


def test_a_checkpoint_holds_what_is_trained() -> None:
    from shardwise.cost.campaign import checkpoint_bytes

    assert checkpoint_bytes(tuned(adapters={})) == pytest.approx(14 * 41_943_040, rel=0.01)


SHORT = {"mean": 400, "longest": 4096}


def test_packed_documents_attend_to_themselves() -> None:
    whole, packed = tuned(), tuned(lengths=SHORT)
    assert packed.step.step_seconds < whole.step.step_seconds
    assert packed.memory.total == whole.memory.total
    assert "padding" in " ".join(packed.notes)


def test_padding_costs_time_and_packing_gains_it_back() -> None:
    padded, packed = (tuned(lengths={**SHORT, "packing": packing}) for packing in ("padded", "packed"))
    assert packed.tokens_per_second > 1.3 * padded.tokens_per_second
    assert padded.step.step_seconds < tuned().step.step_seconds  # shorter sequences
    assert padded.floor_seconds < padded.step.step_seconds
    (note,) = [note for note in padded.notes if "padding" in note]
    assert "packing would train the same documents with" in note


def test_replicas_wait_for_the_longest_documents() -> None:
    alike = {"histogram": [[400, 1]], "packing": "padded"}
    unlike = {"histogram": [[200, 3], [1000, 1]], "packing": "padded"}

    def waits(lengths: Fields) -> float:
        analysis = tuned(lengths=lengths, strategy={"microbatch": 1})
        return analysis.parts["stragglers"] / analysis.step.step_seconds

    assert waits(unlike) > waits(alike) + 0.05
