"""Shrinks what `verify` runs: the same layout on fewer processes, the same model with fewer and narrower layers."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.network import NetworkLevel
from shardwise.spec.strategy import Strategy

MOST_TOKENS = 256  # in a sequence of a small model
HEAD_SIZE, VOCABULARY = 16, 499  # a prime: no number of ranks divides it, so padding is tested too


def on_fewer_ranks(job: Job, most: int) -> Job:
    """The job itself if it has at most ``most`` ranks, otherwise with every degree above one reduced to two.

    Hybrid sharding keeps two shard groups, experts keep groups of their own, and dimensions their order.
    """
    if job.strategy.world <= most:
        return job
    old = job.strategy
    hybrid = old.zero > 0 and old.sharding_group < old.gradient_group
    tp, cp, dp, pp = (min(2, degree) for degree in (old.tp, old.cp, old.data_parallel, old.pp))
    if hybrid and cp * dp < 4:
        dp *= 2
    changes = {
        "tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": min(2, old.ep),
        "expert_tp": None if old.expert_tp is None else min(2, old.expert_tp),
        "shard_group": 2 if hybrid else None,
        "interleave": min(2, old.interleave),
    }  # fmt: skip
    strategy = old.unchecked(**{**changes, **_unlike(old, dp, pp)})
    if isinstance(old.stage_layers, tuple):
        strategy = strategy.unchecked(stage_layers=_merged(old.stage_layers, pp * strategy.chunks_per_rank))
    if strategy.world > most:
        raise SpecError(
            "⟨max_processes⟩",
            f"{most} are too few: the smallest layout with the same degrees above one has {strategy.world} ranks",
            f"use ⟨max_processes={strategy.world}⟩",
        )
    return sized(job, replace(strategy))  # checked


def _unlike(old: Strategy, dp: int, pp: int) -> dict[str, object]:
    """For unlike replicas the largest and smallest share; for unlike stages the degrees of the first and the last."""
    changes: dict[str, object] = {}
    if old.dp_shares is not None:
        shares = (max(old.dp_shares), min(old.dp_shares))
        changes["dp_shares"] = tuple(shares[number % 2] for number in range(dp)) if dp > 1 else None
    for name, degrees in (("stage_tp", old.stage_tp), ("stage_dp", old.stage_dp)):
        if degrees is not None:
            changes[name] = tuple(min(2, degrees[stage]) for stage in (0, -1)) if pp > 1 else None
    for name in ("tp", "dp"):
        if isinstance(kept := changes.get(f"stage_{name}"), tuple):
            changes[name] = max(kept)
    return changes


def sized(job: Job, strategy: Strategy) -> Job:
    """The job with another layout, on a cluster of its size and with a batch that fills its pipeline."""
    microbatches = min(job.microbatches, 2 * strategy.pp + 1)
    rounds = strategy.schedule_record.rounds(strategy.pp)
    microbatches = -(-microbatches // rounds) * rounds
    each = -(-microbatches // max(strategy.dp_shares or (1,)))
    sequences = -(-each * strategy.shares * strategy.microbatch // strategy.batch_multiple) * strategy.batch_multiple
    return replace(
        job,
        cluster=cluster_of(job.cluster, strategy.world),
        strategy=strategy,
        training=replace(job.training, global_batch=sequences),
    )


def cluster_of(cluster: Cluster, devices: int) -> Cluster:
    """``devices`` of the cluster's devices behind one switch, in nodes of at most half of them."""
    inner = next((size for size in range(max(1, devices // 2), 0, -1) if devices % size == 0), 1)
    first = cluster.levels[0]
    levels = [_level(first, inner)] if inner > 1 or devices == 1 else []
    if devices // inner > 1:
        levels.append(_level(cluster.levels[-1], devices // inner))
    return Cluster(device=cluster.device, levels=tuple(levels), devices_per_node=inner)


def _level(level: NetworkLevel, size: int) -> NetworkLevel:
    return NetworkLevel(name=level.name, size=size, link=level.link, topology="switch")


def _merged(counts: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Layers per stage for fewer stages: neighbours are merged."""
    each = len(counts) / stages
    return tuple(sum(counts[round(i * each) : round((i + 1) * each)]) for i in range(stages))


def with_small_model(job: Job) -> Job:
    """A model of the same kind, a few layers deep and some tens of features wide, that the layout can still divide."""
    strategy, model = job.strategy, job.model
    chunks = strategy.stages
    layers = 2 * chunks if chunks > 1 else min(model.layers, 4)
    ratio = model.heads // model.key_value_heads
    kv_heads = strategy.tp // 2 if model.key_value_heads < strategy.tp else lcm(strategy.tp * strategy.cp, 2)
    heads = lcm(kv_heads * min(ratio, 2), strategy.tp * strategy.cp)
    width = 8 * lcm(strategy.tp, strategy.expert_tensor_parallel, 4)
    small = {
        "layers": layers, "hidden": heads * HEAD_SIZE, "heads": heads, "kv_heads": max(1, kv_heads),
        "head_dim": HEAD_SIZE, "ffn": 2 * width, "vocab": min(model.vocab, VOCABULARY), "name": f"small {model.name}",
        "mla": _small_latent(model), "moe": _small_experts(model, strategy, width), "published_parameters": None,
        "max_seq": min(model.max_seq, MOST_TOKENS),
    }  # fmt: skip
    return replace(
        job,
        model=replace(model, **small),  # type: ignore[arg-type]
        strategy=replace(strategy, stage_layers="even"),
        training=replace(job.training, seq=min(job.training.seq, MOST_TOKENS), global_batch=job.sequences),
    )


def _small_latent(model: Model) -> object:
    if model.mla is None:
        return None
    rank = None if model.mla.q_rank is None else 24
    return replace(model.mla, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16, q_rank=rank)


def _small_experts(model: Model, strategy: Strategy, width: int) -> object:
    moe = model.moe
    if moe is None:
        return None
    experts = lcm(8, strategy.ep)
    return replace(
        moe, experts=experts, top_k=min(moe.top_k, 2), ffn=width, shared_ffn=width if moe.shared_ffn else 0,
        dense_layers=min(moe.dense_layers, 1), groups=min(moe.groups, 4), groups_used=min(moe.groups_used, 2),
    )  # fmt: skip
