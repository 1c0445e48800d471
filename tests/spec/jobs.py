"""Random valid jobs over the catalogue, for property tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from shardwise.spec import Cluster, Job, Model, presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.rules import divisors

CLUSTERS = [
    *presets.names("cluster"),
    "dgx-h100:4",
    "dgx-a100:3",
    "gb200-nvl72:2",
    "tpu-v5p:4x4x8",
    "tpu-v4:2x2x1",
    "tpu-v5e:4x8",
    "two-datacenters:8",
]
MODELS = {name: presets.load("model", Model, name) for name in presets.names("model")}


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """A cluster of the catalogue, half of them with numbers no preset has."""
    cluster = cluster_from(draw(st.sampled_from(CLUSTERS)))
    if draw(st.booleans()):
        return cluster
    device = replace(cluster.device, memory=draw(st.floats(4e9, 1e12)), memory_bandwidth=draw(st.integers(1, 10**15)))
    inner = replace(
        cluster.levels[0],
        bandwidth=draw(st.floats(1, 1e13)),
        latency=draw(st.one_of(st.just(0), st.floats(1e-9, 1.0))),
        efficiency=draw(st.one_of(st.none(), st.floats(0.01, 1))),
    )
    return replace(cluster, device=device, levels=(inner, *cluster.levels[1:]))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job that breaks no rule: every degree divides what it must, by construction."""
    model, cluster = MODELS[draw(st.sampled_from(sorted(MODELS)))], draw(clusters())
    if draw(st.booleans()):
        model = replace(model, name=draw(st.text(max_size=20)), vocab=draw(st.integers(1, 10**6)))
    ranks = cluster.devices
    pp = draw(st.sampled_from([pp for pp in divisors(ranks) if model.layers % pp == 0]))
    tp = draw(st.sampled_from([tp for tp in divisors(ranks // pp) if splits(model, tp)]))
    cp = draw(st.sampled_from(divisors(ranks // pp // tp)))
    dp, stage = ranks // pp // tp // cp, ranks // pp
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    strategy: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": draw(st.sampled_from([None, dp])),
        "zero": zero,
        "shard_group": draw(st.sampled_from([None, *divisors(cp * dp)])) if zero else None,
        "order": draw(st.permutations(("tp", "cp", "dp", "pp"))),
        "microbatch": draw(st.integers(1, 4)),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        "sequence_parallel": draw(st.booleans()),
        "overlap": {name: draw(st.booleans()) for name in ("dp", "tp", "pp", "cp", "ep", "offload")},
        "offload": {
            "optimizer": draw(st.one_of(st.just(0), st.floats(1e-6, 1))),
            "target": draw(st.sampled_from(["cpu", "nvme"])),
        },
    }
    if model.moe:
        strategy["ep"] = draw(st.sampled_from([ep for ep in divisors(model.moe.experts) if stage % (ep * tp) == 0]))
    multiple = dp * strategy["microbatch"]
    batch: Any = draw(st.one_of(st.integers(1, 64).map(lambda n: n * multiple), st.just("4M-tokens")))
    training = {
        "global_batch": batch,
        "seq": tp * cp * draw(st.integers(1, 512)),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp8"])),
        "tokens": draw(st.one_of(st.none(), st.integers(1, 10**14))),
    }
    if model.positions == "learned":
        model = replace(model, max_seq=max(model.max_seq, training["seq"]))
    return Job.from_dict({"model": model, "cluster": cluster, "strategy": strategy, "training": training})


def splits(model: Model, tp: int) -> bool:
    """Whether tensor parallelism can cut the model into ``tp`` parts."""
    widths = [model.heads, model.ffn]
    if model.moe:
        widths += [model.moe.ffn, model.moe.shared_ffn]
    kv_heads = model.key_value_heads
    return not any(width % tp for width in widths) and (kv_heads % tp == 0 or tp % kv_heads == 0)
