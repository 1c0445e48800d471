"""Pipeline parallelism: stages of the model on different ranks, run through PyTorch's pipelining runtime.

`keep_stage` cuts the model, `schedule_of` and `runtime_actions` say what every rank does, and a
`PipelineRunner` does it. `tie_ends` is for models whose embedding is also their head.
"""

from __future__ import annotations

from shardwise.engine.pipeline.runner import (
    PipelineRunner,
    call_decoder,
    require_runnable,
    runtime_actions,
    schedule_of,
    splits_backward,
)
from shardwise.engine.pipeline.stage import Message, NoReduction, Reduction, keep_stage
from shardwise.engine.pipeline.tied import TiedEnds, tie_ends

__all__ = [
    "Message",
    "NoReduction",
    "PipelineRunner",
    "Reduction",
    "TiedEnds",
    "call_decoder",
    "keep_stage",
    "require_runnable",
    "runtime_actions",
    "schedule_of",
    "splits_backward",
    "tie_ends",
]
