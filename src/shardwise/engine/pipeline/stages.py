"""Which part of the model is which stage, and what is left of a decoder on the rank that holds it."""

from __future__ import annotations

from itertools import accumulate

from shardwise.cost.stages import chunk_of_rank
from shardwise.models import Decoder
from shardwise.spec.job import Job
from shardwise.spec.rules import stage_layer_counts


def stage_layers(job: Job) -> tuple[range, ...]:
    """The layers of every stage, in model order; the first and the last may have none."""
    counts = stage_layer_counts(job.model, job.strategy)
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts)))


def stages_of_rank(job: Job, rank: int) -> tuple[int, ...]:
    """The stages that a pipeline rank holds: r, r+p, ...; or r and 2p-1-r where the pipeline is folded."""
    return chunk_of_rank(job, rank)


def keep_stage(decoder: Decoder, layers: range, *, first: bool, last: bool) -> Decoder:
    """Takes away what belongs to other stages; works without values too (on the meta device)."""
    for index in list(decoder.layers):
        if int(index) not in layers:
            del decoder.layers[index]
    if not first:
        decoder.embedding = decoder.position_embedding = None
    if not last:
        decoder.norm = decoder.head = None
    return decoder
