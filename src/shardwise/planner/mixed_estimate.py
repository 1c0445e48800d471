"""About how long a strategy takes on a mixed cluster, before its layers are placed: in what order to look at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.pipeline import bubble_seconds as idle_seconds
from shardwise.planner.mixed_space import MixedSpace
from shardwise.planner.mixed_step import Arrangement
from shardwise.planner.pieces import NOTHING, Pieces, pieces_of
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import PLAIN
from shardwise.spec.strategy import Strategy

_BETTER = 0.99  # states are divided further only for a gain


@dataclass(frozen=True)
class Estimated:
    """An arrangement, its pieces as each kind times them, and a floor of its time per token."""

    arrangement: Arrangement
    pieces: dict[int, Pieces]
    seconds_per_token: float


def estimated(space: MixedSpace) -> Iterator[Estimated]:
    """Every arrangement with as little sharding as its memory asks for; what cannot fit is left out."""
    known = _Known()
    for arrangement in space.arrangements():
        best = float("inf")
        for zero, keep in space.shardings(arrangement.strategy):
            sharded = arrangement.with_strategy(zero=zero, keep_parameters=keep)
            most = _most_layers(space, sharded, known.held(sharded))
            if sum(most.values()) < sharded.job.model.layers or not space.supported(sharded):
                continue
            timed = known.timed(sharded)
            seconds = _floor_seconds(sharded, timed, most) if timed else float("inf")
            if seconds < _BETTER * best:
                best = seconds
                yield Estimated(sharded, timed, seconds / sharded.job.tokens_per_step)


@dataclass
class _Known:
    """Pieces that many arrangements share: bytes whatever the schedule, seconds whatever the sharding."""

    bytes: dict[Strategy, Pieces] = field(default_factory=dict)
    seconds: dict[Strategy, dict[int, Pieces]] = field(default_factory=dict)
    ends: dict[Any, Pieces] = field(default_factory=dict)

    def held(self, arrangement: Arrangement) -> Pieces:
        """The pieces with their bytes, which are the same on all kinds."""
        alike = _alike(arrangement)
        if alike.strategy not in self.bytes:
            untimed = Pieces(NOTHING, (NOTHING,) * alike.job.model.layers, NOTHING)
            self.bytes[alike.strategy] = pieces_of(alike.job, untimed)
        return self.bytes[alike.strategy]

    def timed(self, arrangement: Arrangement) -> dict[int, Pieces]:
        """The pieces with their seconds on every kind; empty if the degrees have no place on a kind's network."""
        alike = _alike(arrangement, zero=0, keep_parameters=False)
        if alike.strategy not in self.seconds:
            try:
                self.seconds[alike.strategy] = {kind: self._timed(alike, kind) for kind in arrangement.kinds}
            except SpecError:
                self.seconds[alike.strategy] = {}
        return self.seconds[alike.strategy]

    def _timed(self, alike: Arrangement, kind: int) -> Pieces:
        strategy, prediction = alike.strategy, alike.job.model.mtp_layers
        # Prediction modules beside the head have layers; without them the ends know of no expert and no recompute.
        key = (strategy if prediction else strategy.unchecked(ep=1, recompute="none", overlap=None), kind)
        found = pieces_of(alike.joined(kind), timed_ends=self.ends.get(key))
        self.ends.setdefault(key, found)
        return found


def _alike(arrangement: Arrangement, **changes: Any) -> Arrangement:
    return arrangement.with_strategy(schedule=PLAIN, interleave=1, **changes)


def _most_layers(space: MixedSpace, arrangement: Arrangement, pieces: Pieces) -> dict[int, float]:
    """Layers that each kind has room for if nothing but them, the ends and the allowance fills its memory."""
    layer, most = pieces.mean_layer, {}
    for kind in arrangement.kinds:
        ranks = arrangement.ranks_of(kind)
        room = space.request.capacity_bytes(kind) - arrangement.mixed.kinds[kind].device.framework_memory
        held = (layer.bytes + microbatches_in_flight(arrangement.job, rank) * layer.activation_bytes for rank in ranks)
        ends = (0 in ranks) * pieces.embedding.bytes + (arrangement.head_rank in ranks) * pieces.head.bytes
        most[kind] = max(0.0, sum(room / each for each in held) - ends / layer.bytes)
    return most


def _floor_seconds(arrangement: Arrangement, pieces: dict[int, Pieces], most: dict[int, float]) -> float:
    """All microbatches through a stage of the best balance, with layers divisible, and the schedule's idle time."""
    job, strategy = arrangement.job, arrangement.strategy
    layer = {kind: own.mean_layer.seconds for kind, own in pieces.items()}
    ranks = {kind: len(arrangement.ranks_of(kind)) for kind in pieces}
    ends = dict.fromkeys(pieces, 0.0)
    ends[arrangement.kinds[0]] += pieces[arrangement.kinds[0]].embedding.seconds
    last = arrangement.kind_of_rank[arrangement.head_rank]
    ends[last] += pieces[last].head.seconds
    left, free, counts = float(job.model.layers), set(pieces), dict(most)
    while True:
        work = left + sum(ends[kind] / layer[kind] for kind in free)
        stage = work / sum(ranks[kind] / layer[kind] for kind in free)
        wanted = {kind: (stage * ranks[kind] - ends[kind]) / layer[kind] for kind in free}
        full = {kind for kind in free if most[kind] < wanted[kind]}
        if not full or full == free:
            break
        left -= sum(most[kind] for kind in full)
        free -= full
    counts.update(wanted)
    busy = sum(counts[kind] * layer[kind] + ends[kind] for kind in pieces)
    m, chunks = job.microbatches, strategy.chunks_per_rank
    part = busy / strategy.pp / chunks / 3  # one of three passes of one chunk
    return m * stage + float(idle_seconds(strategy.schedule, strategy.pp, m, chunks, part, part, part))
