"""One way to offload, for a batch of tables: what it leaves on the devices, and what it sends over which link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.collectives import CollectiveKind, Topology
from shardwise.collectives.arrays import is_array, maximum
from shardwise.cost.memory.states import Sharding
from shardwise.cost.memory.sum import MomentMemory, PassMemory, held_at
from shardwise.cost.memory.transient import Moment, moments_of
from shardwise.cost.sweep.row_table import RowTable
from shardwise.cost.traffic.execution import units_taken
from shardwise.cost.traffic.offload import OffloadLine, activation_lines, host_topology, state_lines
from shardwise.cost.traffic.overlap import PASSES, Pass, Transfer, Waiting, added_seconds, hidden_across_layers, waiting
from shardwise.cost.traffic.traffic import collective_price
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload, Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True)
class RowsAtMoment:
    """What passes hold at one moment in some rows of a batch, ``lengths`` of each block, on these ``kinds`` of rank."""

    moment: Moment
    passes: PassMemory
    kinds: Any
    lengths: Array

    def spread(self, of_blocks: Any) -> Any:
        """Figures of the blocks' kinds of rank for each of the rows."""
        return by_row(of_blocks[self.kinds], self.lengths) if is_array(of_blocks) else of_blocks


class Offloaded:
    """One way to offload in a batch: what it leaves on the devices, and what it sends over the host's link."""

    def __init__(self, job: Job, base: Strategy, contents: RankContents, sharding: Sharding, offload: Offload) -> None:
        """``contents`` and ``sharding`` are those of the whole batch; ``base`` counts for its degrees."""
        self.offload, self.overlapped = offload, base.overlap.offload
        self.contents, self.recipe = contents, job.recipe
        self.sharding = replace(sharding, offload=offload)
        moments = moments_of(job.stack)
        held = held_at(job, contents, self.sharding, moments, replicated=base.gradient_group > 1)
        self.held, self.states = {one.moment: one for one in held}, held[0].states
        self.units_taken = units_taken(job, "offload", CollectiveKind.SEND_RECV, {})
        self.cluster = job.cluster
        lines = self._state_lines(1) if offload.any else []
        self.state_costs = [_send(self._link(line), line.size_bytes) for line in lines]

    def memory_bytes(self, moments: Sequence[RowsAtMoment]) -> tuple[Array, Any]:
        """Of the fullest device, and what its host holds for it; every kind of rank has the last moment."""
        each = [MomentMemory(self.held[one.moment], one.passes, one.spread) for one in moments]
        memory: Any = each[0].total.max(axis=0)
        for one in each[1:]:
            memory = maximum(memory, one.total.max(axis=0))
        return memory, each[-1].host.max(axis=0) if self.offload.any else 0.0

    def waiting(
        self, rows: RowTable, part: slice, lengths: Array, tail: Array, left: dict[Pass, Waiting]
    ) -> tuple[Array, dict[Pass, Waiting]]:
        """The ``tail`` of a step without offload and what is ``left`` to wait for of data parallelism, with offload."""
        if not self.offload.any:
            return tail, left
        transfers = self._transfers(rows, part, lengths)
        hidden = hidden_across_layers(transfers, *rows.ranks.windows(part))
        together = {which: left[which].beside(waiting(transfers, hidden, which)) for which in PASSES}
        return added_seconds(transfers, hidden, tail), together

    def _link(self, line: OffloadLine) -> Topology:
        return host_topology(self.cluster, line.link or self.offload.target)

    def _transfers(self, rows: RowTable, part: slice, lengths: Array) -> list[Transfer]:
        m = rows.microbatches[part]
        transfers = [
            self._transfer(line, *(by_row(one, lengths, line.count) for one in (seconds, on_link)))
            for line, (seconds, on_link) in zip(self._state_lines(m), self.state_costs)
            if seconds is not None
        ]
        if self.offload.activations:
            moved = rows.ranks.passes.saved[:, None, part] * self.offload.activations
            lines = activation_lines(moved, m)
            cost = [m * one for one in _send(self._link(lines[0]), moved)]
            transfers += [self._transfer(line, *cost) for line in lines]
        return transfers

    def _state_lines(self, microbatches: Any) -> list[OffloadLine]:
        return state_lines(self.contents, self.sharding, self.recipe, self.states, microbatches)

    def _transfer(self, line: OffloadLine, seconds: Any, on_link: Any) -> Transfer:
        """``seconds`` of all that the step sends of it, ``on_link`` those that keep the link busy."""
        return Transfer(
            line.in_pass,
            seconds,
            {self._link(line).levels[0].name: on_link},
            line.window_if(self.overlapped),
            line.window_share,
            line.last_only,
            units_taken=self.units_taken,
        )


def by_row(of_blocks: Any, lengths: Array, times: Any = 1) -> Any:
    """Figures of blocks (the last axis) for each of their rows, ``lengths`` of a block; ``times`` as much."""
    if not is_array(of_blocks):
        return of_blocks
    of_rows: Array = of_blocks.repeat(lengths, axis=-1)  # three times as fast as ``take``
    return times * of_rows if is_array(times) or times != 1 else of_rows


def _send(host: Topology, size_bytes: Any) -> tuple[Any, Any]:
    """Seconds of one message to the host, and those that keep the link busy; none for no bytes at all."""
    if not size_bytes.any():
        return None, None
    cost = collective_price(CollectiveKind.SEND_RECV, size_bytes, host, "auto")
    sent = size_bytes > 0  # not even the latency where one strategy of several sends nothing
    return cost.seconds * sent, cost.bandwidth_seconds * sent
