"""What each parallel dimension sends in one step, priced on the network levels its ranks span."""

from __future__ import annotations

from shardwise.cost.communication.context import context_traffic
from shardwise.cost.communication.data import data_traffic
from shardwise.cost.communication.expert import expert_traffic
from shardwise.cost.communication.offload import offload_traffic
from shardwise.cost.communication.pipeline import pipeline_traffic
from shardwise.cost.communication.tensor import tensor_traffic
from shardwise.cost.traffic import Traffic
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


def step_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """All communication of one step on a device of the given pipeline rank, not yet overlapped.

    The order is the order in which traffics claim the computation they may hide under: what sits inside a
    layer first, what spans the step last.
    """
    return [
        *tensor_traffic(job, contents),
        *context_traffic(job, contents),
        *expert_traffic(job, contents),
        *pipeline_traffic(job, contents),
        *data_traffic(job, contents),
        *offload_traffic(job, contents),
    ]
