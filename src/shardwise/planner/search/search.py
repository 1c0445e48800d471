"""The search: prices every strategy of a space and keeps the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from shardwise.cost.memory.room import room_of
from shardwise.cost.sweep.columns import Group
from shardwise.cost.sweep.price import TableBlock, TablePiece, TablePricer
from shardwise.planner.candidate import Degrees, degrees_of
from shardwise.planner.request import Deadline
from shardwise.planner.search.space import Space
from shardwise.planner.search.supported import Mask, Supported
from shardwise.spec.strategy import Offload, Strategy
from shardwise.uncertainty.residuals import noise_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

KEPT = 100
MEMORY_STEPS = 64  # the front of time against memory has a point for each
GROUPS_AT_ONCE = 512
TIGHT = 3  # layouts that are kept although they may run out of memory


@dataclass(frozen=True)
class PricedStrategy:
    """One strategy of the space as the tables price it."""

    seconds_per_sequence: float
    step_seconds: float
    memory_bytes: float
    host_bytes: float
    block: TableBlock
    column: int
    row: int
    offload: Offload

    @property
    def sequences(self) -> int:
        return int(self.block.rows.sequences[self.row])

    def strategy(self) -> Strategy:
        return self.block.strategy(self.column, self.row, self.offload)


@dataclass
class Search:
    """The result of a search: how many strategies it priced, and the best of them."""

    priced: int = 0
    """The memory of all; the time of those whose pipeline alone is faster than what is kept."""
    excluded: int = 0  # ruled out by the user
    unsupported: int = 0  # not run by our engine
    too_large: int = 0  # too large for a device
    seconds: float = 0.0
    was_stopped: bool = False  # whether part of the space was not searched
    best: list[PricedStrategy] = field(default_factory=list)  # strategies that run and fit, fastest first
    of_degrees: dict[Degrees, PricedStrategy] = field(default_factory=dict)  # the best of every layout
    front: list[PricedStrategy] = field(default_factory=list)
    """The best at every step of memory, as far as more memory gains time."""
    best_not_run: PricedStrategy | None = None  # the fastest that fits, but is priced only
    tight: dict[Degrees, PricedStrategy] = field(default_factory=dict)
    """Faster than all that fit, but they may run out of memory."""
    least_memory: PricedStrategy | None = None  # the strategy that runs and needs the least memory
    least_of_degrees: dict[Degrees, float] = field(default_factory=dict)
    """The least bytes that any strategy of a layout needs."""

    @property
    def wanted(self) -> int:
        return self.priced - self.excluded

    @property
    def fitting(self) -> int:
        return self.wanted - self.unsupported - self.too_large


def search(
    space: Space,
    *,
    beyond: Space | None = None,
    memory_bytes: float | None = None,
    tight_bytes: float = 0.0,
    any_priced: bool = False,
    kept: int = KEPT,
    progress: Callable[[int], None] | None = None,
    deadline: Deadline | None = None,
) -> Search:
    """Prices every strategy of ``space`` and keeps the ``kept`` best that run and fit in ``memory_bytes``.

    It also keeps a few faster ones that fit only in ``tight_bytes``. At the ``deadline`` it stops with what it has.
    ``beyond`` is the same space with ways to offload. It is searched last, and only in layouts that are too large
    without offload but would then be faster, by more than noise, than everything that fits.
    """
    deadline = deadline or Deadline(None)
    cluster = space.job.cluster
    capacity = room_of(space.job).planned_bytes if memory_bytes is None else memory_bytes
    keeper = _Keeper(Search(), capacity, tight_bytes, cluster.host_memory_per_device, kept, beyond is not None)
    pricer, supported = TablePricer(space.job), Supported(space.job, any_priced=any_priced)
    priced = Supported(space.job, any_priced=True)
    excluded = [Mask(entry, idle=False) for entry in space.constraints.excluded if len(entry) > 1]
    for groups in _batches(deadline, space, beyond, keeper):
        for piece in deadline.until(pricer.pieces(groups, keeper.wanted)):
            allowed, left_out = supported.allowed(piece), _excluded(piece, excluded)
            if allowed is not None and not any_priced:
                keeper.take_not_run(piece, allowed, priced, left_out)
            keeper.take(piece, allowed, left_out)
            if progress is not None:
                progress(keeper.result.priced)
    keeper.result.seconds, keeper.result.was_stopped = deadline.spent_seconds, deadline.was_hit
    return keeper.finished()


def _batches(deadline: Deadline, space: Space, beyond: Space | None, keeper: _Keeper) -> Iterator[list[Group]]:
    """The groups of a space, then those ``beyond`` it that can gain, which are all of them if nothing fits so far."""
    every = deadline.until(space.groups())
    while groups := list(islice(every, GROUPS_AT_ONCE)):
        yield groups
    if beyond is None:
        return
    keeper.leads_on = False
    if keeper.result.best:
        keeper.wanted = _Gains(keeper, keeper.fastest, 1 + noise_of(space.job).share)
    every = deadline.until(_that_can_gain(beyond, keeper))
    while groups := list(islice(every, GROUPS_AT_ONCE)):
        yield groups


def _that_can_gain(beyond: Space, keeper: _Keeper) -> Iterator[Group]:
    for group in beyond.groups():
        too_large = keeper.too_large.get(degrees_of(group.base), float("inf"))
        if keeper.wanted is None or too_large < keeper.wanted.limit:
            yield replace(group, offloads=tuple(offload for offload in group.offloads if offload.any))


@dataclass(frozen=True)
class _Gains:
    """What offload has to achieve: fit, beat the search without it by more than noise, and be within noise of the
    fastest so far."""

    keeper: _Keeper
    first: float  # seconds of a sequence: the fastest without offload
    noise: float  # a factor, such as 1.02

    @property
    def limit(self) -> float:
        return min(self.first / self.noise, self.keeper.fastest * self.noise)

    def is_fast(self, seconds_per_sequence: Array) -> Array:
        return seconds_per_sequence < self.limit

    def fits(self, memory_bytes: Array, host_bytes: Any) -> Array:
        fits: Array = (memory_bytes <= self.keeper.capacity) & (host_bytes <= self.keeper.host)
        return fits


def _excluded(piece: TablePiece, masks: list[Mask]) -> Array | None:
    """The cells that some mask leaves out; None if none does."""
    excluded: Array | None = None
    for mask in masks:
        cells = mask.cells(piece)
        if cells is not None:
            excluded = cells if excluded is None else excluded | cells
    return excluded


@dataclass(frozen=True)
class _Layouts:
    """The layouts of a piece, whose rows are contiguous."""

    starts: Array
    lengths: Array
    degrees: list[Degrees]

    @classmethod
    def of(cls, piece: TablePiece) -> _Layouts:
        import numpy as np

        starts = np.flatnonzero(np.diff(piece.block_of_row, prepend=-1))
        degrees = [degrees_of(piece.blocks[block].group.base) for block in piece.block_of_row[starts].tolist()]
        return cls(starts, np.diff(starts, append=len(piece.block_of_row)), degrees)

    def by_row(self, figure: Callable[[Degrees], float]) -> Array:
        import numpy as np

        return np.repeat([figure(degrees) for degrees in self.degrees], self.lengths)

    def least(self, of_row: Array) -> Iterator[tuple[Degrees, float]]:
        """Each layout with the least figure of its rows."""
        import numpy as np

        return zip(self.degrees, np.minimum.reduceat(of_row, self.starts).tolist())


@dataclass(frozen=True)
class _TimedRows:
    """Some rows of a piece with their time."""

    piece: TablePiece
    rows: Array
    step_seconds: Array  # column × row
    seconds: Array  # of a sequence: column × row

    @classmethod
    def of(cls, piece: TablePiece, rows: Array) -> _TimedRows:
        step_seconds = piece.step_seconds(rows)
        return cls(piece, rows, step_seconds, step_seconds / piece.sequences[rows])

    def found(self, flat: int) -> PricedStrategy:
        """The strategy of one cell by its flat number."""
        piece, (column, place) = self.piece, divmod(flat, len(self.rows))
        row = int(self.rows[place])
        return PricedStrategy(
            float(self.seconds[column, place]),
            float(self.step_seconds[column, place]),
            float(piece.memory_bytes[column, row]),
            float(piece.host_bytes[column, row]) if piece.offload.any else 0.0,
            piece.blocks[int(piece.block_of_row[row])],
            column,
            int(piece.row_numbers[row]),
            piece.offload,
        )


def _bound(piece: TablePiece) -> Array:
    """Seconds of a sequence, per row, that no column of it is faster than."""
    bound: Array = piece.pipeline_seconds / piece.sequences
    return bound


def _with_any(rows: Array, cells: Array) -> tuple[Array, Array]:
    """Of ``rows`` and their cells those rows that have any."""
    import numpy as np

    some = cells.any(axis=0)
    return (rows, cells) if some.all() else (rows[some], cells[:, np.flatnonzero(some)])


class _Keeper:
    """The best of all pieces so far."""

    def __init__(
        self, result: Search, capacity: float, tight: float, host: float, kept: int, leads_on: bool = False
    ) -> None:
        import numpy as np

        self.result, self.capacity, self.tight, self.host, self.kept = result, capacity, tight, host, kept
        self.fastest = np.inf  # of those that fit
        self.leads_on = leads_on  # whether a search with offload follows, which reads `too_large`
        self.too_large: dict[Degrees, float] = {}  # seconds of a sequence: the fastest of each layout that does not fit
        self.wanted: _Gains | None = None
        self.threshold = np.inf
        self.front_seconds = np.full(MEMORY_STEPS, np.inf)
        self.front: list[PricedStrategy | None] = [None] * MEMORY_STEPS
        self.least = np.inf

    def take_not_run(self, piece: TablePiece, allowed: Array, priced: Supported, excluded: Array | None) -> None:
        """Keeps the fastest cell that fits and is priced but not run."""
        import numpy as np

        known = self.result.best_not_run
        bound = np.inf if known is None else known.seconds_per_sequence
        rows = np.flatnonzero((_bound(piece) < bound) & ((piece.memory_bytes <= self.capacity) & ~allowed).any(axis=0))
        if not len(rows):
            return
        wanted = ~allowed[:, rows]
        for mask in (priced.allowed(piece), None if excluded is None else ~excluded, self._fits(piece)):
            if mask is not None:
                wanted &= mask[:, rows]
        rows, wanted = _with_any(rows, wanted)
        if not len(rows):
            return
        timed = _TimedRows.of(piece, rows)
        score = np.where(wanted, timed.seconds, np.inf)
        flat = int(score.argmin())
        if score.flat[flat] < bound:
            self.result.best_not_run = timed.found(flat)

    def _fits(self, piece: TablePiece) -> Array:
        import numpy as np

        fits: Array = piece.memory_bytes <= self.capacity
        if piece.offload.any and np.isfinite(self.host):
            fits &= piece.host_bytes <= self.host
        return fits

    def take(self, piece: TablePiece, allowed: Array | None, excluded: Array | None) -> None:
        """Counts the cells of a piece and keeps the best; None for ``allowed`` and ``excluded`` is all and none.

        Only the rows are timed that may be better than what is kept, as far as their pipelines alone tell.
        """
        import numpy as np

        result = self.result
        result.priced += piece.memory_bytes.size
        fits = self._fits(piece)
        memory = piece.memory_bytes
        if excluded is not None:
            out = int(np.count_nonzero(excluded))
            result.excluded += out
            result.unsupported -= out
            allowed = ~excluded if allowed is None else allowed & ~excluded
        if allowed is not None:
            result.unsupported += int(allowed.size - np.count_nonzero(allowed))
            result.too_large += int(np.count_nonzero(allowed & ~fits))
            fits &= allowed
            memory = np.where(allowed, memory, np.inf)
        else:
            result.too_large += int(fits.size - np.count_nonzero(fits))
        layouts, least_of_row = _Layouts.of(piece), memory.min(axis=0)
        if self.wanted is None:
            self._least_memory(piece, memory, least_of_row, layouts)
        bound = _bound(piece)
        has_tight = self.tight > self.capacity and not piece.offload.any
        if has_tight:
            self._tight(piece, memory, bound < self.fastest)
        if self.leads_on:
            self._too_large(piece, (memory < np.inf) & ~fits, bound, layouts)
        most = np.maximum(self._front_bounds(least_of_row), layouts.by_row(self._known_of))
        rows = np.flatnonzero((least_of_row <= self.capacity) & (bound < np.maximum(most, self.threshold)))
        rows, fits = _with_any(rows, fits[:, rows])
        if not len(rows):
            return
        timed = _TimedRows.of(piece, rows)
        if self.wanted is not None:
            fits &= self.wanted.is_fast(timed.seconds)
        score = np.where(fits, timed.seconds, np.inf)
        self._best(timed, score)
        self._of_degrees(timed, score)
        self._front(timed, score)

    def _known_of(self, degrees: Degrees) -> float:
        """Seconds of a sequence: the best of a layout so far."""
        known = self.result.of_degrees.get(degrees)
        return float("inf") if known is None else known.seconds_per_sequence

    def _least_memory(self, piece: TablePiece, memory: Array, of_row: Array, layouts: _Layouts) -> None:
        import numpy as np

        least = self.result.least_of_degrees
        for key, held in layouts.least(of_row):
            if held < least.get(key, np.inf):
                least[key] = held
        if of_row.min() < self.least:
            column, row = divmod(int(memory.argmin()), len(of_row))
            self.least = float(memory[column, row])
            self.result.least_memory = _TimedRows.of(piece, np.array([row])).found(column)

    def _too_large(self, piece: TablePiece, cells: Array, bound: Array, layouts: _Layouts) -> None:
        """Keeps the time of the fastest of ``cells``, which do not fit, in every layout, if nothing faster fits."""
        import numpy as np

        known = layouts.by_row(lambda degrees: self.too_large.get(degrees, np.inf))
        rows = np.flatnonzero(bound < np.minimum(known, self.fastest))
        rows, cells = _with_any(rows, cells[:, rows])
        if not len(rows):
            return
        of_row = np.full(len(bound), np.inf)
        of_row[rows] = np.where(cells, _TimedRows.of(piece, rows).seconds, np.inf).min(axis=0)
        for key, seconds in layouts.least(of_row):
            if seconds < self.too_large.get(key, np.inf):
                self.too_large[key] = seconds

    def _tight(self, piece: TablePiece, memory: Array, fast: Array) -> None:
        """Keeps the fastest cell that fits without the margin only, of rows that may be ``fast``."""
        import numpy as np

        rows = np.flatnonzero(fast)
        held = memory[:, rows]
        rows, cells = _with_any(rows, (held > self.capacity) & (held <= self.tight))
        if not len(rows):
            return
        timed = _TimedRows.of(piece, rows)
        score = np.where(cells, timed.seconds, np.inf)
        flat = int(score.argmin())
        if score.flat[flat] < self.fastest:
            tight = timed.found(flat)
            key = degrees_of(tight.block.group.base)
            known = self.result.tight.get(key)
            if known is None or tight.seconds_per_sequence < known.seconds_per_sequence:
                self.result.tight[key] = tight

    def _best(self, timed: _TimedRows, score: Array) -> None:
        import numpy as np

        better = np.flatnonzero(score < self.threshold)
        if not len(better):
            return
        if len(better) > self.kept:
            better = better[np.argpartition(score.flat[better], self.kept)[: self.kept]]
        best = [*self.result.best, *(timed.found(flat) for flat in better.tolist())]
        best.sort(key=lambda priced: priced.seconds_per_sequence)
        self.result.best = best[: self.kept]
        self.fastest = best[0].seconds_per_sequence
        if len(self.result.best) == self.kept:
            self.threshold = self.result.best[-1].seconds_per_sequence

    def _of_degrees(self, timed: _TimedRows, score: Array) -> None:
        """Keeps the best cell of every layout."""
        import numpy as np

        piece, of_row = timed.piece, score.min(axis=0)
        blocks = piece.block_of_row[timed.rows]
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        stops = [*starts[1:].tolist(), len(of_row)]
        least = np.minimum.reduceat(of_row, starts).tolist()
        for block, start, stop, seconds in zip(blocks[starts].tolist(), starts.tolist(), stops, least):
            key = degrees_of(piece.blocks[block].group.base)
            if seconds < self._known_of(key):
                place = start + int(of_row[start:stop].argmin())
                flat = int(score[:, place].argmin()) * len(of_row) + place
                self.result.of_degrees[key] = timed.found(flat)

    # -- the front: a point for each step of memory, unless one with less memory is as fast ------------------------

    def _steps(self, memory_bytes: Array) -> Array:
        import numpy as np

        steps = np.minimum(memory_bytes * (MEMORY_STEPS / self.capacity), MEMORY_STEPS - 1)
        return steps.astype(np.uint8)

    def _front_bounds(self, memory_bytes: Array) -> Array:
        """What the time of a point with so much memory has to be less than."""
        import numpy as np

        bounds: Array = np.minimum.accumulate(self.front_seconds)[self._steps(memory_bytes)]
        return bounds

    def _front(self, timed: _TimedRows, score: Array) -> None:
        """Keeps the best cell at every step of memory."""
        import numpy as np

        memory = timed.piece.memory_bytes[:, timed.rows]
        flat = np.flatnonzero(score < self._front_bounds(memory))
        if not len(flat):
            return
        order = flat[np.argsort(score.flat[flat], kind="stable")]
        for step, place in zip(*np.unique(self._steps(memory.flat[order]), return_index=True)):
            best = timed.found(int(order[place]))
            self.front[int(step)] = best
            self.front_seconds[int(step)] = best.seconds_per_sequence

    def finished(self) -> Search:
        """The result, with the front reduced to the Pareto-optimal strategies."""
        points = sorted((point for point in self.front if point is not None), key=lambda point: point.memory_bytes)
        front: list[PricedStrategy] = []
        for point in points:
            if not front or point.seconds_per_sequence < front[-1].seconds_per_sequence:
                front.append(point)
        self.result.front = front
        tight = sorted(self.result.tight.items(), key=lambda item: item[1].seconds_per_sequence)
        self.result.tight = {key: priced for key, priced in tight[:TIGHT] if priced.seconds_per_sequence < self.fastest}
        return self.result
