"""Step time and memory of every strategy of many groups; similar groups are priced together, rows × columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.collectives.arrays import is_array
from shardwise.cost.step.prediction import length_wait, waiting_share
from shardwise.cost.step.stage_time import optimizer_seconds
from shardwise.cost.sweep.columns import CollectiveBook, ColumnBook, ColumnClass, Group
from shardwise.cost.sweep.offloaded import Offloaded, RowsAtMoment, StepEnd, by_row
from shardwise.cost.sweep.parts import PartBook
from shardwise.cost.sweep.rows import RowTable, TimedRows, beside_columns, changed, concatenated, row_tables
from shardwise.cost.traffic.data import DataLine, SentParameters, data_lines, tensors_of, wire_bytes
from shardwise.cost.traffic.execution import units_taken
from shardwise.cost.traffic.traffic import (
    OverlappedTransfer,
    added_seconds,
    hidden_across_layers,
    waiting,
)
from shardwise.layout.payloads import PASSES, Share
from shardwise.layout.sharding import Sharding, stacked
from shardwise.layout.stages import RankContents, embedding_on_both_ends
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload, Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class Wanted(Protocol):
    """What a search still accepts."""

    def is_fast(self, seconds_per_sequence: Array) -> Array: ...

    def fits(self, memory_bytes: Array, host_bytes: Any) -> Array: ...


CELLS_AT_ONCE = 131_072  # kinds of rank × rows × columns; a fifth of them are timed: what fits a processor's cache
CELLS_TO_START = 8 * CELLS_AT_ONCE


@dataclass(frozen=True)
class TableBlock:
    """The rows of one group and a class of its columns."""

    group: Group
    rows: RowTable
    columns: ColumnClass

    @property
    def cells(self) -> int:
        return len(self.rows) * len(self.columns.numbers) * len(self.group.ranks)

    def strategy(self, column: int, row: int, offload: Offload) -> Strategy:
        choice = self.group.shards[int(self.columns.numbers[column])]
        return self.group.strategy(self.rows.row(self.group, row), choice, offload)

    @property
    def likeness(self) -> tuple[Any, ...]:
        """Equal for blocks that can be priced together."""
        sharding, overlap, base = self.columns.sharding, self.group.base.overlap, self.group.base
        often = (sharding.gradients_sharded, sharding.gathers_once, base.pp > 1, base.gradient_group > 1)
        return (often, self.columns.tickets.shape, self.group.offloads, overlap.dp, overlap.offload)


@dataclass(frozen=True)
class TablePiece:
    """Some rows of some blocks, times their columns, with one way to offload; rows are timed on demand."""

    batch: _Batch
    offloaded: Offloaded
    start: int  # the first of the batch's rows
    block_of_row: Array  # which block each row belongs to
    row_numbers: Array  # in that block's row table
    pipeline_seconds: Array  # per row: no column of it is faster
    memory_bytes: Array  # of the fullest device: column × row
    host_bytes: Any  # what offload keeps outside one device
    sequences: Array  # of a step, per row

    @property
    def blocks(self) -> Sequence[TableBlock]:
        return self.batch.blocks

    @property
    def offload(self) -> Offload:
        return self.offloaded.offload

    def step_seconds(self, rows: Array | None = None) -> Array:
        """Column × row, of all rows or of those with these numbers in ascending order."""
        import numpy as np

        numbers = np.arange(len(self.row_numbers)) if rows is None else rows
        timing = _Timing(self.batch, self.start + numbers)
        seconds: Array = self.pipeline_seconds[numbers] + timing.seconds(self.offloaded)
        return seconds

    def strategy(self, column: int, row: int) -> Strategy:
        """The strategy of one cell."""
        return self.blocks[int(self.block_of_row[row])].strategy(column, int(self.row_numbers[row]), self.offload)


class TablePricer:
    """Prices groups of strategies of one job description; what they share is priced once."""

    def __init__(self, job: Job) -> None:
        """``job`` says everything but the strategy; its strategy's ``collective`` counts."""
        self.job = job
        self.parts = PartBook(job)
        self.collectives = CollectiveBook(job, self.parts.links)
        self.columns = ColumnBook(job, self.collectives)

    def pieces(self, groups: Iterable[Group], wanted: Wanted | None = None) -> Iterator[TablePiece]:
        """The tables of all groups, in pieces that hold several small ones or part of a large one.

        Pieces in which no way to offload gives anything ``wanted`` are left out.
        """
        groups = list(groups)
        classes_of = [self.columns.classes(group) for group in groups]
        self.collectives.price_all()
        gathered: dict[tuple[Any, ...], list[list[TableBlock]]] = {}
        cells: Counter[tuple[Any, ...]] = Counter()
        for group, classes, rows in zip(groups, classes_of, row_tables(groups, self.parts)):
            if not len(rows):
                continue
            blocks = [TableBlock(group, rows, columns) for columns in classes]
            likeness = tuple(block.likeness for block in blocks)
            gathered.setdefault(likeness, []).append(blocks)
            cells[likeness] += sum(block.cells for block in blocks)
            if cells[likeness] >= len(blocks) * CELLS_TO_START:
                del cells[likeness]
                yield from self._priced(gathered.pop(likeness), wanted)
        for alike in gathered.values():
            yield from self._priced(alike, wanted)

    def _priced(self, blocks: list[list[TableBlock]], wanted: Wanted | None) -> Iterator[TablePiece]:
        """The classes of columns of several groups, each given as one block for every class."""
        rows = _BatchRows([of_group[0] for of_group in blocks])
        for of_class in zip(*blocks):
            yield from _Batch(self, list(of_class), rows).pieces(wanted)


class _BatchRows:
    """The rows of several groups, one after the other."""

    def __init__(self, blocks: list[TableBlock]) -> None:
        import numpy as np

        self.contents = _stacked_contents([block.group.ranks for block in blocks])
        tables = [block.rows for block in blocks]
        lengths = [len(table) for table in tables]
        self.block_of_row = np.repeat(np.arange(len(tables)), lengths)
        self.row_numbers = np.concatenate([np.arange(length) for length in lengths])
        self.block_of_timed = np.repeat(np.arange(len(tables)), [len(table.timed) for table in tables])
        self.rows = concatenated(tables)
        # Whether the memory of some kind of rank peaks before a backward pass has made its gradients.
        self.alone = self.rows.passes.alone.any(axis=0)
        self._known_halves: dict[tuple[int, int], list[tuple[Array, list[RowsAtMoment]]]] = {}

    def halves(self, part: slice) -> list[tuple[Array, list[RowsAtMoment]]]:
        """`_halves` of a part, made once for all classes of columns."""
        key = (part.start, part.stop)
        if key not in self._known_halves:
            self._known_halves[key] = self._halves(part)
        return self._known_halves[key]

    def _halves(self, part: slice) -> list[tuple[Array, list[RowsAtMoment]]]:
        """Some rows, apart from those with a kind of rank whose memory peaks before its gradients are complete.

        These take three times the arithmetic; where nearly all do, none is kept apart.
        """
        import numpy as np

        alone = self.alone[part]
        others = np.flatnonzero(~alone)
        if len(others) < len(alone) / 4:
            return [(np.arange(len(alone)), self._at_moments(part))]
        halves = [half for half in (others, np.flatnonzero(alone)) if len(half)]
        return [(half, self._at_moments(part.start + half)) for half in halves]

    def _at_moments(self, rows: slice | Array) -> list[RowsAtMoment]:
        """Some rows at every moment, of the kinds of rank that have it."""
        import numpy as np

        has_head: Any = self.contents.has_head
        lengths = np.bincount(self.block_of_row[rows], minlength=has_head.shape[-1])
        with_head = has_head.any(axis=(1, 2)).nonzero()[0].tolist()
        here = changed(self.rows.passes, lambda values: beside_columns(values, rows))
        in_layers = RowsAtMoment("layer", here, slice(None), lengths)
        if not with_head:
            return [in_layers]
        kinds: Any = with_head
        if len(with_head) == 1:
            kinds = slice(with_head[0], with_head[0] + 1)  # a view, not a copy
        return [RowsAtMoment("loss", changed(here, lambda values: values[kinds]), kinds, lengths), in_layers]


class _Batch:
    """Blocks of one likeness as arrays: kind of rank × column × block, and kind of rank × row.

    Rows come last: they are many, and arrays are fast along their last axis.
    """

    def __init__(self, pricer: TablePricer, blocks: list[TableBlock], rows: _BatchRows) -> None:
        import numpy as np

        self.job, self.blocks, self.links = pricer.job, blocks, pricer.parts.links
        self.base = blocks[0].group.base
        self.sharding = stacked([block.columns.sharding for block in blocks])
        self.contents = rows.contents
        end_seconds = optimizer_seconds(self.job, self.contents, self.sharding) + self._tied_seconds(pricer.parts)
        # part × line × kind × column × block
        tickets = np.stack([block.columns.tickets for block in blocks], axis=-1)
        # Columns that differ in memory only are timed once.
        shards = self.sharding.shards, self.sharding.expert_shards
        self.timed_columns, self.of_column = _distinct(end_seconds, tickets, *shards)
        tickets, self.end_seconds = (values.take(self.timed_columns, axis=-2) for values in (tickets, end_seconds))
        self.units = np.stack([block.columns.units for block in blocks], axis=-1)
        self.present = np.argwhere(tickets.any(axis=(2, 3, 4)))
        self.seconds = pricer.collectives.seconds[tickets] * self.units[:, None]
        self.hideable = 1 - 1 / self.units
        self.on_links = [
            self._on_links(tickets[held, number], self.units[held], pricer) for held, number in self.present
        ]
        lines = self._lines(self.sharding, 1, 1.0)
        self.units_taken = [
            units_taken(self.job, "dp", lines[number].kind, links)
            for (_, number), links in zip(self.present, self.on_links)
        ]
        self.rows, self.block_of_row, self.row_numbers = rows.rows, rows.block_of_row, rows.row_numbers
        self.block_of_timed, self.of_rows = rows.block_of_timed, rows

    @cached_property
    def offloads(self) -> list[Offloaded]:
        ways = self.blocks[0].group.offloads
        return [Offloaded(self.job, self.base, self.contents, self.sharding, way) for way in ways]

    def _tied_seconds(self, parts: PartBook) -> Any:
        """Of the sum over both ends of a pipeline: kind × column × block."""
        import numpy as np

        if self.base.pp == 1 or not embedding_on_both_ends(self.job):
            return 0.0
        seconds = [
            [parts.tied_seconds(block.group, contents, block.columns.sharding) for contents in block.group.ranks]
            for block in self.blocks
        ]
        return np.moveaxis(np.array(seconds), 0, -1)

    def _on_links(self, tickets: Array, units: Array, pricer: TablePricer) -> dict[str, Array]:
        """Seconds of one line on every link that it uses."""
        held = {name: seconds[tickets] * units for name, seconds in zip(self.links, pricer.collectives.link_seconds.T)}
        return {name: seconds for name, seconds in held.items() if seconds.any()}

    def pieces(self, wanted: Wanted | None) -> Iterator[TablePiece]:
        kinds, columns = len(self.blocks[0].group.ranks), len(self.of_column)
        height = max(1, CELLS_AT_ONCE // (kinds * columns))
        for start in range(0, len(self.block_of_row), height):
            yield from self._pieces_of(slice(start, min(start + height, len(self.block_of_row))), wanted)

    def _pieces_of(self, part: slice, wanted: Wanted | None) -> Iterator[TablePiece]:
        """The strategies of some rows, one piece for every way to offload."""

        block, numbers = self.block_of_row[part], self.row_numbers[part]
        pipeline, sequences = self.rows.pipeline_seconds[part], self.rows.sequences[part]
        fast = None if wanted is None else self._fast(part, wanted)
        if fast is not None and not fast.any():
            return
        halves = self.of_rows.halves(part)
        for offloaded in self.offloads:
            memory, host = self._memory(offloaded, halves)
            if wanted is not None and fast is not None and not (fast & wanted.fits(memory, host)).any():
                continue
            yield TablePiece(self, offloaded, part.start, block, numbers, pipeline, memory, host, sequences)

    def _memory(self, offloaded: Offloaded, halves: list[tuple[Array, list[RowsAtMoment]]]) -> tuple[Array, Any]:
        """On the fullest device and on its host: column × row."""
        import numpy as np

        memory, host = zip(*(offloaded.memory_bytes(moments) for _, moments in halves))
        if len(halves) == 1:
            return memory[0], host[0]
        in_turn = np.argsort(np.concatenate([places for places, _ in halves]))
        whole, of_host = np.concatenate(memory, axis=-1).take(in_turn, axis=-1), host[0]
        return whole, np.concatenate(host, axis=-1).take(in_turn, axis=-1) if is_array(of_host) else of_host

    def _fast(self, part: slice, wanted: Wanted) -> Array:
        """The cells that are fast enough without offload, as no way to offload is faster: column × row."""
        import numpy as np

        pipeline, sequences = self.rows.pipeline_seconds[part], self.rows.sequences[part]
        fast = np.zeros((len(self.of_column), len(pipeline)), dtype=bool)
        rows = np.flatnonzero(wanted.is_fast(pipeline / sequences))
        if len(rows):
            alone = pipeline[rows] + _Timing(self, part.start + rows).seconds()
            fast[:, rows] = wanted.is_fast(alone / sequences[rows])
        return fast

    def sums_more_often(self, offloaded: Sharding) -> bool:
        """Whether gradients that leave the device are summed in more microbatches than those that stay."""
        undivided = (offloaded.shards == 1) | (offloaded.expert_shards == 1)
        in_turn = self.base.pp > 1 and offloaded.gradients_sharded and self.job.recipe.fp32_shards
        return in_turn and offloaded.offload.gradients > 0 and bool(undivided.any())

    def without_offload(self, timed: TimedRows, lengths: Array, sharding: Sharding | None = None) -> StepEnd:
        """What follows the pipeline, for distinct columns; ``lengths``: how many rows belong to each block.

        Gradients are summed as ``sharding`` says, by default as if they stayed on the device.
        """
        import numpy as np

        transfers = self._data_transfers(timed, lengths, _columns(sharding or self.sharding, self.timed_columns))
        hidden, on_links = hidden_across_layers(transfers, timed.lasting, timed.busy)
        slower: Any = waiting_share(self.job.cluster, self.job.stack, gathers_once=self.sharding.gathers_once)
        if self.job.training.lengths is not None:
            waits = [length_wait(self.job.training, block.group.base.data_parallel) for block in self.blocks]
            slower = slower + by_row(np.array(waits), lengths) / np.sqrt(timed.sequences)
        layers = timed.lasting["forward"] + timed.lasting["backward"]
        tail = timed.once_seconds + by_row(self.end_seconds, lengths) + slower * layers
        left = {which: waiting(transfers, hidden, on_links, which).longest for which in PASSES}
        return StepEnd(added_seconds(transfers, hidden, tail), left)

    def _data_transfers(self, timed: TimedRows, lengths: Array, sharding: Sharding) -> list[OverlappedTransfer]:
        """The lines of the dense parameters and of the experts, without those that cost nothing anywhere."""
        over = sharding.shards, sharding.expert_shards
        # It mostly matters only whether they are 1.
        owned = self.job.stack.owned_parameters
        shards = [2 if (count > 1).all() and not owned else by_row(count, lengths) for count in over]
        units = self._owned_units(lengths) if owned else [None] * len(over)
        steps = timed.microbatches, timed.last_share
        lines = [self._lines(sharding, *steps, count, unit) for count, unit in zip(shards, units)]
        transfers, library = [], self.job.cluster.library
        hides = self.base.overlap.dp and not self.job.stack.has_adapter_units(self.job.training, self.base)
        for (held, number), links, taken in zip(self.present, self.on_links, self.units_taken):
            line = lines[held][number]
            seconds = by_row(self.seconds[held, number], lengths, line.times)
            on_links = {name: by_row(busy, lengths, line.times) for name, busy in links.items()}
            once = self.sharding.gathers_once
            communicator = line.communicator(library, tuple(Share)[held], gathers_once=once)
            if communicator:
                on_links[communicator] = seconds
            transfers.append(
                OverlappedTransfer(
                    line.window,
                    seconds,
                    on_links,
                    line.window if hides else "none",
                    line.window_share,
                    line.last_only,
                    by_row(self.hideable[held], lengths),
                    by_row(taken, lengths),
                )
            )
        return transfers

    def _owned_units(self, lengths: Array) -> list[SentParameters]:
        """One of the units of the dense parameters, and of the experts, without its sizes: kind × 1 × row."""
        import numpy as np

        model, ranks = self.job.model, [[(block.group.base, r) for r in block.group.ranks] for block in self.blocks]
        tensors = np.array([[tensors_of(model, *rank) for rank in kinds] for kinds in ranks]).T[:, :, None]
        of_rows = (
            (by_row(part / units, lengths), by_row(1 / units, lengths)) for part, units in zip(tensors, self.units)
        )
        return [SentParameters(0.0, 0.0, tensors=part, whole=share) for part, share in of_rows]

    def _lines(
        self, sharding: Sharding, microbatches: Any, last: Any, shards: Any = 1, unit: SentParameters | None = None
    ) -> list[DataLine]:
        """Whatever their sizes."""
        wire = wire_bytes(self.job, self.base.pp)
        return data_lines(sharding, unit or SentParameters(0.0, 0.0), shards, wire, microbatches, last)


class _Timing:
    """The time of some rows of a batch beside the pipeline; rows and columns that differ in memory only share it."""

    def __init__(self, batch: _Batch, numbers: Array) -> None:
        """``numbers``: those of the rows, ascending."""
        import numpy as np

        self.batch, self.numbers = batch, numbers
        timed_row, blocks = batch.rows.timed_row[numbers], len(batch.blocks)
        self.lengths = np.bincount(batch.block_of_row[numbers], minlength=blocks)  # rows of each block
        timed, self.of_row = np.unique(timed_row, return_inverse=True)
        self.timed = batch.rows.timed.beside_columns(timed)
        self.timed_lengths = np.bincount(batch.block_of_timed[timed], minlength=blocks)
        self.without = batch.without_offload(self.timed, self.timed_lengths)

    def seconds(self, offloaded: Offloaded | None = None) -> Array:
        """What the slowest kind of rank adds to the pipeline: column × row."""
        if offloaded is not None and offloaded.offload.activations:
            saved = self.batch.rows.passes.saved[:, None, self.numbers]
            return offloaded.added(self._rows(self._before(offloaded)), *self._of_rows, saved).seconds
        if offloaded is None or not offloaded.offload.any:
            of_timed = self.without.seconds.take(self.batch.of_column, axis=0)
        else:
            of_timed = offloaded.added(self._before(offloaded), self.timed, self.timed_lengths, 0.0).seconds
        seconds: Array = of_timed.take(self.of_row, axis=-1)
        return seconds

    def _before(self, offloaded: Offloaded) -> StepEnd:
        """What an offload adds to: kind × column × timed row."""
        if self.batch.sums_more_often(offloaded.sharding):
            return self._columns(self.batch.without_offload(self.timed, self.timed_lengths, offloaded.sharding))
        return self._without_of_columns

    @cached_property
    def _without_of_columns(self) -> StepEnd:
        return self._columns(self.without)

    @cached_property
    def _of_rows(self) -> tuple[TimedRows, Array]:
        """Each row by itself: what it saves for the backward pass may be all its own."""
        return self._rows(self.timed), self.lengths

    def _columns(self, step: StepEnd) -> StepEnd:
        return changed(step, lambda values: values.take(self.batch.of_column, axis=-2) if is_array(values) else values)

    def _rows(self, of_timed: Any) -> Any:
        return changed(of_timed, lambda values: values.take(self.of_row, axis=-1) if is_array(values) else values)


def _distinct(*figures: Array) -> tuple[Array, Array]:
    """Columns (the last axis but one) of which no two have equal figures; and for every column, its number there."""
    import numpy as np

    numbers: dict[Any, int] = {}
    by_column = [np.moveaxis(values, -2, 0) for values in figures]
    of_column = [
        numbers.setdefault(tuple(x.tobytes() for x in column), len(numbers)) for column in zip(*by_column, strict=True)
    ]
    return np.unique(of_column, return_index=True)[1], np.array(of_column)


def _columns(sharding: Sharding, numbers: Array) -> Sharding:
    """Some columns of a sharding of column × block."""
    return replace(sharding, **{name: held[numbers] for name, held in vars(sharding).items() if is_array(held)})


def _stacked_contents(ranks: list[tuple[RankContents, ...]]) -> RankContents:
    """Each figure an array of kind of rank × 1 × block."""
    import numpy as np

    names = [field.name for field in fields(RankContents) if field.name != "kinds"]
    columns: dict[str, Any] = {
        name: np.array([[getattr(rank, name) for rank in kinds] for kinds in ranks]).T[:, None, :] for name in names
    }
    counts = np.array([[[count for _, count in rank.kinds] for rank in kinds] for kinds in ranks]).T[:, :, None, :]
    layers: Any = zip((kind for kind, _ in ranks[0][0].kinds), counts)
    return RankContents(kinds=tuple(layers), **columns)
