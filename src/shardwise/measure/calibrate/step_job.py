"""The job of one step of a small model on one device, as it is measured and as it is priced."""

from __future__ import annotations

from dataclasses import replace

from shardwise.measure.calibrate.samples import Shape
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


def step_job(shape: Shape, precision: str, device: Device | None = None) -> Job:
    model = Model(
        name="calibration", layers=shape.layers, hidden=shape.hidden, heads=shape.heads, ffn=shape.ffn,
        vocab=shape.vocab, max_seq=shape.seq,
    )  # fmt: skip
    cluster: Cluster = cluster_from("laptop:1")
    if device is not None:
        cluster = replace(cluster, device=device)
    training = Training(global_batch=shape.sequences, seq=shape.seq, precision=precision)  # type: ignore[arg-type]
    return Job(
        model=model, cluster=cluster, strategy=Strategy(dp=1, microbatch=shape.sequences), training=training
    )  # fmt: skip
