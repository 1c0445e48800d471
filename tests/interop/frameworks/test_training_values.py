"""Values that move the weights: what both a job and a framework have is carried both ways, the rest is listed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from interop.frameworks.test_frameworks import there_and_back
from shardwise.interop.frameworks import TARGETS, export
from shardwise.interop.frameworks.job_fields import value_at
from shardwise.spec import Job
from shardwise.spec.clusters import cluster_from
from shardwise.spec.model import Model
from shardwise.spec.presets import load

CLUSTER = cluster_from("dgx-h100:1")
LLAMA = load("model", Model, "llama3-8b")
CHANGED: dict[str, Any] = {
    "training.optimization.learning_rate": 1.7e-4,
    "training.optimization.decay": 0.033,
    "training.optimization.beta1": 0.85,
    "training.optimization.beta2": 0.98,
    "training.optimization.epsilon": 1e-6,
    "training.optimization.clip_norm": 0.7,
    "run.steps": 4321,
    "run.schedule.kind": "linear",
    "run.schedule.warmup": 77,
    "run.schedule.final": 0.25,
}
SCALES: dict[str, Any] = {
    "training.optimization.loss_scaling.initial": 2.0**12,
    "training.optimization.loss_scaling.window": 500,
    "training.optimization.loss_scaling.hysteresis": 3,
    "training.optimization.loss_scaling.minimum": 2.0,
}
# What a framework's configuration does not have: its training script does.
SCRIPT = {
    "deepspeed": {"run.steps", "run.schedule.kind", "run.schedule.warmup", "run.schedule.final"},  # linear, not to zero
    "megatron": set(),
    "torchtitan": set(),
    "accelerate": set(CHANGED) - {"training.optimization.clip_norm"},  # ZeRO-1 is DeepSpeed's there
    "nanotron": set(),
    "colossalai": set(CHANGED) - {"training.optimization.clip_norm"},
}


def job_with(values: dict[str, Any], **training: Any) -> Job:
    fields: dict[str, Any] = {"strategy": {"zero": 1}, "training": {"global_batch": 64, **training}}
    for path, value in values.items():
        *parents, last = path.split(".")
        place = fields
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return Job.from_dict({"model": LLAMA, "cluster": CLUSTER, **fields})


@pytest.mark.parametrize("name", TARGETS)
def test_values_return_or_are_listed(name: str) -> None:
    job = job_with(CHANGED)
    exported = export(job, name)
    listed = {lost.field for lost in exported.lost}
    assert listed & set(CHANGED) == SCRIPT[name]
    back = there_and_back(job, name, {})
    for path, value in CHANGED.items():
        if path not in listed:
            assert (
                value_at(back, path) == pytest.approx(value)
                if isinstance(value, float)
                else value_at(back, path) == value
            )


@pytest.mark.parametrize(
    ("kind", "final", "names"),
    [
        ("constant", 0.1, {"deepspeed", "megatron", "torchtitan", "nanotron"}),
        ("cosine", 0.2, {"deepspeed", "megatron", "torchtitan", "nanotron"}),
        ("linear", 0.0, {"deepspeed", "megatron", "torchtitan", "nanotron"}),
        ("wsd", 0.0, {"megatron", "torchtitan", "nanotron"}),
    ],
)
def test_schedules_of_a_learning_rate(kind: str, final: float, names: set[str]) -> None:
    schedule = {"kind": kind, "warmup": 50, "final": final, "decay": 0.25}
    job = job_with({f"run.schedule.{name}": value for name, value in schedule.items()})
    for name in names:
        back = there_and_back(job, name, {"run.steps": 1000} if (name, kind) == ("deepspeed", "constant") else {})
        assert [back.run.schedule.share(step, 1000) for step in range(1000)] == pytest.approx(
            [job.run.schedule.share(step, 1000) for step in range(1000)]
        )
        assert back.run.steps == 1000


@pytest.mark.parametrize("name", ["deepspeed", "megatron", "colossalai"])
def test_loss_scales(name: str) -> None:
    job = job_with(SCALES, precision="fp16")
    assert there_and_back(job, name, {}).training.optimization.loss_scaling == job.training.optimization.loss_scaling
    fixed = replace(
        job.training.optimization, loss_scaling=replace(job.training.optimization.loss_scaling, static=512.0)
    )
    static = replace(job, training=replace(job.training, optimization=fixed))
    if name == "colossalai":
        assert "training.optimization.loss_scaling.static" in {lost.field for lost in export(static, name).missing}
    else:
        assert there_and_back(static, name, {}).training.optimization.loss_scaling.static == 512


def test_a_deepspeed_file_keeps_its_values() -> None:
    config = {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "fp16": {"enabled": True, "loss_scale": 128},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, "warmup_num_steps": 200}},
        "gradient_clipping": 0.5,
    }  # fmt: skip
    back = TARGETS["deepspeed"].read(json.dumps(config), LLAMA, CLUSTER)
    job = back.job(CLUSTER, LLAMA)
    optimization = job.training.optimization
    assert (optimization.learning_rate, optimization.beta2, optimization.epsilon) == (2e-5, 0.99, 1e-7)
    assert (optimization.decay, optimization.clip_norm, optimization.loss_scaling.static) == (0.01, 0.5, 128)
    assert (job.run.steps, job.run.schedule.kind, job.run.schedule.warmup, job.run.schedule.final) == (
        5000,
        "linear",
        200,
        0,
    )
    assert back.unused == ()
    unclipped = TARGETS["deepspeed"].read(json.dumps({"train_batch_size": 8}), LLAMA, CLUSTER)
    assert unclipped.fields["training.optimization.clip_norm"] is None  # DeepSpeed clips only where it is told to


def test_a_warm_up_longer_than_the_run_is_cut_and_said() -> None:
    """As TorchTitan itself does; its default is 200 steps."""
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nsteps = 20\nlocal_batch_size = 1'
    job = TARGETS["torchtitan"].read(text, None, CLUSTER).job(CLUSTER)
    assert (job.run.steps, job.run.schedule.warmup) == (20, 19)
    assert job.training.optimization.learning_rate == 8e-4
