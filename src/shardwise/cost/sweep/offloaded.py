"""One way to offload, for a batch of tables: what it leaves on the devices, and what it sends over which link."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.collectives import CollectiveKind, Topology
from shardwise.collectives.arrays import is_array, maximum
from shardwise.cost.communication.offload import OffloadLine, activation_lines, host_topology, state_lines
from shardwise.cost.memory.offload import Travel
from shardwise.cost.memory.states import Sharding, rank_state_bytes
from shardwise.cost.memory.transient import (
    Absent,
    Moment,
    divided_units,
    gathered_bytes,
    gradients_absent,
    head_share,
    left_over,
    moments_of,
)
from shardwise.cost.overlap import PASSES, Pass, Transfer, Waiting, hidden_across_layers, waiting
from shardwise.cost.sweep.row_table import RankRows, RowTable
from shardwise.cost.traffic import collective_price
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload, Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class Offloaded:
    """One way to offload in a batch: what it leaves on the devices, and what it sends over the host's link."""

    def __init__(self, job: Job, base: Strategy, contents: RankContents, sharding: Sharding, offload: Offload) -> None:
        """``contents`` and ``sharding`` are those of the whole batch; ``base`` counts for its degrees."""
        self.offload, self.overlapped = offload, base.overlap.offload
        self.contents, self.recipe = contents, job.recipe
        self.sharding = replace(sharding, offload=offload)
        self.states = rank_state_bytes(self.contents, self.sharding, job.recipe, job.training.optimizer)
        self.moments, self.base = moments_of(job.stack), base
        self.held_bytes = [self._held(job, moment) for moment in self.moments]
        unit = divided_units(self.contents, self.sharding, tied=job.model.tied_embeddings)
        everywhere = 0.0 * self.states.gradients
        left = everywhere + left_over(unit, self.sharding, self.recipe)
        in_turn, later = (
            gradients_absent(self.states.gradients, self.sharding.zero, self.base, one) for one in (True, False)
        )
        self.reduced_in_turn = in_turn.whole if in_turn.whole.any() else None
        self.growing = later.growing if later.growing.any() else None
        self.of_head = everywhere + head_share(self.contents, tied=job.model.tied_embeddings)
        self.left = [left if moment == "loss" and left.any() else None for moment in self.moments]
        has_head: Any = self.contents.has_head
        with_head = has_head.any(axis=(1, 2))
        self.kinds = [with_head.nonzero()[0] if moment == "loss" else slice(None) for moment in self.moments]
        self.units_taken = job.cluster.device.units_taken.copies
        self.cluster = job.cluster
        lines = self._state_lines(1) if offload.any else []
        self.state_costs = [_send(self._link(line), line.size_bytes) for line in lines]

    def _held(self, job: Job, moment: Moment) -> Any:
        """Model states, what is gathered at a moment, and the framework."""
        gathered = gathered_bytes(self.contents, self.sharding, self.recipe, moment, tied=job.model.tied_embeddings)
        return self.states.total + gathered + job.cluster.device.framework_memory

    def memory_bytes(self, ranks: RankRows, part: slice, lengths: Array) -> tuple[Array, Any]:
        """Of the fullest device, and what its host holds for it."""
        share = self.offload.activations
        memory: Any = None
        for number, kinds in enumerate(self.kinds):
            if not isinstance(kinds, slice) and not len(kinds):
                continue
            there = self._memory_at(number, kinds, ranks, part, lengths).max(axis=0)
            memory = there if memory is None else maximum(memory, there)
        if not self.offload.any:
            return memory, 0.0
        activations = ranks.activation_bytes[-1][:, None, part]
        return memory, (by_row(self.states.offloaded, lengths) + activations * share).max(axis=0)

    def _memory_at(self, number: int, kinds: Any, ranks: RankRows, part: slice, lengths: Array) -> Array:
        """Of the ``kinds`` of rank that have such a moment."""

        def of_kinds(of_blocks: Array) -> Array:
            return by_row(of_blocks[kinds], lengths)

        activations = ranks.activation_bytes[number][kinds, None, part]
        if self.offload.activations:
            leaving = ranks.activation_bytes[-1][kinds, None, part] / ranks.in_flight[kinds, None, part]
            layers: Any = self.contents.layers
            travel = Travel(leaving, ranks.in_flight[kinds, None, part], of_kinds(layers))
            activations = travel.on_device(activations, self.offload.activations, self.moments[number])
        others = activations + ranks.other_bytes[number][kinds, None, part]
        memory: Array = of_kinds(self.held_bytes[number]) + others
        moment, alone = self.moments[number], ranks.alone[kinds, None, part]
        growing: Any = 0.0
        late: Any = ranks.late_bytes[kinds, None, part]
        if moment != "together" and alone.any():
            if (left := self.left[number]) is not None:
                memory -= alone * of_kinds(left)
            in_turn: Any = 0.0
            if self.reduced_in_turn is not None:
                in_turn = ranks.in_turn[kinds, None, part] * of_kinds(self.reduced_in_turn)
                memory -= alone * in_turn
            if self.growing is not None:
                there = 1.0 if moment == "layer" else ranks.losses_before[kinds, None, part]
                growing = alone * (of_kinds(self.growing) - in_turn) * (1 - there * of_kinds(self.of_head))
        late = late if moment != "loss" and late.any() else 0.0
        if is_array(growing) or is_array(late):
            of_a_microbatch = activations / ranks.in_flight[kinds, None, part]
            memory += late - Absent(0.0, growing).not_yet(late, of_a_microbatch)
        return memory

    def waiting(
        self, rows: RowTable, part: slice, lengths: Array, left: dict[Pass, Waiting]
    ) -> tuple[Array | None, dict[Pass, Waiting]]:
        """Seconds besides, and what the step waits for together with what is ``left`` of data parallelism."""
        if not self.offload.any:
            return None, left
        transfers = self._transfers(rows, part, lengths)
        hidden = hidden_across_layers(transfers, *rows.ranks.windows(part))
        besides: Any = None
        for transfer, under in zip(transfers, hidden):
            more = transfer.seconds if transfer.window == "none" else self.units_taken * under
            if transfer.window == "none" or self.units_taken:
                besides = more if besides is None else besides + more
        return besides, {which: left[which].beside(waiting(transfers, hidden, which)) for which in PASSES}

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
            moved = rows.ranks.saved_bytes[:, None, part] * self.offload.activations
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


def by_row(of_blocks: Array, lengths: Array, times: Any = 1) -> Array:
    """Figures of blocks (the last axis) for each of their rows, ``lengths`` of a block; ``times`` as much."""
    of_rows: Array = of_blocks.repeat(lengths, axis=-1)  # three times as fast as ``take``
    return times * of_rows if is_array(times) or times != 1 else of_rows


def _send(host: Topology, size_bytes: Any) -> tuple[Any, Any]:
    """Seconds of one message to the host, and those that keep the link busy; none for no bytes at all."""
    if not size_bytes.any():
        return None, None
    cost = collective_price(CollectiveKind.SEND_RECV, size_bytes, host, "auto")
    sent = size_bytes > 0  # not even the latency where one strategy of several sends nothing
    return cost.seconds * sent, cost.bandwidth_seconds * sent
