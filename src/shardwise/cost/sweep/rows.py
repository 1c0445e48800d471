"""The rows of a group's table: time and memory of every kind of rank by layer, schedule and recompute choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.cost.compute.recompute import blend, layers_stay_whole, layers_to_recompute, recomputed_share
from shardwise.cost.compute.roofline import Seconds
from shardwise.cost.memory.in_flight import peak_chunks_of_kinds
from shardwise.cost.memory.restored import recomputed_layer_bytes
from shardwise.cost.memory.sum import PassMemory, pass_memory, reduces_in_turn
from shardwise.cost.memory.transient import MOMENTS, Moment
from shardwise.cost.step.prediction import passes_with_exposed, pipeline_bubble, slowest_and_others
from shardwise.cost.sweep.columns import Group, groups_alike
from shardwise.cost.sweep.parts import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    CACHED,
    FORWARD,
    INPUT_GRADIENT,
    LEFT,
    MODES,
    RESTORED,
    SAVED,
    WEIGHT_GRADIENT,
    PartBook,
)
from shardwise.cost.traffic.data import last_share
from shardwise.cost.traffic.expert import beside_other_microbatches
from shardwise.cost.traffic.traffic import ComputeWindows, OverlappedTransfer, hidden_in_layers, layer_windows
from shardwise.layout.payloads import PASSES, Pass
from shardwise.spec.schedules import schedule_record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Record = TypeVar("Record")
Each = TypeVar("Each")


@dataclass(frozen=True)
class TimedRows:
    """What the time of data parallelism and offload depends on: arrays of kind of rank × row.

    Rows of a table that differ in memory and in the pipeline's idle time only share one of these.
    """

    sequences: Array  # by row only
    microbatches: Array  # by row only
    last_share: Array  # by row only
    lasting: dict[Pass, Array]  # seconds of a step's pass, including exposed communication of its layers
    busy: dict[Pass, dict[str, Array]]  # seconds that the layers keep each link busy
    once_seconds: Array  # sent after the last microbatch
    in_layers: Array  # share of a forward pass that is computed before the head

    def __len__(self) -> int:
        return len(self.microbatches)

    def beside_columns(self, part: slice | Array) -> TimedRows:
        """Some of them, to be combined with columns: kind × 1 × row."""
        return changed(self, lambda values: beside_columns(values, part))


@dataclass(frozen=True)
class RowTable:
    """Columns over the valid rows of a group: layer × schedule × recompute choices, flattened."""

    index: Array  # layer, schedule and recompute choice × row
    sequences: Array
    pipeline_seconds: Array
    passes: PassMemory  # kind of rank × row
    timed_row: Array  # which of `timed` a row has
    timed: TimedRows

    def __len__(self) -> int:
        return len(self.sequences)

    def part(self, rows: slice, timed: slice, first_layer: int) -> RowTable:
        """Some of the rows, their layer choices numbered from ``first_layer``."""

        def cut(record: Record, places: slice) -> Record:
            return changed(record, lambda values: values[..., places])

        index = cut(self.index, rows)
        index[0] -= first_layer
        figures = cut(self.sequences, rows), cut(self.pipeline_seconds, rows)
        return RowTable(
            index, *figures, cut(self.passes, rows), cut(self.timed_row, rows) - timed.start, cut(self.timed, timed)
        )

    def row(self, group: Group, number: int) -> dict[str, Any]:
        layer, schedule, recompute = self.index[:, number].tolist()
        return {**vars(group.layers[layer]), **vars(group.schedules[schedule]), **vars(group.recomputes[recompute])}


def beside_columns(values: Array, rows: slice | Array) -> Array:
    """Some rows, to be combined with columns: kind × 1 × row."""
    some: Array = values[..., rows] if isinstance(rows, slice) else values.take(rows, axis=-1)  # faster than an index
    return some[..., None, :]


def concatenated(tables: list[RowTable]) -> RowTable:
    """The rows of several tables, one after the other."""
    import numpy as np

    if len(tables) == 1:
        return tables[0]
    links = {which: dict.fromkeys(name for table in tables for name in table.timed.busy[which]) for which in PASSES}
    first = np.cumsum([0, *(len(table.timed) for table in tables)]).tolist()

    def beside(table: RowTable, start: int) -> RowTable:
        """With its timed rows numbered from ``start``; a link that a table does not use is never busy there."""
        timed, idle = table.timed, np.zeros_like(table.timed.once_seconds)
        busy = {which: {name: timed.busy[which].get(name, idle) for name in links[which]} for which in PASSES}
        return replace(table, timed_row=table.timed_row + start, timed=replace(timed, busy=busy))

    return _combined(list(map(beside, tables, first)), lambda arrays: np.concatenate(arrays, axis=-1))


def changed(record: Record, change: Callable[[Any], Any]) -> Record:
    """A record (dataclass, mapping or tuple of arrays, nested) with every array changed."""
    return _combined([record], lambda arrays: change(arrays[0]))


def _combined(records: Sequence[Record], join: Callable[[list[Any]], Any]) -> Record:
    """One record whose every array is made by ``join`` from those of several."""
    first: Any = records[0]
    if isinstance(first, tuple):
        return tuple(_combined(items, join) for items in zip(*records))  # type: ignore[return-value]
    if isinstance(first, dict):
        return {key: _combined([record[key] for record in records], join) for key in first}  # type: ignore[index, return-value]
    if is_dataclass(first):
        return replace(first, **_combined([vars(record) for record in records], join))  # type: ignore[type-var, return-value]
    return join(list(records))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Valid:
    """The rows of a table whose batch divides, by layer, schedule and recompute choice."""

    cells: Array
    places: dict[tuple[int, ...], Array] = field(default_factory=dict)

    def of(self, values: Any, *kinds: int) -> Array:
        """Their values one after the other, by kind of rank if there are any."""
        import numpy as np

        shape = values.shape[-3:]
        if shape not in self.places:  # where an array of this shape, of length 1 on some axes, has each row
            numbers = np.arange(math.prod(shape)).reshape(shape)
            self.places[shape] = np.broadcast_to(numbers, self.cells.shape)[self.cells]
        rows: Array = values.reshape(*values.shape[:-3], -1).take(self.places[shape], axis=-1)
        return np.broadcast_to(rows, (*kinds, rows.shape[-1]))


CELLS_AT_ONCE = 32_768  # kinds of rank × rows: what fits a processor's cache


def row_tables(groups: Sequence[Group], book: PartBook) -> list[RowTable]:
    """All valid rows of each group, without those whose batch does not divide."""
    tables: dict[int, RowTable] = {}
    for numbers in groups_alike(groups, CELLS_AT_ONCE):
        made = _RowBuilder([groups[number] for number in numbers], book).tables()
        tables.update(zip(numbers, made))
    return [tables[number] for number in range(len(groups))]


class _RowBuilder:
    """Arrays are kind of rank × layer × schedule × recompute choice, of length 1 where it does not matter.

    The layer choices are those of all groups, one after the other; the groups share the other axes.
    """

    def __init__(self, groups: Sequence[Group], book: PartBook) -> None:
        import numpy as np

        self.groups, self.book = groups, book
        self.group = group = groups[0]  # for what they share
        self.layers = [(member, layer) for member in groups for layer in member.layers]
        # Kinds of rank whose layers are tuned alike share their parts.
        self.books = book.of_ranks(group)
        self.parts = [[own.parts(member, layer) for member, layer in self.layers] for own in self.books]
        self.stack = book.stack([parts for of_kind in self.parts for parts in of_kind])
        of_parts = self.stack.figures
        # Figure × kind or 1 × layer × part × mode.
        self.figures = of_parts.reshape(len(of_parts), len(self.books), len(self.layers), *of_parts.shape[2:])
        self.sequences = np.array([batches for member in groups for batches in member.sequences], dtype=np.int64)
        sizes = np.array(
            [member.base.data_parallel * layer.microbatch for member, layer in self.layers], dtype=np.int64
        )
        self.microbatches = np.maximum(1, self.sequences // sizes[:, None])
        self.m = self.microbatches[:, :, None].astype(float)
        pp = group.base.pp
        self.chunks = [
            schedule_record(choice.schedule).chunks_per_rank(pp, choice.interleave) for choice in group.schedules
        ]
        last = [last_share(pp, choice.schedule, self.m[:, s]) for s, choice in enumerate(group.schedules)]
        # Schedules with equal chunks and batches differ in idle time and memory only.
        classes: dict[Any, list[int]] = {}
        for s, (chunks, share) in enumerate(zip(self.chunks, last)):
            classes.setdefault((chunks, self.sequences[:, s].tobytes(), share.tobytes()), []).append(s)
        self.timed = [numbers[0] for numbers in classes.values()]  # a schedule of each class
        self.timed_m, self.last = self.m[:, self.timed], np.stack([last[s] for s in self.timed], axis=1)
        self.class_of = np.empty(len(last), dtype=int)
        for number, numbers in enumerate(classes.values()):
            self.class_of[numbers] = number
        self.modes = np.array([MODES.index(choice.recompute) for choice in group.recomputes])
        # How many of each part (`parts_of`) every kind of rank holds.
        held = [(*(count for _, count in rank.kinds), rank.has_embedding, rank.has_head) for rank in group.ranks]
        self.counts = np.array(held, dtype=float)
        self.wanted = np.array(
            [layers_to_recompute(choice.recompute, choice.recompute_layers) for choice in group.recomputes]
        )
        self.share: Array = recomputed_share(self.wanted, self._layers_of_ranks())  # kind × recompute
        self.shape = (len(self.layers), len(group.schedules), len(group.recomputes))

    def tables(self) -> list[RowTable]:
        """One for each group."""
        import numpy as np

        figures, kinds = self._mixed(self.figures), len(self.group.ranks)
        passes, timed = self._timed_rows(figures)
        memory = self._pass_memory(figures[SAVED], figures[CACHED])
        valid = _Valid(np.broadcast_to((self.sequences > 0)[:, :, None], self.shape))
        of_time = _Valid(valid.cells[:, self.timed])
        timed_row = (np.cumsum(of_time.cells) - 1).reshape(of_time.cells.shape)[:, self.class_of]
        table = RowTable(
            np.array(valid.cells.nonzero()),
            valid.of(self.sequences[:, :, None]),
            valid.of(self._pipeline_seconds(passes)),
            changed(memory, lambda values: valid.of(values, kinds)),
            valid.of(timed_row),
            changed(timed, lambda values: of_time.of(values, *values.shape[:-3])),
        )
        return self._split(table, *(np.count_nonzero(rows.cells, axis=(1, 2)) for rows in (valid, of_time)))

    def _split(self, table: RowTable, rows_of_layer: Array, timed_of_layer: Array) -> list[RowTable]:
        """The rows of each group, with its layer choices numbered from 0."""
        import numpy as np

        if len(self.groups) == 1:
            return [table]
        first = np.cumsum([0, *(len(group.layers) for group in self.groups)])
        rows, timed = (np.cumsum([0, *of_layer])[first].tolist() for of_layer in (rows_of_layer, timed_of_layer))
        return [
            table.part(slice(*rows[group : group + 2]), slice(*timed[group : group + 2]), int(first[group]))
            for group in range(len(self.groups))
        ]

    # -- sums over the parts of a rank ---------------------------------------------------------------

    def _mixed(self, values: Array) -> Array:
        """Figure × kind or 1 × layer × part × mode → figure × kind × layer × 1 × recompute."""
        import numpy as np

        counts = self.counts[:, :, None, None]
        rank = counts[:, 0] * values[:, :, :, 0]
        for part in range(1, values.shape[3]):
            rank = rank + counts[:, part] * values[:, :, :, part]
        none, selective, full = (rank[..., None, None, mode] for mode in range(len(MODES)))
        share = self.share[:, None, None, :]
        named = self.modes == MODES.index("selective")
        mixed: Array = blend(share, np.where(named, selective, none), full)
        return mixed

    def _layers_of_ranks(self) -> Array:
        """Kind × 1."""
        layers: Array = self.counts[:, :-2].sum(axis=1, keepdims=True)
        return layers

    def _timed_rows(self, figures: Array) -> tuple[Seconds, TimedRows]:
        """The passes of a microbatch, and what they leave to data parallelism, by kind of schedule."""
        import numpy as np

        chunks = np.array([self.chunks[s] for s in self.timed], dtype=float)[:, None]
        call = self.book.job.cluster.device.efficiency.stage_call_seconds * chunks
        calls = call * self.book.job.training.forward_passes
        compute = Seconds(figures[FORWARD] + calls, figures[INPUT_GRADIENT] + call, figures[WEIGHT_GRADIENT])
        under = (compute.forward, compute.backward, figures[ATTENTION_FORWARD], figures[ATTENTION_BACKWARD])
        windows = ComputeWindows(*(self.timed_m * seconds for seconds in under))
        transfers = [self._transfer(figures, number) for number in range(len(self.stack.keys))]
        hidden = hidden_in_layers(transfers, windows)
        passes = passes_with_exposed(compute, transfers, hidden, self.timed_m)
        head = self.counts[:, -1, None, None, None] * self.figures[FORWARD, :, :, -1, 0][..., None, None]
        lasting, busy = layer_windows(transfers, hidden, windows)
        once = np.array(list(map(self._once_seconds, range(len(self.group.ranks)))))[:, :, None, None]
        sequences = self.sequences[:, self.timed, None]
        return passes, TimedRows(sequences, self.timed_m, self.last, lasting, busy, once, 1 - head / compute.forward)

    def _transfer(self, figures: Array, number: int) -> OverlappedTransfer:
        """A line of all layer choices."""
        import numpy as np

        key, width = self.stack.keys[number], self.book.line_width
        start = LEFT + 1 + number * width
        seconds, unhideable, repeated, *on_links = figures[start : start + width]
        whole = np.where(seconds > 0, seconds, 1.0)
        hideable = 1 - unhideable / whole
        if key.dimension == "ep" and key.window != "none" and self.book.job.stack.ep_overlap == "microbatches":
            hideable = hideable * beside_other_microbatches(self.group.base.pp, self.m)
        return OverlappedTransfer(
            key.in_pass,
            self.timed_m * seconds,
            {name: self.timed_m * on_link for name, on_link in zip(self.book.links, on_links) if on_link.any()},
            key.window,
            hideable=hideable,
            units_taken=self.stack.units_taken[number].reshape(len(self.books), -1)[..., None, None],
            repeated=repeated / whole,
        )

    # -- memory --------------------------------------------------------------------------------------

    def _pass_memory(self, saved_figures: Array, cached: Array) -> PassMemory:
        import numpy as np

        head = self.counts[:, -1, None, None, None] * self.figures[SAVED, :, :, -1, 0][..., None, None]
        pp, names = self.group.base.pp, [choice.schedule for choice in self.group.schedules]
        stay_whole = layers_stay_whole(self.wanted, self._layers_of_ranks()[:, None], np.array(self.chunks)[:, None])
        transient = {moment: self._transient(moment) for moment in MOMENTS}
        if cached.any():
            transient["loss"] = transient["loss"] + np.maximum(0.0, cached)
        return pass_memory(
            transient,
            saved_figures - head,
            head,
            self._restored(),
            stay_whole=stay_whole[:, None],
            in_flight=self._in_flight(),
            microbatches=self.m,
            forwards_first=np.array([schedule_record(name).forwards_first for name in names])[:, None],
            in_turn=np.stack([reduces_in_turn(pp, name, self.m[:, s]) for s, name in enumerate(names)], axis=1),
        )

    def _of_kind(self, each: Sequence[Each], kind: int) -> Each:
        """What belongs to a kind of rank, of one for each or of one for all."""
        return each[kind if len(each) > 1 else 0]

    def _once_seconds(self, kind: int) -> list[float]:
        """By layer choice."""
        seconds, contents, book = [], self.group.ranks[kind], self._of_kind(self.books, kind)
        for group in self.groups:
            plain = {layer.sequence_parallel for layer in group.layers}
            of_plain = {sp: book.once_seconds(group, contents, sp) for sp in plain}
            seconds += [of_plain[layer.sequence_parallel] for layer in group.layers]
        return seconds

    def _in_flight(self) -> Array:
        """Microbatches in flight on the fullest rank of each kind: kind × layer × schedule × 1."""
        import numpy as np

        base, stack = self.group.base, self.book.job.stack
        schedules = [
            (choice.schedule, chunks, stack.forwards_ahead(base, schedule_record(choice.schedule)))
            for choice, chunks in zip(self.group.schedules, self.chunks)
        ]
        rows = [tuple(row) for row in self.microbatches.tolist()]  # many are alike
        of_row = {
            row: [
                peak_chunks_of_kinds(name, base.pp, m, chunks, self.group.members, ahead)
                for (name, chunks, ahead), m in zip(schedules, row)
            ]
            for row in set(rows)
        }
        peaks = np.array([of_row[row] for row in rows])
        in_flight: Array = (peaks / np.array(self.chunks)[:, None]).transpose(2, 0, 1)[..., None]
        return in_flight

    def _transient(self, moment: Moment) -> Array:
        """Kind × layer × 1 or schedule × 1; there is no loss on ranks without a head."""
        import numpy as np

        keys = [(tuple(kind for kind, _ in rank.held), bool(rank.has_head)) for rank in self.group.ranks]
        held: Array = np.array(
            [
                [parts.transient_bytes(moment, *key) for parts in self._of_kind(self.parts, kind)]
                for kind, key in enumerate(keys)
            ]
        )
        if moment == "loss":
            held[[not contents.has_head for contents in self.group.ranks]] = -np.inf
        messages = np.array([parts.message_bytes for parts in self.parts[0]])
        if not messages.any():
            return held[:, :, None, None]
        of_all: Array = held[:, :, None, None] + messages[:, None, None] * self.m
        return of_all

    def _restored(self) -> Array:
        """Kind × layer × 1 × recompute."""
        import numpy as np

        restored = self.figures[RESTORED, :, :, :-2]
        none = np.array([choice.recompute_layers == 0 for choice in self.group.recomputes])
        back = np.where(none, 0.0, restored[..., self.modes])  # kind or 1 × layer × part × recompute
        most: Array = recomputed_layer_bytes(
            (self.counts[:, part, None, None], back[:, :, part]) for part in range(back.shape[2])
        )
        if self.book.job.stack.kept_router_losses:
            every = np.array([choice.recompute_layers is None for choice in self.group.recomputes])
            left = (self.figures[LEFT, :, :, :-2] * (self.counts[:, None, :-2, None] > 0)).max(axis=2)
            others = np.array([max(0, rank.moe_layers - 1) for rank in self.group.ranks])
            most = most + others[:, None, None] * left[..., self.modes] * every
        return most[:, :, None, :]

    # -- the pipeline --------------------------------------------------------------------------------

    def _pipeline_seconds(self, passes: Seconds) -> Array:
        """All microbatches through the slowest rank, plus the schedule's idle time."""
        import numpy as np

        group, pp = self.group, self.group.base.pp
        slowest, others = slowest_and_others([Seconds(*kind) for kind in zip(*passes.passes)], group.counts)
        seconds: Array = self.m * slowest.total[:, self.class_of]
        if pp == 1:
            return seconds
        messages = np.array([self.book.message_seconds(member, layer) for member, layer in self.layers])[:, None]
        shape, ends = (len(self.layers), len(self.timed), self.shape[2]), self.book.job.stack.step_ends
        mean = [np.broadcast_to(seconds, shape) for seconds in others.passes]
        for s, (choice, chunks) in enumerate(zip(group.schedules, self.chunks)):
            m = self.microbatches[:, s, None]
            own = Seconds(*(of_pass[:, self.class_of[s]] for of_pass in mean))
            seconds[:, s] += pipeline_bubble(choice.schedule, pp, m, chunks, own, messages, ends)
        return seconds
