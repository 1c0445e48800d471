"""The rows of a group's table: what a layer choice, a schedule and a recompute choice make of every kind of rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.cost.communication.data import last_share
from shardwise.cost.memory.transient import Moment, kinds_of, moments_of, reduces_in_turn
from shardwise.cost.overlap import PASSES, ComputeWindows, Pass, Transfer, hidden_in_layers
from shardwise.cost.step_time import Passes, passes_with_exposed, pipeline_bubble, slowest_and_others
from shardwise.cost.sweep.group import Group, groups_alike
from shardwise.cost.sweep.in_flight import chunks_of, microbatches_in_flight
from shardwise.cost.sweep.parts import PartBook
from shardwise.cost.sweep.probes import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    FORWARD,
    INPUT_GRADIENT,
    MODES,
    SAVED,
    WEIGHT_GRADIENT,
)
from shardwise.cost.sweep.row_table import PER_ROW, RankRows, RowTable
from shardwise.layout.stages import RankContents
from shardwise.spec.schedules import schedule_record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

CELLS_AT_ONCE = 32_768  # kinds of rank × rows: what fits a processor's cache


def row_tables(groups: Sequence[Group], book: PartBook) -> list[RowTable]:
    """All valid rows of each group; those whose batch does not divide are left out."""
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
        self.layers = [(one, layer) for one in groups for layer in one.layers]
        self.parts = [book.parts(one, layer) for one, layer in self.layers]
        self.stack = book.stack(self.parts)
        self.sequences = np.array([batches for one in groups for batches in one.sequences], dtype=np.int64)
        sizes = np.array([one.base.data_parallel * layer.microbatch for one, layer in self.layers], dtype=np.int64)
        self.microbatches = np.maximum(1, self.sequences // sizes[:, None])
        self.m = self.microbatches[:, :, None].astype(float)
        self.chunks = chunks_of(group)
        self.modes = np.array([MODES.index(choice.recompute) for choice in group.recomputes])
        self.counts = np.array([_part_counts(contents) for contents in group.ranks], dtype=float)
        self.share = self._recomputed_share()
        self.shape = (len(self.layers), len(group.schedules), len(group.recomputes))

    def tables(self) -> list[RowTable]:
        """One for each group."""
        import numpy as np

        group = self.group
        passes, ranks = self._ranks()
        valid = np.broadcast_to((self.sequences > 0)[:, :, None], self.shape)
        every = bool(valid.all())
        last = np.stack(
            [last_share(group.base.pp, one.schedule, self.m[:, s]) for s, one in enumerate(group.schedules)], axis=1
        )

        def flat(values: Any) -> Array:
            whole: Array = np.empty((*values.shape[:-3], *self.shape), values.dtype)
            whole[...] = values  # twice as fast as `broadcast_to`
            return whole.reshape(*values.shape[:-3], -1) if every else whole[..., valid]

        table = RowTable(
            np.argwhere(valid),
            flat(self.sequences[:, :, None]),
            flat(self.microbatches[:, :, None]),
            flat(last),
            flat(self._pipeline_seconds(passes)),
            RankRows(
                {which: flat(ranks.lasting[which]) for which in PASSES},
                {which: {name: flat(x) for name, x in ranks.busy[which].items()} for which in PASSES},
                *(flat(getattr(ranks, name)) for name in PER_ROW),
            ),
        )
        return self._split(table, np.count_nonzero(valid, axis=(1, 2)))

    def _split(self, table: RowTable, rows_of_layer: Array) -> list[RowTable]:
        """The rows of each group, with its layer choices numbered from 0."""
        import numpy as np

        if len(self.groups) == 1:
            return [table]
        stops = np.cumsum(rows_of_layer)
        tables, layer, start = [], 0, 0
        for group in self.groups:
            last = layer + len(group.layers)
            stop = int(stops[last - 1])
            tables.append(table.part(slice(start, stop), layer))
            layer, start = last, stop
        return tables

    # -- sums over the parts of a rank ---------------------------------------------------------------

    def _recomputed_share(self) -> Array:
        """Share of a rank's layers that each recompute choice recomputes in full: kind × recompute."""
        import numpy as np

        layers = np.maximum(1.0, self.counts[:, 0] + self.counts[:, 1])
        wanted = np.zeros(len(self.modes))
        for r, choice in enumerate(self.group.recomputes):
            if choice.recompute == "full":
                wanted[r] = np.inf if choice.recompute_layers is None else choice.recompute_layers
        share: Array = np.minimum(1.0, wanted / layers[:, None])
        return share

    def _some_stay_whole(self) -> Array:
        """As `some_layers_stay_whole`: kind × 1 × schedule × recompute."""
        import numpy as np

        layers = (self.counts[:, 0] + self.counts[:, 1])[:, None, None]
        wanted = [
            np.inf if one.recompute != "full" or one.recompute_layers is None else one.recompute_layers
            for one in self.group.recomputes
        ]
        stay: Array = np.array(wanted) <= layers - np.array(self.chunks)[:, None]
        return stay[:, None]

    def _mixed(self, values: Array) -> Array:
        """Figure × layer × part × mode → figure × kind × layer × 1 × recompute."""
        counts, values = self.counts[:, :, None, None], values[:, None]
        rank = counts[:, 0] * values[:, :, :, 0] + counts[:, 1] * values[:, :, :, 1]
        rank = rank + counts[:, 2] * values[:, :, :, 2] + counts[:, 3] * values[:, :, :, 3]
        none, selective, full = (rank[..., None, None, mode] for mode in range(len(MODES)))
        share = self.share[:, None, None, :]
        named = self.modes == MODES.index("selective")
        mixed: Array = (1 - share) * (~named * none + named * selective) + share * full
        return mixed

    def _ranks(self) -> tuple[Passes, RankRows]:
        import numpy as np

        figures = self._mixed(self.stack.figures)
        call = self.book.stage_call_seconds * np.array(self.chunks, dtype=float)[:, None]
        compute = Passes(figures[FORWARD] + call, figures[INPUT_GRADIENT] + call, figures[WEIGHT_GRADIENT])
        windows = ComputeWindows(
            self.m * compute.forward,
            self.m * (compute.input_gradient + compute.weight_gradient),
            self.m * figures[ATTENTION_FORWARD],
            self.m * figures[ATTENTION_BACKWARD],
        )
        transfers = [self._transfer(figures, number) for number in range(len(self.stack.keys))]
        hidden = hidden_in_layers(transfers, windows)
        passes = passes_with_exposed(compute, transfers, hidden, self.m)
        lasting: dict[Pass, Any] = {which: windows.seconds(which) for which in PASSES}
        busy: dict[Pass, dict[str, Any]] = {which: {} for which in PASSES}
        for transfer, under in zip(transfers, hidden):
            which = transfer.in_pass
            lasting[which] = lasting[which] + (transfer.seconds - under)
            for name, seconds in transfer.link_seconds.items():
                busy[which][name] = busy[which].get(name, 0.0) + seconds
        return passes, self._rank_rows(figures[SAVED], lasting, busy)

    def _transfer(self, figures: Array, number: int) -> Transfer:
        """A line of all layer choices."""
        import numpy as np

        key, width = self.stack.keys[number], self.book.line_width
        start = SAVED + 1 + number * width
        seconds, unhideable, repeated, *on_links = figures[start : start + width]
        whole = np.where(seconds > 0, seconds, 1.0)
        return Transfer(
            key.in_pass,
            self.m * seconds,
            {name: self.m * one for name, one in zip(self.book.links, on_links) if one.any()},
            key.window,
            hideable=1 - unhideable / whole,
            units_taken=self.stack.units_taken[number][:, None, None],
            repeated=repeated / whole,
        )

    # -- memory --------------------------------------------------------------------------------------

    def _rank_rows(self, saved_figures: Array, lasting: Any, busy: Any) -> RankRows:
        import numpy as np

        head = self.counts[:, 3, None, None, None] * self.stack.figures[SAVED, :, 3, 0][:, None, None]
        layers = saved_figures - head
        in_flight = microbatches_in_flight(self.group, self.microbatches)
        all_heads = np.array([schedule_record(one.schedule).forwards_first for one in self.group.schedules])[:, None]
        heads = head * np.where(all_heads, in_flight, 1.0)
        saved = layers * in_flight + heads
        once = [self._once_seconds(contents) for contents in self.group.ranks]
        moments = moments_of(self.book.stack_flags)
        # Of a loss there is none on ranks without a head, and its inputs are gone in a layer of its microbatch.
        kept = np.stack([saved - head if moment == "layer" else saved for moment in moments])
        back = self._brought_back()
        late = back * self._some_stay_whole()
        other = np.stack([self._passing(moment, back - late) for moment in moments])
        alone = (self.m <= in_flight).astype(float)
        pp, names = self.group.base.pp, [one.schedule for one in self.group.schedules]
        in_turn = np.stack([reduces_in_turn(pp, name, self.m[:, s]) for s, name in enumerate(names)], axis=1)
        before = ((self.m > 1) & ~all_heads).astype(float)[None]
        once_seconds = np.array(once)[:, :, None, None]
        return RankRows(
            lasting,
            busy,
            once_seconds,
            kept[-1] / in_flight,
            kept,
            other,
            in_flight,
            alone,
            in_turn.astype(float)[None] + 0 * alone,
            before + 0 * alone,
            late,
        )

    def _once_seconds(self, contents: RankContents) -> list[float]:
        """By layer choice."""
        seconds = []
        for group in self.groups:
            plain = {layer.sequence_parallel for layer in group.layers}
            of_plain = {sp: self.book.once_seconds(group, contents, sp) for sp in plain}
            seconds += [of_plain[layer.sequence_parallel] for layer in group.layers]
        return seconds

    def _passing(self, moment: Moment, back: Array) -> Array:
        """What such ranks hold for a moment, a recomputed layer included: like ``back``."""
        import numpy as np

        fixed = [
            [parts.transient_bytes[moment, kinds_of(one), bool(one.has_head)] for parts in self.parts]
            for one in self.group.ranks
        ]
        passing: Array = np.array(fixed)[:, :, None, None] + (np.zeros_like(back) if moment == "loss" else back)
        if moment == "loss":
            passing[[not one.has_head for one in self.group.ranks]] = -np.inf
        return passing

    def _brought_back(self) -> Array:
        """Bytes that recompute brings back while one layer runs its backward pass: kind × layer × 1 × recompute."""
        import numpy as np

        saved = self.stack.figures[SAVED, :, :2]
        back = saved[:, :, :1] - saved  # layer × part × mode
        none = np.array([choice.recompute_layers == 0 for choice in self.group.recomputes])
        chosen = np.where(none, 0.0, back[:, :, self.modes])
        present = (self.counts[:, :2] > 0)[:, None, :, None]
        most: Array = (present * chosen).max(axis=2)[:, :, None, :]
        return most

    # -- the pipeline --------------------------------------------------------------------------------

    def _pipeline_seconds(self, passes: Passes) -> Array:
        """All microbatches through the slowest rank, and the schedule's idle time over the others."""
        import numpy as np

        group, pp = self.group, self.group.base.pp
        each = (passes.forward, passes.input_gradient, passes.weight_gradient)
        slowest, others = slowest_and_others([Passes(*kind) for kind in zip(*each)], group.counts)
        seconds = np.broadcast_to(self.m * slowest.total, self.shape).copy()
        if pp == 1:
            return seconds
        messages = np.array([self.book.message_seconds(*one) for one in self.layers])[:, None]
        mean = [np.broadcast_to(x, self.shape) for x in (others.forward, others.input_gradient, others.weight_gradient)]
        for s, (one, chunks) in enumerate(zip(group.schedules, self.chunks)):
            m = self.microbatches[:, s, None]
            seconds[:, s] += pipeline_bubble(one.schedule, pp, m, chunks, Passes(*(x[:, s] for x in mean)), messages)
        return seconds


def _part_counts(contents: RankContents) -> tuple[int, int, int, int]:
    """How many of each part (`parts.PROBES`) a rank holds."""
    return contents.dense_layers, contents.moe_layers, int(contents.has_embedding), int(contents.has_head)
