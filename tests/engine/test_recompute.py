"""Recompute: the same numbers to the last bit, in exactly the memory that the planner counts on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from engine.recompute_cases import (
    GPT,
    LATENT,
    LLAMA,
    MIXTURE,
    MODELS,
    batch,
    decoder_of,
    gradients,
    job_of,
    kept_by_last_layer,
    step,
)
from engine.workers import on_ranks
from shardwise.cost.memory.activations import layer_activation_bytes
from shardwise.engine.autograd import Deferrable, compute, deferring
from shardwise.engine.mesh import build_mesh
from shardwise.engine.patterns import DECODER
from shardwise.engine.recompute import apply_recompute, recomputed_layers
from shardwise.engine.tensor.apply import apply_tensor
from shardwise.models.decoder import Decoder
from shardwise.models.moe import MoELayer
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import default_stack
from shardwise.spec.training import Training

FULL: dict[str, Any] = {"recompute": "full"}
CHEAP: dict[str, Any] = {"recompute": "selective"}  # with fused attention: norms, activations, up-projections


def only(*operators: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_operators": list(operators)}


WAYS = {
    "norm": only("norm"),
    "activation": only("activation"),
    "mlp-up": only("activation", "mlp-up"),
    "cheap": CHEAP,
    "products": only("alternate-products"),
    "full": FULL,
}


def recomputing(job: Job) -> Decoder:
    decoder = decoder_of(job)
    apply_recompute(decoder, job, DECODER)
    return decoder


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == expected[0]
    assert list(found[1]) == list(expected[1]), "names or their order have changed"
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.quick(3)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_are_the_same_to_the_last_bit(model: Model) -> None:
    for precision in ("fp32", "bf16"):
        expected = step(decoder_of(job_of(model, precision)))
        for way in WAYS.values():
            assert_same(step(recomputing(job_of(model, precision, **way))), expected)


def norm_statistics(model: Model) -> float:
    """LayerNorm keeps mean and deviation of every token, which the planner leaves out (1/h of the layer)."""
    return 2 * 2 * 2 * 16.0 if model.norm == "layernorm" else 0.0  # two norms, two numbers, tokens


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen", "gpt", "latent"])
def test_a_layer_keeps_what_the_planner_says(name: str, precision: str) -> None:
    model = MODELS[name]
    for way, strategy in {"none": {}, **WAYS}.items():
        if way == "products" and (model.mla or model.qk_norm):
            continue  # the planner knows it of TorchTitan's dense Llama
        job = job_of(model, precision, **strategy)
        kept = sum(one.bytes for one in kept_by_last_layer(recomputing(job), job))
        numbers = 0.0 if way in ("full", "products") else norm_statistics(model)
        assert kept == layer_activation_bytes(job, job.model.kinds[0]) + numbers * job.training.recipe.activation, way


def test_a_mixture_of_experts_frees_what_the_planner_says() -> None:
    plain = job_of(MIXTURE)
    whole = sum(one.bytes for one in kept_by_last_layer(decoder_of(plain), plain))
    for strategy in (only("norm"), only("activation"), CHEAP):
        job = job_of(MIXTURE, **strategy)
        kept = sum(one.bytes for one in kept_by_last_layer(recomputing(job), job))
        (kind,) = job.model.kinds
        freed = layer_activation_bytes(plain, kind) - layer_activation_bytes(job, kind)
        assert whole - kept == freed
    job = job_of(MIXTURE, **FULL)
    kept = sum(one.bytes for one in kept_by_last_layer(recomputing(job), job))
    assert kept == layer_activation_bytes(job, *job.model.kinds)


def test_stages_of_a_rank_share_the_layers_that_are_recomputed_whole() -> None:
    model = replace(GPT, layers=4)
    job = job_of(model, recompute="full", recompute_layers=2)
    stages = [decoder_of(job), decoder_of(job)]
    for stage, held in zip(stages, ("01", "23")):
        for index in set(stage.layers) - set(held):
            del stage.layers[index]
    apply_recompute(stages, job, DECODER)
    replaced = ["forward" in vars(layer) for stage in stages for layer in stage.layers.values()]
    assert replaced == [True, False, True, False]
    assert recomputed_layers([4, 3], 5) == [3, 2]
    assert recomputed_layers([4, 3], None) == recomputed_layers([4, 3], 99) == [4, 3]


def test_tokens_that_are_routed_again_do_not_count_twice() -> None:
    for strategy in (FULL, CHEAP):
        decoder = recomputing(job_of(MIXTURE, **strategy))
        step(decoder)
        loads = [one.load for one in decoder.modules() if isinstance(one, MoELayer)]
        assert [load.sum().item() for load in loads] == [2 * 16 * 2] * 2


def test_unfused_attention_keeps_no_scores() -> None:
    def scores(job: Job) -> int:
        with sdpa_kernel(SDPBackend.MATH):
            return sum(one.shape[-2:] == (16, 16) for one in kept_by_last_layer(recomputing(job), job))

    unfused = Training(seq=16, precision="fp32", attention="unfused")
    plain, again = (replace(job_of(GPT, **way), training=unfused) for way in ({}, only("attention")))
    assert scores(plain) and not scores(again)
    with sdpa_kernel(SDPBackend.MATH):
        assert_same(step(recomputing(again)), step(decoder_of(plain)))


# -- together with others --


def test_weight_gradients_may_be_put_off() -> None:
    """Our pipeline's split: inputs of products wait for W, everything else is free after I."""
    for model in (LLAMA, MIXTURE):
        plain = decoder_of(job_of(model))
        for seed in (1, 2):
            plain(*batch(model, seed)).backward()
        for strategy in (CHEAP, FULL):
            decoder, waiting = recomputing(job_of(model, **strategy)), []
            with Deferrable():
                losses = [decoder(*batch(model, seed)) for seed in (1, 2)]  # two microbatches in flight
                for loss in losses:
                    with deferring() as later:
                        # As its place in the graph: of a tensor, backward itself would take the mode away.
                        torch.autograd.backward((get_gradient_edge(loss),), (torch.ones_like(loss),))
                    waiting.append(later)
            for later in waiting:
                compute(later)
            for name, gradient in gradients(plain).items():
                torch.testing.assert_close(gradients(decoder)[name], gradient, rtol=1e-5, atol=1e-6)


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def tensor_parallel(model: Model, strategy: dict[str, Any]) -> tuple[Any, float, float, list[str]]:
    job = replace(job_of(model, tp=2, **strategy), stack=default_stack())
    mesh = build_mesh(job.strategy, key_value_heads=model.key_value_heads)
    decoder = decoder_of(job)
    apply_tensor(decoder, mesh, DECODER, model)
    apply_recompute(decoder, job, DECODER)
    with Collectives() as collectives:
        found = step(decoder)
    kept = sum(one.bytes for one in kept_by_last_layer(decoder, job))
    return found, kept, layer_activation_bytes(job, job.model.kinds[0]), collectives.names


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel_layers_keep_as_planned_and_send_nothing_twice(sequence_parallel: bool) -> None:
    way = {"sequence_parallel": sequence_parallel}
    for model in (LLAMA, LATENT):
        plain = on_ranks(2, tensor_parallel, model, way)
        for strategy in (CHEAP, FULL):
            for rank, (found, kept, planned, names) in enumerate(on_ranks(2, tensor_parallel, model, way | strategy)):
                assert_same(found, plain[rank][0])
                assert kept == planned and plain[rank][1] == plain[rank][2]
                assert (names == plain[rank][3]) == (strategy is CHEAP)


def sharded(model: Model, strategy: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    decoder = recomputing(job_of(model, **strategy))
    for layer in decoder.layers.values():
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(decoder)
    loss, found = step(decoder)
    return loss, {name: gradient.full_tensor() for name, gradient in found.items()}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_sharded_parameters_are_there_when_functions_run_again() -> None:
    for model in (LLAMA, LATENT, MIXTURE):
        (expected, *_), (cheap, *_), (full, *_) = (on_ranks(2, sharded, model, way) for way in ({}, CHEAP, FULL))
        assert_same(cheap, expected)
        assert_same(full, expected)


def test_what_would_repeat_communication_or_is_not_there_is_refused() -> None:
    unfused = replace(job_of(GPT, cp=2, **only("attention")), training=Training(seq=16, attention="unfused"))
    for job, word in (
        (job_of(LLAMA, tp=2, **only("alternate-products")), "tensor parallelism"),
        (job_of(LLAMA, tp=2, **only("mlp-up")), "tensor parallelism"),
        (unfused, "context parallelism"),
        (job_of(LLAMA, **only("up-projection")), "has no up-projection"),
    ):
        with pytest.raises(SpecError, match=word):
            apply_recompute(decoder_of(job), job, DECODER)
