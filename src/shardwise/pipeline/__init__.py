"""Pipeline schedules: what they are, how they are verified and timed, and how layers are divided into stages."""

from __future__ import annotations

from shardwise.pipeline.forms import (
    ClosedForms,
    EqualStages,
    bubble_formula,
    bubble_is_exact,
    bubble_seconds,
    peak_chunks_in_flight,
)
from shardwise.pipeline.partition import Layers, Partition, Place, layers_of, partition_over
from shardwise.pipeline.schedule import (
    Action,
    ActionKind,
    InvalidPipelineSchedule,
    PipelineSchedule,
    StageTimes,
    build,
    chunks_per_rank,
    equal_stages,
    stage_times,
    verify,
)
from shardwise.pipeline.timeline import (
    Timeline,
    draw_timeline,
    live_activations,
    peak_activations,
    simulate,
    trace_events,
)

__all__ = [
    "Action", "ActionKind", "ClosedForms", "EqualStages", "InvalidPipelineSchedule", "Layers", "Partition",
    "PipelineSchedule", "Place", "StageTimes", "Timeline", "bubble_formula", "bubble_is_exact", "bubble_seconds",
    "build", "chunks_per_rank", "draw_timeline", "equal_stages", "layers_of", "live_activations", "partition_over",
    "peak_activations", "peak_chunks_in_flight", "simulate", "stage_times", "trace_events", "verify",
]  # fmt: skip
