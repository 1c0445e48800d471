"""What plugins, strategies and modules say becomes the job that the equivalent configuration file makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.fsdp import MixedPrecisionPolicy

from integrations.tiny import network
from shardwise.integrations.accelerate import layout_of
from shardwise.integrations.layout import Ranks, cluster_for, job_of
from shardwise.integrations.module import NotPriced, Sequences, module_facts, optimizer_of, sequences_of
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from tables import table

SEQUENCES = Sequences(32, "given")


def state(kind: str, world: int = 8, **more: Any) -> SimpleNamespace:
    usual = {"mixed_precision": "bf16", "num_processes": world, "parallelism_config": None}
    return SimpleNamespace(distributed_type=DistributedType(kind), **{**usual, **more})


def job(found: Any, rows: int = 2, accumulation: int = 4, cluster: str = "dgx-h100:1", model: Any = None) -> Job:
    module = model or network(num_attention_heads=8, num_key_value_heads=8)
    layout = layout_of(found, module, None, rows, accumulation)
    optimizer = torch.optim.AdamW(module.parameters())
    return job_of(layout, module_facts(module), SEQUENCES, optimizer, cluster_from(cluster))[0]


@table(
    ("found", "strategy"),
    [
        (lambda: state("MULTI_GPU"), {"zero": 0, "dp": 8}),
        (lambda: state("FSDP", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)), {"zero": 3, "dp": 8}),
        (lambda: state("FSDP", fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=False)), {"zero": 3, "keep_parameters": True}),
        (lambda: state("FSDP", fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=1, sharding_strategy="SHARD_GRAD_OP")), {"zero": 2}),
        (lambda: state("FSDP", fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, activation_checkpointing=True)), {"recompute": "full"}),
        (lambda: state("FSDP", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), parallelism_config=
            ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)),
         {"dp": 8, "zero": 3, "shard_group": 4, "accumulate": "local"}),
        (lambda: state("FSDP", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), parallelism_config=
            ParallelismConfig(dp_shard_size=4, cp_size=2)), {"cp": 2, "dp": 4, "zero": 3}),
        (lambda: state("DEEPSPEED", parallelism_config=ParallelismConfig(sp_size=2, dp_shard_size=4), deepspeed_plugin=
            SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})),
         {"cp": 2, "context_method": "ulysses", "dp": 4, "zero": 3, "accumulate": "sharded"}),
        (lambda: state("DEEPSPEED", deepspeed_plugin=SimpleNamespace(deepspeed_config={
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True},
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto"}})),
         {"zero": 2, "dp": 8}),
    ],
)  # fmt: skip
def test_a_state_of_accelerate_becomes_the_layout(found: Any, strategy: dict[str, Any]) -> None:
    made = job(found())
    assert {name: getattr(made.strategy, name) for name in strategy} == strategy
    assert made.strategy.microbatch == 2 and made.microbatches == 4
    assert made.sequences == 8 * made.strategy.data_parallel


def test_offload_of_both_kinds_is_read() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    assert job(state("FSDP", fsdp_plugin=plugin)).strategy.offload.weights == 1
    plain = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert not job(state("FSDP", fsdp_plugin=plain)).strategy.offload.any
    first = FullyShardedDataParallelPlugin(fsdp_version=1)
    assert not job(state("FSDP", fsdp_plugin=first)).strategy.offload.any
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
    made = job(state("DEEPSPEED", deepspeed_plugin=SimpleNamespace(deepspeed_config=config)))
    assert (made.strategy.offload.optimizer, made.strategy.offload.weights) == (1, 0)
    assert (made.training.precision, made.stack.name) == ("bf16", "deepspeed")


def test_what_is_not_read_is_refused() -> None:
    with pytest.raises(NotPriced, match="distributed_type"):
        job(state("MEGATRON_LM"))
    with pytest.raises(NotPriced, match="rows are not divided evenly"):
        layout_of(state("MULTI_GPU"), network(), SimpleNamespace(total_batch_size=12), None, 1)
    with pytest.raises(NotPriced, match="8 tensor-parallel ranks, but no weight of the network is split"):
        job(state("MULTI_GPU", parallelism_config=ParallelismConfig(tp_size=8)))
    with pytest.raises(NotPriced, match=r"8 processes, but the network is split over 3 · 2"):
        job(state("MULTI_GPU"), model=loaded(tp=3, fsdp=2))
    with pytest.raises(NotPriced, match=r"bf16 by autocast beside gathered fp32 weights"):
        job(state("MULTI_GPU"), model=loaded(tp=2, fsdp=4))


def loaded(tp: int, fsdp: int) -> Any:
    """As transformers leaves a network that it has split; test_sharded.py has those that it really splits."""
    module = network(num_attention_heads=8, num_key_value_heads=8)
    module._is_distributed_loading_by_transformers, module._tp_size, module._fsdp_size = True, tp, fsdp
    return module


@table(
    ("tp", "fsdp", "strategy"),
    [
        (8, 1, {"tp": 8, "dp": 1, "zero": 0, "sequence_parallel": False}),
        (2, 4, {"tp": 2, "dp": 4, "zero": 3, "accumulate": "sharded"}),
        (1, 8, {"tp": 1, "dp": 8, "zero": 3}),
    ],
)
def test_a_network_that_transformers_splits_says_its_layout(tp: int, fsdp: int, strategy: dict[str, Any]) -> None:
    made = job(state("MULTI_GPU", mixed_precision="no"), model=loaded(tp, fsdp))
    assert {name: getattr(made.strategy, name) for name in strategy} == strategy


def test_the_policy_of_fsdp_says_what_is_computed_and_reduced_in() -> None:
    """Accelerate gives the policy one format for both, unless its user gives another."""
    for version in (1, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        assert job(state("FSDP", fsdp_plugin=plugin)).stack.gradient_reduce == "fp32"  # nothing has set its policy
        plugin.set_mixed_precision("bf16")
        made = job(state("FSDP", fsdp_plugin=plugin))
        assert (made.training.precision, made.stack.gradient_reduce) == ("bf16-fp32-grads", "bf16")
        own = job(state("FSDP", fsdp_plugin=plugin, mixed_precision="no"))  # FSDP alone computes in bf16
        assert own.training.precision == "bf16-fp32-grads"
        with pytest.raises(NotPriced, match="precision: mixed_precision 'fp16' beside an FSDP policy"):
            job(state("FSDP", fsdp_plugin=plugin, mixed_precision="fp16"))
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=wide)
    assert job(state("FSDP", fsdp_plugin=plugin)).stack.name == "accelerate"


def test_whole_gradients_beside_offload_are_noted() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    layout = layout_of(state("FSDP", fsdp_plugin=plugin), network(), None, 2, 4)
    facts, cluster = module_facts(network(num_attention_heads=8)), cluster_from("dgx-h100:1")
    made, notes = job_of(layout, facts, SEQUENCES, torch.optim.AdamW([torch.zeros(1)]), cluster)
    assert made.strategy.accumulate == "sharded"
    assert any(one.startswith("the whole gradients that stay on the device") for one in notes)


def test_an_attention_that_is_not_fused_and_dropout_are_read() -> None:
    module = network(attention_dropout=0.1)
    module.config._attn_implementation = "eager"
    made = job(state("MULTI_GPU"), model=module)
    assert (made.training.attention, made.stack.attention, made.training.dropout) == ("unfused", "unfused", True)


@table(
    ("given", "world", "per_host", "device", "expected"),
    [
        ("dgx-h100:2", 16, 8, "cuda", ("dgx-h100", 16)),
        ("dgx-h100:1", 4, 4, "cuda", ("dgx-h100", 4)),
        ("dgx-h100:2", 8, 4, "cuda", ("dgx-h100", 8)),
        ("dgx-h100:1", 16, 8, "cuda", "has 8 devices, the run has 16 processes; .*dgx-h100:2"),
        ("dgx-h100:4", 16, 8, "cuda", "has 32 devices, the run has 16 processes"),
        (None, 2, 2, "cpu", "is not given, and PyTorch trains on a CPU here"),
    ],
)
def test_the_cluster_has_a_device_for_every_process(
    given: str | None, world: int, per_host: int, device: str, expected: Any
) -> None:
    ranks = Ranks(world, per_host, torch.device(device))
    if isinstance(expected, str):
        with pytest.raises(SpecError, match=expected):
            cluster_for(given, ranks)
        return
    found, _ = cluster_for(given, ranks)
    assert (found.name, found.devices) == expected


class Fancy(torch.optim.Optimizer):
    """One of which nothing is known."""


def test_optimizers_are_called_by_what_they_keep() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2))]
    assert optimizer_of(torch.optim.AdamW(weights)) == "adamw"
    assert optimizer_of(torch.optim.SGD(weights, lr=1)) == "sgd"
    assert optimizer_of(torch.optim.SGD(weights, lr=1, momentum=0.9)) == "sgd-momentum"
    assert optimizer_of(SimpleNamespace(optimizer=torch.optim.Adam(weights)), narrow=True) == "adamw-bf16-moments"
    for refused, narrow in ((Fancy(weights, {}), False), (torch.optim.SGD(weights, lr=1, momentum=0.9), True)):
        with pytest.raises(NotPriced, match="priced"):
            optimizer_of(refused, narrow=narrow)
    with pytest.raises(NotPriced, match="NoneType"):
        optimizer_of(None)


def test_a_sequence_is_as_given_or_as_a_setting_says() -> None:
    assert sequences_of(8, None).seq == 8
    assert sequences_of(None, None, SimpleNamespace(max_length=12)) == Sequences(12, "")
    assert sequences_of(None, SimpleNamespace(dataset=[(torch.zeros(5), 1)] * 3)).seq == 5
    for nothing in (None, iter(()), SimpleNamespace(dataset=[3.0])):
        with pytest.raises(SpecError, match="seq: is not given, and the data do not say it"):
            sequences_of(None, nothing)
