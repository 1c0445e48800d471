"""Random jobs over the whole catalogue: models, clusters, stacks, recipes and layouts."""

from __future__ import annotations

from functools import cache
from random import Random

from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.schedules import job_schedules
from shardwise.spec.stack import stack_from
from shardwise.spec.strategy import DIMENSIONS, Offload, Strategy
from shardwise.spec.training import RECIPES, Training

_SIZES = {"tpu-v4": "4x4x2", "tpu-v5p": "4x4x2", "tpu-v5e": "4x8", "tpu-v6e": "4x8", "tpu7x": "4x4x2", "laptop": "8"}


@cache
def _model(name: str) -> Model:
    return presets.load("model", Model, name)


@cache
def clusters() -> tuple[Cluster, ...]:
    found = []
    for name in presets.names("cluster"):
        sizes = (_SIZES[name],) if name in _SIZES else ("1", "2", "4")
        for size in sizes:
            try:
                found.append(cluster_from(f"{name}:{size}"))
            except SpecError:
                found.append(cluster_from(name))
    return tuple(found)


def random_job(random: Random) -> Job:
    """A job that can be priced; it need not fit."""
    while True:
        try:
            return _drawn(random)
        except SpecError:
            continue


def _drawn(random: Random) -> Job:
    one = random.choice
    model, cluster = _model(one(presets.names("model"))), one(clusters())
    stack = stack_from(one(presets.names("stack")))
    left, degrees = cluster.devices, {}
    for name in random.sample(("tp", "cp", "pp"), 3):
        degrees[name] = one([n for n in (1, 1, 1, 2, 3, 4, 8, 16) if left % n == 0])
        left //= degrees[name]
    schedule = one(job_schedules())
    microbatch = one((1, 1, 2, 4))
    strategy = Strategy(
        **degrees,
        dp=left,
        ep=one((1, 2, 4, 8, left)) if model.moe else 1,
        expert_tp=one((None, 1)) if model.moe else None,
        sequence_parallel=random.random() < 0.8,
        zero=one((0, 1, 2, 3)),
        shard_group=one((None, None, None, 2, 4, 8)),
        keep_parameters=one((False, False, True)),
        accumulate=one(("sharded", "local")),
        order=tuple(random.sample(DIMENSIONS, 4)) if random.random() < 0.2 else DIMENSIONS,
        microbatch=microbatch,
        schedule=schedule if degrees["pp"] > 1 else "1f1b",
        interleave=2 if schedule == "interleaved" and degrees["pp"] > 1 else 1,
        stage_layers=one(("even", "balanced")),
        recompute=one(("none", "selective", "full")),
        recompute_layers=one((None, None, 1)),
        context_method=one(("ring", "all-gather", "ulysses")),
        dispatch=one((stack.dispatch, "all-to-all", "deduplicated")),
        overlap=stack.overlap,
        offload=one((*[Offload()] * 8, Offload(optimizer=1), Offload(activations=0.5))),
    )
    seq = one((16, 64, 128, 256, 1024, 2048, 4096, 8192, 32768))
    seq = min(seq, model.max_seq) if model.positions == "learned" else seq
    training = Training(
        seq=seq,
        global_batch=left * microbatch * degrees["pp"] * one((1, 2, 3, 4)),
        precision=one(sorted(RECIPES)),
        compile=one((False, True)),
    )
    return Job(model=model, cluster=cluster, strategy=strategy, training=training, stack=stack)
