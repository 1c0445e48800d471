"""One way to offload in a batch of tables: its memory on the devices, and what it adds to a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.collectives import CollectiveKind, Topology
from shardwise.collectives.arrays import is_array, maximum, some
from shardwise.cost.memory.sum import MomentMemory, PassMemory, held_at, moved_share
from shardwise.cost.memory.transient import MOMENTS, Moment
from shardwise.cost.step.stage_time import copied_alone_seconds, host_update_seconds
from shardwise.cost.sweep.rows import TimedRows
from shardwise.cost.traffic.execution import units_taken
from shardwise.cost.traffic.offload import OffloadLine, activation_lines, how_updated, sent_seconds, state_lines
from shardwise.cost.traffic.traffic import (
    OverlappedTransfer,
    added_seconds,
    collective_price,
    hidden_across_layers,
    waiting,
)
from shardwise.layout.payloads import PASSES, Pass
from shardwise.layout.sharding import Sharding
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload, Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True)
class RowsAtMoment:
    """What passes hold at one moment in some rows of a batch."""

    moment: Moment
    passes: PassMemory
    kinds: Any  # the kinds of rank that have this moment
    lengths: Array  # how many of the rows belong to each block

    def spread(self, of_blocks: Any) -> Any:
        """Figures of the blocks' kinds of rank for each of the rows."""
        return by_row(of_blocks[self.kinds], self.lengths) if is_array(of_blocks) else of_blocks


@dataclass(frozen=True)
class StepEnd:
    """What every kind of rank adds to the pipeline: kind × column × row."""

    tail: Array  # optimizer, slowed computation
    waits: dict[Pass, Any]  # for transfers of each pass

    @property
    def seconds(self) -> Array:
        """Of the slowest kind of rank."""
        slowest: Array = sum(self.waits.values(), self.tail).max(axis=0)
        return slowest


class Offloaded:
    """One way to offload in a batch: its memory on the devices, and its traffic over the host's link."""

    def __init__(self, job: Job, base: Strategy, contents: RankContents, sharding: Sharding, offload: Offload) -> None:
        """``contents`` and ``sharding`` are those of the whole batch, the degrees those of ``base``."""
        job = job.unchecked(strategy=base.unchecked(offload=offload))  # whole masters where they are offloaded
        self.offload, self.overlapped = offload, base.overlap.offload
        self.contents, self.recipe = contents, job.recipe
        self.sharding = replace(sharding, offload=offload)
        held = held_at(job, contents, self.sharding, MOMENTS, replicated=base.gradient_group > 1)
        self.held, self.states = {memory.moment: memory for memory in held}, held[0].states
        self.units_taken = units_taken(job, "offload", CollectiveKind.SEND_RECV, {})
        self.cluster = job.cluster
        self.job, self.updates = job, how_updated(job)
        self.moved_share = moved_share(job, offload.activations)
        self._links: dict[Any, Topology] = {}
        self.host_update = host_update_seconds(job, contents, self.sharding)
        lines = self._state_lines(1) if offload.any else []
        self.state_costs = [_send(self._link(line), line.size_bytes) for line in lines]

    def memory_bytes(self, moments: Sequence[RowsAtMoment]) -> tuple[Array, Any]:
        """Memory of the fullest device, and its part of the host's; every kind of rank has the last moment."""
        each = [MomentMemory(self.held[rows.moment], rows.passes, rows.spread) for rows in moments]
        memory: Any = each[0].total.max(axis=0)
        for at_moment in each[1:]:
            memory = maximum(memory, at_moment.total.max(axis=0))
        held = each[-1].held
        if some(held.copied_for_update):
            memory = maximum(memory, moments[-1].spread(held.at_update).max(axis=0))
        if some(held.whole_weights):
            memory = maximum(memory, moments[-1].spread(held.at_load).max(axis=0))
        return memory, each[-1].host.max(axis=0) if self.offload.any else 0.0

    def added(self, step: StepEnd, timed: TimedRows, lengths: Array, saved: Any) -> StepEnd:
        """Adds this offload to what follows the pipeline; ``saved`` are the activations it may move."""
        tail = step.tail
        if self.offload.weights:
            copied = copied_alone_seconds(self.job, self.contents, self.sharding)
            each, once = (by_row(1.0 * seconds, lengths) for seconds in copied)
            tail = tail + timed.microbatches * each + once
        tail = tail + by_row(self.host_update, lengths)
        transfers = self._transfers(timed, lengths, saved)
        hidden, on_links = hidden_across_layers(transfers, timed.lasting, timed.busy)
        waits = {
            which: maximum(step.waits[which], waiting(transfers, hidden, on_links, which).longest) for which in PASSES
        }
        return StepEnd(added_seconds(transfers, hidden, tail), waits)

    def _link(self, line: OffloadLine) -> Topology:
        key = (line.payload, line.link, line.both_ways)
        if key not in self._links:
            self._links[key] = line.topology(self.cluster, self.offload.target)
        return self._links[key]

    def _transfers(self, timed: TimedRows, lengths: Array, saved: Any) -> list[OverlappedTransfer]:
        m, in_layers = timed.microbatches, timed.in_layers
        transfers = [
            self._transfer(
                line, lengths, in_layers, *(by_row(figure, lengths, line.count) for figure in (seconds, on_link))
            )
            for line, (seconds, on_link) in zip(self._state_lines(m), self.state_costs)
            if seconds is not None
        ]
        if self.offload.activations:
            moved = saved * self.moved_share
            for line in activation_lines(self.job, moved, m):
                seconds, on_link = _send(self._link(line), moved)
                if seconds is not None:
                    transfers.append(self._transfer(line, lengths, in_layers, m * seconds, m * on_link))
        return transfers

    def _state_lines(self, microbatches: Any) -> list[OffloadLine]:
        return state_lines(self.contents, self.sharding, self.recipe, self.states, microbatches, **self.updates)

    def _transfer(
        self, line: OffloadLine, lengths: Array, in_layers: Array, seconds: Any, on_link: Any
    ) -> OverlappedTransfer:
        """A transfer that takes ``seconds`` of the step; its link is busy for ``on_link`` of these."""
        link, line = self._link(line), replace(line, of_layers=by_row(line.of_layers, lengths))
        after: Any = line.after_bytes
        return OverlappedTransfer(
            line.payload.in_pass,
            seconds,
            {link.levels[0].name: on_link},
            line.window_if(self.overlapped),
            line.window(in_layers),
            line.last_only,
            units_taken=self.units_taken,
            delay=by_row(sent_seconds(link, after), lengths) if is_array(after) else after,
        )


def by_row(of_blocks: Any, lengths: Array, times: Any = 1) -> Any:
    """Figures of blocks (the last axis) for each of their rows, ``lengths`` of a block; ``times`` as much."""
    if not is_array(of_blocks):
        return of_blocks
    of_rows: Array = of_blocks.repeat(lengths, axis=-1)  # three times as fast as ``take``
    return times * of_rows if is_array(times) or times != 1 else of_rows


def _send(host: Topology, size_bytes: Any) -> tuple[Any, Any]:
    """Seconds of one message to the host, and those in which the link is busy; None if no strategy sends anything."""
    if not size_bytes.any():
        return None, None
    cost = collective_price(CollectiveKind.SEND_RECV, size_bytes, host, "auto")
    sent = size_bytes > 0  # not even the latency where one strategy of several sends nothing
    return cost.seconds * sent, cost.bandwidth_seconds * sent
