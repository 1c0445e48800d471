"""Small models, clusters and jobs whose costs can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.cost.analysis import Analysis
from shardwise.cost.traffic.execution import step_traffic
from shardwise.cost.traffic.traffic import Traffic
from shardwise.layout.stages import rank_contents
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model
from shardwise.spec.stack import Stack
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

GIB = 2**30
HIDDEN = 128 * 64 * 2  # bytes of one microbatch of one sequence: s·h·e

DENSE, MIXTURE = LayerRecord(), LayerRecord(feed_forward="mixture")

GPT = Model(
    layers=8,
    hidden=64,
    heads=8,
    ffn=256,
    vocab=512,
    max_seq=128,
    activation="gelu",
    norm="layernorm",
    positions="learned",
    tied_embeddings=True,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)
LLAMA = Model(
    layers=8, hidden=64, heads=8, kv_heads=2, ffn=192, vocab=512, max_seq=128, activation="swiglu", norm="rmsnorm"
)
MOE = Model.from_dict(
    {
        **LLAMA.to_dict(),
        "kv_heads": 4,
        "moe": {"experts": 16, "top_k": 4, "ffn": 32, "shared_ffn": 64, "dense_layers": 2},
    }
)
MLA_MOE = Model.from_dict(
    {
        **LLAMA.to_dict(),
        "kv_heads": 8,
        "mla": {"q_rank": 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 6},
        "moe": {"experts": 16, "top_k": 4, "ffn": 32, "shared_ffn": 64, "dense_layers": 1},
        "mtp_layers": 1,
    }
)


MIXED = Model.from_dict(  # windows, chunks of attention without rotary positions, delta nets, mixtures
    {
        **LLAMA.to_dict(),
        "attention_gate": True,
        "sliding_window": 48,
        "attention_chunk": 32,
        "delta": {"key_heads": 8, "value_heads": 16, "key_dim": 8, "value_dim": 12},
        "moe": {"experts": 16, "top_k": 4, "ffn": 32, "shared_ffn": 64},
        "pattern": [
            {"mixer": "delta"},
            {"mixer": "window"},
            {"mixer": "delta", "feed_forward": "mixture", "repeat": 2},
            {"mixer": "chunk", "rotary": False, "feed_forward": "mixture"},
            {},
        ],
    }
)
WINDOWS = replace(LLAMA, sliding_window=48, sliding_window_every=3)


def preset(name: str) -> Model:
    return presets.load("model", Model, name)


def switched(*sizes: int, bandwidths: tuple[float, ...] = (100e9, 10e9, 1e9), **fields: Any) -> Cluster:
    """Levels of switches without latency, innermost first: "level 0", "level 1", ..."""
    levels = [
        {"name": f"level {i}", "topology": "switch", "size": size, "bandwidth": bandwidths[i], "latency": 0}
        for i, size in enumerate(sizes)
    ]
    device = {"peak": {"bf16": 1e12}, "memory": 80 * GIB, "memory_bandwidth": 1e12, "framework_memory": 0}
    return Cluster.from_dict({"device": device, "levels": levels, **fields})


def job(
    model: Model | str,
    cluster: Cluster | str | None = None,
    training: dict[str, Any] | None = None,
    **strategy: Any,
) -> Job:
    """A job on one switch just large enough (all degrees must be given), or on the given cluster.

    Its stack is that of the text books, with no engine's peculiarities.
    """
    wanted = Strategy.from_dict(strategy)
    if cluster is None:
        cluster = switched(wanted.world)
    batch = wanted.data_parallel * wanted.microbatch
    return Job(
        model=preset(model) if isinstance(model, str) else model,
        cluster=cluster_from(cluster),
        strategy=wanted,
        training=Training.from_dict({"seq": 128, "global_batch": batch, **(training or {})}),
        stack=Stack(),
    )


def sent(traffics: tuple[Traffic, ...] | list[Traffic], what: str = "") -> float:
    """Bytes a device sends in a step, in the traffics whose name contains ``what``."""
    return sum(traffic.bytes_sent for traffic in traffics if what in traffic.what)


def sent_in(analysis: Analysis, dimension: str, what: str = "") -> float:
    return sent(analysis.dimension_traffics(dimension), what)


def ring(model: Model, **fields: Any) -> Job:
    """A job whose collectives run over rings."""
    return job(model, **{"collective": "ring", "dp": 1, **fields})


def traffics(case: Job, dimension: str, rank: int = 0) -> list[Traffic]:
    """What a dimension sends on a pipeline rank."""
    return [t for t in step_traffic(case, rank_contents(case, rank)) if t.dimension == dimension]


def named(found: list[Traffic], *names: str) -> list[Traffic]:
    """Those with these names, which must be there."""
    wanted = [traffic for traffic in found if traffic.what in names]
    assert len(wanted) == len(names)
    return wanted


def far_apart(**strategy: Any) -> Job:
    """Two sites with a line of 200 Mb/s between them; what is data parallel crosses it."""
    fields = {"tp": 8, "dp": 4, "order": ["tp", "cp", "pp", "dp"], **strategy}
    training = {"global_batch": 256, "seq": 4096}
    return Job.from_dict(
        {"model": "llama3-8b", "cluster": "over-the-internet", "strategy": fields, "training": training}
    )
