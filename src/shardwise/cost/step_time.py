"""From the passes of the pipeline's ranks to the step: one rule for numbers (a job) and columns (a table)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.collectives.arrays import select
from shardwise.cost.overlap import Transfer
from shardwise.pipeline import bubble_seconds as idle_seconds


@dataclass(frozen=True)
class Passes:
    """Seconds of one microbatch on one kind of pipeline rank."""

    forward: Any
    input_gradient: Any
    weight_gradient: Any

    @property
    def total(self) -> Any:
        return self.forward + self.input_gradient + self.weight_gradient


def passes_with_exposed(
    compute: Passes, transfers: Sequence[Transfer], hidden: Sequence[Any], microbatches: Any
) -> Passes:
    """Computation, and what the layers' communication adds to it: exposed seconds, and compute units it takes.

    Of the forward traffic, what recompute sends again falls into the backward pass.
    """
    in_forward = in_backward = 0.0
    for transfer, under in zip(transfers, hidden):
        added = transfer.seconds - under + transfer.units_taken * under
        if transfer.in_pass == "backward":
            in_backward = in_backward + added
            continue
        again = added * transfer.repeated
        in_forward, in_backward = in_forward + (added - again), in_backward + again
    return Passes(
        compute.forward + in_forward / microbatches,
        compute.input_gradient + in_backward / microbatches,
        compute.weight_gradient,
    )


def slowest_and_others(ranks: Sequence[Passes], counts: Sequence[int]) -> tuple[Passes, Passes]:
    """The slowest rank's passes, and the mean of all other ranks'."""
    slowest = ranks[0]
    for rank in ranks[1:]:
        slower = rank.total > slowest.total
        slowest = Passes(
            select(slower, rank.forward, slowest.forward),
            select(slower, rank.input_gradient, slowest.input_gradient),
            select(slower, rank.weight_gradient, slowest.weight_gradient),
        )
    others = sum(counts) - 1

    def mean(name: str) -> Any:
        total = sum(count * getattr(rank, name) for rank, count in zip(ranks, counts))
        return (total - getattr(slowest, name)) / others if others else 0.0

    return slowest, Passes(mean("forward"), mean("input_gradient"), mean("weight_gradient"))


def pipeline_bubble(
    schedule: str, pp: int, microbatches: Any, chunks: int, others: Passes, message_seconds: Any
) -> Any:
    """Idle seconds that the schedule adds to the slowest rank's work, over the other ranks' stages."""
    if pp == 1:
        return 0.0
    return idle_seconds(
        schedule,
        pp,
        microbatches,
        chunks,
        others.forward / chunks,
        others.input_gradient / chunks,
        others.weight_gradient / chunks,
        message_seconds,
    )
