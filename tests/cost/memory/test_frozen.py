"""What stacks keep of frozen weights: formats, inputs, gradients that hooks hold, whole weights while loading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.accuracy.vocabulary import cut
from shardwise.cost.compute.operators import OperatorRole, layer_operators
from shardwise.cost.memory.activations import SavedRole, layer_activation_bytes, layer_saved_tensors
from shardwise.cost.memory.device import device_memories, peak_memory
from shardwise.cost.memory.room import reserved_bytes
from shardwise.cost.memory.transient import wide_gradients
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import rank_predictions
from shardwise.cost.step.stage_time import layer_shape
from shardwise.layout.payloads import Role, sent_backward
from shardwise.layout.stages import rank_contents
from shardwise.spec import Job
from shardwise.spec.clusters import cluster_from
from shardwise.spec.layers import LayerRecord
from shardwise.spec.parameters import layer_parameters

TOKENS, LAYERS, HIDDEN = 2 * 4096, 32, 4096
WINDOWED = LayerRecord(mixer="window")  # every layer of Mistral 7B


def job(
    stack: dict[str, Any] | None = None,
    devices: int = 1,
    model: str = "mistral-7b",
    strategy: dict[str, Any] | None = None,
    **training: Any,
) -> Job:
    fields: dict[str, Any] = {"seq": 4096, "global_batch": 2 * devices, "adapters": {}, "base_precision": "nf4"}
    usual = {"microbatch": 2, "zero": 3 if devices > 1 else 0, "recompute": "full"}
    cluster = cut(cluster_from("dgx-a100"), devices, devices)
    made = Job.from_dict({"model": model, "cluster": cluster, "strategy": {**usual, **(strategy or {})},
                          "training": {**fields, **training}, "stack": "accelerate@0.34"})  # fmt: skip
    changes = {"loss": "pieces", "hooked_inputs": False, **(stack or {})}
    return replace(made, stack=replace(made.stack, **changes))


def test_an_upcast_base_has_fp32_hidden_states_and_ends() -> None:
    plain, wide = job(), job({"upcast_base": True})
    assert layer_activation_bytes(wide, *wide.model.kinds) == 2 * layer_activation_bytes(plain, *plain.model.kinds)
    others = plain.model.vocab * HIDDEN * 2 + (2 * LAYERS + 1) * HIDDEN
    assert peak_memory(wide).weights - peak_memory(plain).weights == pytest.approx(2 * others)
    bf16: dict[str, Any] = {"base_precision": "bf16"}
    assert peak_memory(job({"upcast_base": True}, **bf16)).total == peak_memory(job(**bf16)).total


def test_quantised_products_that_keep_their_inputs() -> None:
    def kept(**case: Any) -> float:
        return sum(tensor.bytes for tensor in layer_saved_tensors(job(**case), WINDOWED))

    only_queries: dict[str, Any] = {"adapters": {"targets": ["q_proj"]}}
    narrow = kept(**only_queries), kept(stack={"quantised_inputs": "kept"}, **only_queries)
    assert narrow[1] - narrow[0] == pytest.approx(TOKENS * 2 * (HIDDEN + 14336))  # of gate and up, and of down
    bf16 = {**only_queries, "base_precision": "bf16"}
    assert kept(**bf16) == kept(stack={"quantised_inputs": "kept"}, **bf16)


def test_inputs_stay_until_the_next_loss() -> None:
    short: dict[str, Any] = {"recompute": "none"}
    once, twice = (
        peak_memory(job({"quantised_inputs": kept, "loss": "whole"}, strategy=short)).activations
        for kept in ("kept", "kept over losses")
    )
    # Of queries to values, the output, gate and up, and down.
    assert twice - once == pytest.approx(LAYERS * TOKENS * 2 * (3 * HIDDEN + 14336))


def test_one_product_for_queries_keys_and_values() -> None:
    def kept(model: str, joined: bool, *targets: str) -> float:
        case = job({"joined_projections": joined, "adapters": "16-bit"}, model=model,
                   adapters={"targets": targets, "dropout": 0.1}, base_precision="bf16")  # fmt: skip
        return sum(tensor.bytes for tensor in layer_saved_tensors(case, *case.model.kinds)) / (TOKENS * 2 * HIDDEN)

    all_three = ("q_proj", "k_proj", "v_proj")
    dropped = 1 + 1 / 2  # what dropout leaves and its mask
    # Attention keeps values within a tensor of all three, or keys and values of all 32 heads, not of 8.
    assert kept("llama2-7b", True, *all_three) - kept("llama2-7b", False, *all_three) == pytest.approx(2 - 2 * dropped)
    assert kept("mistral-7b", True, *all_three) - kept("mistral-7b", False, *all_three) == pytest.approx(
        2 * 3 / 4 - 2 * dropped
    )
    # What the adapters of two add is kept to be put among the three.
    some = kept("llama2-7b", True, "q_proj", "v_proj") - kept("llama2-7b", False, "q_proj", "v_proj")
    assert some == pytest.approx(2 - dropped + 2)


def test_dropout_leaves_what_adapters_read() -> None:
    def inputs(dropout: float) -> float:
        case = job({"adapters": "16-bit"}, adapters={"dropout": dropout}, base_precision="bf16")
        return sum(t.bytes for t in layer_saved_tensors(case, *case.model.kinds) if t.role is SavedRole.LINEAR_INPUTS)

    assert inputs(0.0) == 2 * TOKENS * 2 * HIDDEN
    assert inputs(0.1) == 0


def test_frozen_norms_keep_no_output() -> None:
    def outputs(**training: Any) -> float:
        case = job({"norms": "separate"}, base_precision="bf16", **training)
        return sum(t.bytes for t in layer_saved_tensors(case, *case.model.kinds) if t.role is SavedRole.NORM_OUTPUTS)

    assert outputs() == 0 < outputs(trained=["norms"])


def test_a_flat_parameter_of_frozen_and_trained_weights_has_gradients_of_both() -> None:
    bf16: dict[str, Any] = {"base_precision": "bf16", "global_batch": 16, "seq": 512}
    apart, mixed = (peak_memory(job({"flat_parameters": kind}, 4, **bf16)) for kind in ("uniform", "mixed"))
    layers = job().model.layers * sum(m.parameters for m in job().model.attention_matrices)
    layers += job().model.layers * sum(m.parameters for m in job().model.mlp_matrices(14336))
    assert mixed.gradients - apart.gradients == pytest.approx(2 * layers / 4)
    local, alone = (
        peak_memory(job({"flat_parameters": "mixed"}, devices, strategy={"accumulate": "local"}, **bf16))
        for devices in (4, 1)
    )
    assert local.gradients - apart.gradients == pytest.approx(2 * layers, rel=0.01)
    assert alone.gradients < 0.1 * layers


def test_hooks_hold_the_gradients_of_repeated_frozen_layers() -> None:
    def added(devices: int, **training: Any) -> float:
        on, off = job({"hooked_inputs": True}, devices, **training), job(None, devices, **training)
        return peak_memory(on).total - peak_memory(off).total

    assert added(2) == pytest.approx(2 * TOKENS * LAYERS * HIDDEN)
    assert added(1) == 0
    assert added(2, adapters=None, base_precision="computed") == 0


def test_whole_weights_are_loaded_beside_their_shards() -> None:
    short: dict[str, Any] = {"seq": 128, "base_precision": "bf16"}
    memory = peak_memory(job({"loads_whole": True}, 4, **short))
    assert memory.gathered == pytest.approx(4 * memory.weights, rel=0.01)
    assert memory.activations == 0
    assert memory.total > 1.5 * peak_memory(job(None, 4, **short)).total
    assert peak_memory(job({"loads_whole": True}, 1, **short)).total == peak_memory(job(None, 1, **short)).total


def test_casts_of_adapters_take_time_and_fused_ones_least() -> None:
    adapters: dict[str, Any] = {"adapters": {"dropout": 0.1, "targets": ["attention"]}}
    fp32, plain, fused = (
        predict(job({"adapters": kind}, **adapters)).step_seconds for kind in ("fp32", "16-bit", "fused")
    )
    assert fused < plain < fp32 < 1.3 * fused


def test_adapters_in_units_of_their_own_take_the_host_and_hide_no_gather() -> None:
    def seconds(units: str, **case: Any) -> float:
        return predict(job({"adapter_units": units}, 4, **case)).step_seconds

    short, long = {"seq": 64, "global_batch": 8}, {"seq": 4096}
    units, passes = 2 * 7 * LAYERS, 4 / 3  # recompute repeats one of three
    assert seconds("own", **short) - seconds("shared", **short) > units * passes * 1e-3
    assert 0 < seconds("own", **long) - seconds("shared", **long) < 0.1 * seconds("shared", **long)
    whole = {"strategy": {"zero": 0}}
    assert seconds("own", **whole, **long) == seconds("shared", **whole, **long)


def test_stages_are_priced_as_their_own_layers_are_tuned() -> None:
    """Below the first trained layer nothing runs backward; only what is trained has gradients and states."""
    training = {"seq": 4096, "global_batch": 8, "trained": ["layers.28-31"]}
    last = Job.from_dict({"model": "mistral-7b", "cluster": "dgx-a100:1", "strategy": {"pp": 4, "dp": 2, "zero": 3},
                          "training": training, "stack": "shardwise"})  # fmt: skip
    *below, top = device_memories(last)
    trained = rank_contents(last, 3).total
    assert trained == 4 * layer_parameters(last.model, *last.model.kinds).total
    for memory in below:
        assert memory.gradients == memory.optimizer == memory.recomputed == 0
        assert memory.activations < 0.001 * top.activations
    stages = rank_predictions(predict(last))
    call = last.cluster.device.efficiency.stage_call_seconds
    assert all(stage.compute.backward == pytest.approx(call) for stage in stages[:-1])
    assert stages[-1].compute.backward > 0.5 * stages[-1].compute.forward
    again, sums = (
        [
            sum(t.bytes_sent for t in stage.traffics if (t.dimension, t.payload) == ("dp", sent_backward(role)))
            for stage in stages
        ]
        for role in (Role.PARAMETERS, Role.GRADIENTS)
    )
    assert again[:-1] == sums[:-1] == [0, 0, 0] and again[-1] > 0 and sums[-1] > 0


def test_weights_that_operators_make_of_codes_stay_until_their_backward_pass() -> None:
    kernel, operators = (job({"dequantised_by": kind}, seq=512, global_batch=2) for kind in ("kernel", "operators"))
    saved = layer_saved_tensors(operators, *operators.model.kinds)
    copies = [t.bytes for t in saved if t.role is SavedRole.WEIGHT_COPIES]
    matrices = (*kernel.model.attention_matrices, *kernel.model.mlp_matrices(14336))
    assert copies == [pytest.approx(2 * sum(matrix.parameters for matrix in matrices))]
    assert SavedRole.WEIGHT_COPIES not in {tensor.role for tensor in layer_saved_tensors(kernel, *kernel.model.kinds)}
    assert predict(operators).step_seconds > 1.2 * predict(kernel).step_seconds


def test_copies_of_trained_ends_stay_beside_their_originals() -> None:
    ends: dict[str, Any] = {"trained": ["embedding", "head"], "base_precision": "bf16", "seq": 256, "global_batch": 2}
    alone, both = (
        peak_memory(job({"trained_copies": True}, **{**ends, "trained": []})),
        peak_memory(job({"trained_copies": True}, **ends)),
    )
    weights = 2 * 32_000 * HIDDEN  # of the embedding and the head; the others are frozen in 16 bits
    assert both.weights - alone.weights == pytest.approx(2 * weights)
    assert both.optimizer - alone.optimizer == pytest.approx(4 * weights)
    assert both.gradients - alone.gradients == pytest.approx(2 * weights)


def test_blocks_of_shifted_logits_are_reserved_and_fit_nothing() -> None:
    def reserved(**stack: Any) -> float:
        case = job({"loss": "plain", **stack})
        return reserved_bytes(case, peak_memory(case))

    logits = TOKENS * 32_000
    assert reserved(shifted_logits=True) - reserved(shifted_logits=False) == pytest.approx((2 + 4) * logits)
    assert reserved(shifted_logits=True, loss="fused") == reserved(shifted_logits=False, loss="fused")


def test_one_product_has_one_adapter() -> None:
    def adapters(joined: bool, tp: int) -> list[float]:
        case = job({"joined_projections": joined}, tp, strategy={"tp": tp, "zero": 0}, global_batch=2)
        operators = layer_operators(case.model, layer_shape(case), *case.model.kinds, case.training.tuning)
        return [one.flops for one in operators if one.role is OperatorRole.ADAPTER and one.kind == "product"]

    for tp in (1, 4):
        apart, joined = adapters(False, tp), adapters(True, tp)
        assert len(apart) - len(joined) == 2 * 2
        assert sum(apart) - sum(joined) == pytest.approx(2 * 2 * TOKENS * 16 * HIDDEN)  # two inputs read once less


def test_the_gradient_of_an_input_that_is_not_kept_takes_the_place_of_nothing() -> None:
    attention: dict[str, Any] = {"adapters": {"targets": ["attention"]}}
    mixture = job(model="mixtral-8x7b", **attention)
    # Of its input, the activated gate and the other factor.
    assert wide_gradients(job(**attention), WINDOWED) == 3
    assert wide_gradients(job(), WINDOWED) == 2
    assert wide_gradients(job(adapters=None, base_precision="computed"), WINDOWED) == 2
    assert wide_gradients(mixture, *mixture.model.kinds) == 2
