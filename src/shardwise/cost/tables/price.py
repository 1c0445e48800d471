"""Step time and memory of every strategy of many groups: groups alike are priced together, rows × columns at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.as_run import busy_share
from shardwise.cost.communication.data import data_lines, wire_bytes
from shardwise.cost.communication.offload import OffloadLine, activation_lines, host_topology, state_lines
from shardwise.cost.memory import gathered_bytes
from shardwise.cost.overlap import PASSES, Pass, Transfer, Waiting, hidden_across_layers, waiting
from shardwise.cost.stage_time import optimizer_seconds
from shardwise.cost.states import rank_state_bytes
from shardwise.cost.tables.book import CollectiveBook
from shardwise.cost.tables.columns import ColumnClass, column_classes
from shardwise.cost.tables.group import Group
from shardwise.cost.tables.parts import PartBook
from shardwise.cost.tables.rows import RankRows, RowTable, row_table
from shardwise.cost.tables.stacking import joined_rows, stacked_contents, stacked_sharding
from shardwise.cost.traffic import collective_price
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload, Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

CELLS_AT_ONCE = 32_768  # kinds of rank × rows × columns: what fits a processor's cache
CELLS_TO_START = 4 * CELLS_AT_ONCE


@dataclass(frozen=True)
class Block:
    """The rows of one group and a class of its columns."""

    group: Group
    rows: RowTable
    columns: ColumnClass

    @property
    def cells(self) -> int:
        return len(self.rows) * len(self.columns.numbers) * len(self.group.ranks)

    @property
    def likeness(self) -> tuple[Any, ...]:
        """Blocks that can be priced together."""
        sharding, overlap = self.columns.sharding, self.group.base.overlap
        often = (sharding.gradients_sharded, sharding.gathers_once)
        return (often, self.columns.tickets.shape, self.group.offloads, overlap.dp, overlap.offload)


@dataclass(frozen=True)
class Piece:
    """Some rows of some blocks, times their columns, with one way to offload."""

    blocks: Sequence[Block]
    offload: Offload
    block_of_row: Array  # which block each row belongs to
    row_numbers: Array  # in that block's row table
    step_seconds: Array  # column × row
    memory_bytes: Array  # of the fullest device
    host_bytes: Any  # that offload keeps outside one device
    sequences: Array  # of a step, per row

    def strategy(self, column: int, row: int) -> Strategy:
        """The strategy of one cell."""
        block = self.blocks[int(self.block_of_row[row])]
        choice = block.group.shards[int(block.columns.numbers[column])]
        return block.group.strategy(block.rows.row(block.group, int(self.row_numbers[row])), choice, self.offload)


class TablePricer:
    """Prices groups of strategies of one job description; what they share is priced once."""

    def __init__(self, job: Job) -> None:
        """``job`` says everything but the strategy; its strategy's ``collective`` counts."""
        self.job = job
        self.parts = PartBook(job)
        self.collectives = CollectiveBook(job.cluster, self.parts.links, job.strategy.collective)

    def pieces(self, groups: Iterable[Group]) -> Iterator[Piece]:
        """The tables of all groups, in pieces that hold several small ones or part of a large one."""
        prepared = [(group, column_classes(self.job, group, self.collectives)) for group in groups]
        self.collectives.price_all()
        waiting: dict[tuple[Any, ...], list[Block]] = {}
        for group, classes in prepared:
            rows = row_table(group, self.parts)
            for columns in classes if len(rows) else ():
                block = Block(group, rows, columns)
                blocks = waiting.setdefault(block.likeness, [])
                blocks.append(block)
                if sum(one.cells for one in blocks) >= CELLS_TO_START:
                    yield from _Batch(self, waiting.pop(block.likeness)).pieces()
        for blocks in waiting.values():
            yield from _Batch(self, blocks).pieces()


class _Batch:
    """Blocks alike, as arrays: kind of rank × column × block, and kind of rank × row.

    Rows come last: they are many, and arrays are fast along their last axis.
    """

    def __init__(self, pricer: TablePricer, blocks: list[Block]) -> None:
        import numpy as np

        self.job, self.blocks, self.links = pricer.job, blocks, pricer.parts.links
        self.base = blocks[0].group.base
        self.sharding = stacked_sharding([block.columns.sharding for block in blocks])
        self.contents = stacked_contents([block.group.ranks for block in blocks])
        self.optimizer_seconds = optimizer_seconds(self.job, self.contents, self.sharding)
        # part × line × kind × column × block
        tickets = np.stack([block.columns.tickets for block in blocks], axis=-1)
        self.units = np.stack([block.columns.units for block in blocks], axis=-1)
        self.present = np.argwhere(tickets.any(axis=(2, 3, 4)))
        self.seconds = pricer.collectives.seconds[tickets] * self.units[:, None]
        self.on_links = [
            self._on_links(tickets[held, number], self.units[held], pricer) for held, number in self.present
        ]
        self.units_taken = [self._units_taken(links) for links in self.on_links]
        self.takes_units = any(taken.any() for taken in self.units_taken)
        lengths = [len(block.rows) for block in blocks]
        self.block_of_row = np.repeat(np.arange(len(blocks)), lengths)
        self.row_numbers = np.concatenate([np.arange(length) for length in lengths])
        self.rows = joined_rows([block.rows for block in blocks])
        self.offloads = [_Offloaded(self, offload) for offload in blocks[0].group.offloads]

    def _on_links(self, tickets: Array, units: Array, pricer: TablePricer) -> dict[str, Array]:
        """Seconds of one line on every link that it uses."""
        held = {name: seconds[tickets] * units for name, seconds in zip(self.links, pricer.collectives.link_seconds.T)}
        return {name: seconds for name, seconds in held.items() if seconds.any()}

    def _units_taken(self, on_links: dict[str, Array]) -> Array:
        """Share of the compute units that a line runs on (as `as_run` has it for a job)."""
        import numpy as np

        taken = self.job.cluster.device.units_taken
        if self.job.strategy.collective in ("nvls", "sharp"):
            return np.full(self.units.shape[1:], taken.in_network)
        share: Array = taken.collectives * busy_share(self.job.cluster.levels[0].name, on_links)
        return share

    def pieces(self) -> Iterator[Piece]:
        kinds, columns = self.seconds.shape[2:4]
        height = max(1, CELLS_AT_ONCE // (kinds * columns))
        for start in range(0, len(self.block_of_row), height):
            yield from self._pieces_of(slice(start, start + height))

    def _pieces_of(self, part: slice) -> Iterator[Piece]:
        """The strategies of some rows, one piece for every way to offload."""
        rows, block = self.rows, self.block_of_row[part]
        tail, left = self._without_offload(part)
        for one in self.offloads:
            memory, host = one.memory_bytes(rows.ranks, part, block)
            more, together = one.waiting(rows, part, block, left)
            seconds = tail if more is None else tail + more
            for which in PASSES:
                seconds = seconds + together[which].longest
            step = rows.pipeline_seconds[part] + seconds.max(axis=0)
            numbers, sequences = self.row_numbers[part], rows.sequences[part]
            yield Piece(self.blocks, one.offload, block, numbers, step, memory, host, sequences)

    def _without_offload(self, part: slice) -> tuple[Array, dict[Pass, Waiting]]:
        """What every kind of rank adds to the pipeline: optimizer, slowed computation; and what it waits for."""
        ranks, block = self.rows.ranks, self.block_of_row[part]
        transfers = self._data_transfers(part)
        hidden = hidden_across_layers(transfers, *ranks.windows(part))
        tail = ranks.once_seconds[:, None, part] + self.optimizer_seconds.take(block, -1)
        for transfer, under in zip(transfers, hidden):
            if transfer.window == "none":
                tail = tail + transfer.seconds
            elif self.takes_units:
                tail = tail + transfer.units_taken * under
        return tail, {which: waiting(transfers, hidden, which) for which in PASSES}

    def _data_transfers(self, part: slice) -> list[Transfer]:
        """The lines of the dense parameters and of the experts; those that nowhere cost anything are left out."""
        m, last, block = self.rows.microbatches[part], self.rows.last_share[part], self.block_of_row[part]
        lines = data_lines(self.sharding, 0.0, 1, wire_bytes(self.job), m, last)
        transfers = []
        for (held, number), links, taken in zip(self.present, self.on_links, self.units_taken):
            line = lines[number]
            transfers.append(
                Transfer(
                    line.window,
                    line.times * self.seconds[held, number].take(block, -1),
                    {name: line.times * seconds.take(block, -1) for name, seconds in links.items()},
                    line.window if self.base.overlap.dp else "none",
                    line.window_share,
                    line.last_only,
                    (1 / self.units[held]).take(block, -1),
                    taken.take(block, -1),
                )
            )
        return transfers


class _Offloaded:
    """One way to offload in a batch: what it leaves on the devices, and what it sends over the host's link."""

    def __init__(self, batch: _Batch, offload: Offload) -> None:
        job = batch.job
        self.offload, self.overlapped = offload, batch.base.overlap.offload
        self.contents, self.recipe = batch.contents, job.recipe
        self.sharding = replace(batch.sharding, offload=offload)
        self.states = rank_state_bytes(self.contents, self.sharding, job.recipe, job.training.optimizer)
        gathered = gathered_bytes(self.contents, self.sharding, self.recipe)
        self.held_bytes = self.states.total + gathered + job.cluster.device.framework_memory
        self.units_taken = job.cluster.device.units_taken.copies
        self.host = host_topology(job.cluster, offload.target) if offload.any else None
        self.state_costs = [_send(self.host, line.size_bytes) for line in self._state_lines(1)] if self.host else []

    def memory_bytes(self, ranks: RankRows, part: slice, block: Array) -> tuple[Array, Any]:
        """Of the fullest device, and what its host holds for it."""
        share = self.offload.activations
        activations = ranks.activation_bytes[:, None, part]
        others = activations * (1 - share) + ranks.other_bytes[:, None, part]
        memory = (self.held_bytes.take(block, -1) + others).max(axis=0)
        if not self.offload.any:
            return memory, 0.0
        return memory, (self.states.offloaded.take(block, -1) + activations * share).max(axis=0)

    def waiting(
        self, rows: RowTable, part: slice, block: Array, left: dict[Pass, Waiting]
    ) -> tuple[Array | None, dict[Pass, Waiting]]:
        """Seconds besides, and what the step waits for together with what is ``left`` of data parallelism."""
        if self.host is None:
            return None, left
        transfers = self._transfers(self.host, rows, part, block)
        hidden = hidden_across_layers(transfers, *rows.ranks.windows(part))
        besides: Any = None
        for transfer, under in zip(transfers, hidden):
            more = transfer.seconds if transfer.window == "none" else self.units_taken * under
            if transfer.window == "none" or self.units_taken:
                besides = more if besides is None else besides + more
        return besides, {which: left[which].beside(waiting(transfers, hidden, which)) for which in PASSES}

    def _transfers(self, host: Topology, rows: RowTable, part: slice, block: Array) -> list[Transfer]:
        m = rows.microbatches[part]
        transfers = [
            self._transfer(host, line, seconds.take(block, -1), on_link.take(block, -1))
            for line, (seconds, on_link) in zip(self._state_lines(m), self.state_costs)
            if seconds is not None
        ]
        if self.offload.activations:
            moved = rows.ranks.saved_bytes[:, None, part] * self.offload.activations
            cost = _send(host, moved)
            transfers += [self._transfer(host, line, *cost) for line in activation_lines(moved, m)]
        return transfers

    def _state_lines(self, microbatches: Any) -> list[OffloadLine]:
        return state_lines(self.contents, self.sharding, self.recipe, microbatches)

    def _transfer(self, host: Topology, line: OffloadLine, seconds: Any, on_link: Any) -> Transfer:
        return Transfer(
            line.window,
            line.count * seconds,
            {host.levels[0].name: line.count * on_link},
            line.window if self.overlapped else "none",
            line.window_share,
            line.last_only,
            units_taken=self.units_taken,
        )


def _send(host: Topology, size_bytes: Any) -> tuple[Any, Any]:
    """Seconds of one message to the host, and those that keep the link busy; none for no bytes at all."""
    if not size_bytes.any():
        return None, None
    cost = collective_price(CollectiveKind.SEND_RECV, size_bytes, host, "auto")
    return cost.seconds, cost.bandwidth_seconds
