"""What plugins, strategies and modules say becomes the job that the equivalent configuration file makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig

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
    layout = layout_of(found, None, rows, accumulation)
    module = model or network(num_attention_heads=8, num_key_value_heads=8)
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
            ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)),
         {"tp": 2, "dp": 4, "zero": 3, "shard_group": 2, "sequence_parallel": False}),
        (lambda: state("FSDP", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), parallelism_config=
            ParallelismConfig(dp_shard_size=4, cp_size=2)), {"cp": 2, "dp": 4, "zero": 3}),
        (lambda: state("MULTI_GPU", parallelism_config=ParallelismConfig(tp_size=8)), {"tp": 8, "dp": 1, "zero": 0}),
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
        layout_of(state("MULTI_GPU"), SimpleNamespace(total_batch_size=12), None, 1)
    with pytest.raises(NotPriced, match=r"8 processes are no multiple of tp · cp · pp = 3"):
        job(state("MULTI_GPU", parallelism_config=ParallelismConfig(tp_size=3)))


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
