"""Strategies on several kinds of nodes, and the step of one: each rank priced on its kind, all simulated together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, permutations, product
from typing import Any

from shardwise.cost.memory.device import DeviceMemory, memory_of_rank
from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.cost.step.prediction import RankPrediction, predict
from shardwise.cost.step.simulation import rank_predictions
from shardwise.layout.stages import stages_of_rank
from shardwise.layout.views import held_by, replicas_by_kind
from shardwise.pipeline import bubble_seconds as idle_seconds
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.constraints import OFFLOADS, field_value, shown_value
from shardwise.planner.request import Request
from shardwise.planner.search.space import (
    MOST_MICROBATCH_TOKENS,
    expert_choices,
    model_divides,
    plain_strategy,
    schedule_choices,
)
from shardwise.planner.search.stages import NOTHING, Pieces, pieces_of
from shardwise.planner.search.supported import findings_of
from shardwise.spec.clusters import MixedCluster
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.kinds import across_kinds
from shardwise.spec.rules import divisors, stage_layer_counts
from shardwise.spec.schedules import PLAIN, searched_schedules
from shardwise.spec.strategy import DIMENSIONS, Strategy


@dataclass(frozen=True)
class Arrangement:
    """A strategy over all kinds: the pipeline runs across them, every other dimension inside one kind."""

    mixed: MixedCluster
    kinds: tuple[int, ...]  # the kinds in the order of the pipeline ranks
    job: Job  # has the strategy of the whole pipeline; its cluster is not used

    @property
    def strategy(self) -> Strategy:
        return self.job.strategy

    def ranks_of(self, kind: int) -> range:
        first = sum(self._ranks(other) for other in self.kinds[: self.kinds.index(kind)])
        return range(first, first + self._ranks(kind))

    def _ranks(self, kind: int) -> int:
        return self.mixed.kinds[kind].devices * self.strategy.pp // self.strategy.world

    @cached_property
    def kind_of_rank(self) -> tuple[int, ...]:
        return tuple(kind for kind in self.kinds for _ in self.ranks_of(kind))

    @property
    def head_rank(self) -> int:
        """The rank with the last stage; folded schedules end on the first rank."""
        return 0 if self.strategy.schedule_record.ends_meet else self.strategy.pp - 1

    def on(self, kind: int) -> Job:
        """The whole pipeline as if all devices were of ``kind``, for the memory of a rank."""
        return self.job.unchecked(cluster=self.mixed.kinds[kind])

    def timing_job(self, kind: int) -> Job:
        """The stages of ``kind``, and as many beyond the network between kinds, for the time of a rank."""
        strategy = self.strategy.unchecked(pp=2 * self._ranks(kind))
        return self.job.unchecked(cluster=self.mixed.joined[kind], strategy=strategy)

    @property
    def ordered(self) -> MixedCluster:
        """The kinds in the order of the ranks."""
        return replace(self.mixed, kinds=tuple(self.mixed.kinds[kind] for kind in self.kinds))

    def whole_job(self) -> Job:
        """The job to run, checked, as a job file holds it."""
        return replace(self.unchecked_job(), strategy=replace(self.strategy))

    def unchecked_job(self) -> Job:
        """The same job without checks, to be priced only."""
        return self.job.unchecked(cluster=self.ordered.as_one)

    def with_strategy(self, **changes: object) -> Arrangement:
        return replace(self, job=self.job.unchecked(strategy=self.strategy.unchecked(**changes)))


@dataclass(frozen=True)
class KindPart:
    """One kind's part of a step."""

    kind: int
    cluster: Cluster
    strategy: Strategy
    ranks: range  # its pipeline ranks
    layers: tuple[int, ...]  # of each of its ranks
    memory: DeviceMemory  # of its fullest device
    idle_share: float  # of the pipeline's time
    batch_share: float = 1.0  # of the sequences that it sees


@dataclass(frozen=True)
class MixedStep:
    """A strategy on several kinds of nodes, priced as the job that runs it."""

    arrangement: Arrangement
    price: Candidate

    @property
    def job(self) -> Job:
        """The job to run, checked."""
        return self.arrangement.whole_job()

    @property
    def ranks(self) -> tuple[RankPrediction, ...]:
        """All pipeline ranks, each priced on its kind; if replicas are of different kinds, those of the slowest."""
        return tuple(rank_predictions(self.price.prediction))

    @property
    def step_seconds(self) -> float:
        return self.price.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.price.tokens_per_second

    @property
    def seconds_per_token(self) -> float:
        return self.price.seconds_per_token

    @property
    def mfu(self) -> float:
        """Model FLOPs against the peak of all devices of all kinds."""
        return self.price.mfu

    @cached_property
    def parts(self) -> tuple[KindPart, ...]:
        """What each kind does, in the order of the ranks."""
        return tuple(self._part(place) for place in range(len(self.arrangement.kinds)))

    def _part(self, place: int) -> KindPart:
        job, across = self.price.job, across_kinds(self.arrangement.ordered, self.price.job.strategy)
        members, counts = across.members(place), stage_layer_counts(job.model, job.strategy)
        ranks = range(members[0], members[-1] + 1) if across.dimension == "pp" else range(job.strategy.pp)
        layers = tuple(sum(counts[stage] for stage in stages_of_rank(job, rank)) for rank in ranks)
        kind, share = self.arrangement.kinds[place], 1.0
        if across.dimension == "dp":
            share = sum(len(job.rows_of(member)) for member in members) / job.sequences
        own = sorted(stage for rank in ranks for stage in stages_of_rank(job, rank))
        changes: dict[str, object] = {"pp": len(ranks), "stage_layers": tuple(counts[stage] for stage in own)}
        if across.dimension == "dp":
            changes |= {"dp": len(members), "dp_shares": None}
        return KindPart(
            kind, self.arrangement.mixed.kinds[kind], job.of_stage(ranks[0]).strategy.unchecked(**changes), ranks,
            layers, self.memory(kind), self._idle(place, ranks), share,
        )  # fmt: skip

    def memory(self, kind: int) -> DeviceMemory:
        """The fullest device of a kind."""
        job, place = self.price.job, self.arrangement.kinds.index(kind)
        across = across_kinds(self.arrangement.ordered, job.strategy)
        if across.dimension == "pp":
            memories = [memory_of_rank(job, rank) for rank in across.members(place)]
        else:
            memories = [memory_of_rank(held_by(job, rank)[place], rank) for rank in range(job.strategy.pp)]
        return max(memories, key=lambda memory: memory.total)

    def _idle(self, place: int, ranks: range) -> float:
        """The share of the pipeline's time in which devices of a kind wait."""
        replicas = replicas_by_kind(self.price.job)
        of_ranks = predict(replicas[place]).ranks if replicas else [self.ranks[rank] for rank in ranks]
        busy = sum(rank.microbatches * rank.microbatch_seconds for rank in of_ranks) / len(of_ranks)
        return max(0.0, 1 - busy / self.price.pipeline_seconds)


def mixed_step(arrangement: Arrangement) -> MixedStep:
    """Simulates an arrangement whose strategy specifies the layers of every stage."""
    return MixedStep(arrangement, candidate(arrangement.unchecked_job()))


# -- The strategies tried on a mixed cluster: the pipeline across the kinds, every other dimension inside one kind
# They are ordered by a lower bound of their time, computed before layers are placed.

INTERLEAVES = (2, 3, 4, 6)
MICROBATCHES = (1, 2, 4, 8)
FEWEST_CONTEXT_TOKENS = 8192  # a context-parallel rank keeps at least this much of a sequence
# Least sharding first, since a pipeline pays for more in every microbatch.
SHARDINGS = ((0, False), (1, False), (2, False), (3, True), (3, False))
# Fields that this search does not vary, and their values.
FIXED: dict[str, Any] = {
    "shard_group": None,
    "accumulate": "sharded",
    "offload": OFFLOADS["none"],
    "order": DIMENSIONS,
    "recompute_layers": None,
}


@dataclass(frozen=True, kw_only=True)
class MixedRequest(Request):
    """A request for a mixed cluster; the cluster of its ``job`` is not used."""

    mixed: MixedCluster

    @cached_property
    def capacities(self) -> tuple[float, ...]:
        """Predicted device memory that a plan may use, of each kind."""
        return tuple(self.on(kind).capacity_bytes for kind in self.mixed.kinds)

    def excludes(self, strategy: Strategy) -> bool:
        """Whether the user excluded a combination of values that the strategy has."""
        entries = self.constraints.excluded
        return any(all(field_value(strategy, name) in values for name, values in entry.items()) for entry in entries)


@dataclass(frozen=True)
class MixedSpace:
    """The strategies of a request, before it is decided for each how to shard states and where to place layers."""

    request: MixedRequest
    _verdicts: dict[Strategy, bool] = field(default_factory=dict, init=False, compare=False)
    _divides: dict[Any, bool] = field(default_factory=dict, init=False, compare=False)

    def check(self) -> None:
        """Raises SpecError if a field that is not varied is constrained to another value."""
        constraints = self.request.constraints
        for name, value in FIXED.items():
            if value not in constraints.candidates(name, (value,)):
                raise SpecError(name, "is not varied on a mixed cluster", f"leave it out: it is {shown_value(value)}")
        if constraints.names("stage_layers"):
            raise SpecError("stage_layers", "follow from the kinds on a mixed cluster", "leave it out")

    def arrangements(self) -> Iterator[Arrangement]:
        """Every strategy that divides, on every order of the kinds."""
        mixed = self.request.mixed
        distinct = dict.fromkeys(permutations(range(len(mixed.kinds))))
        orders = [order for order in distinct if not self._repeats(order)]
        for strategy in self._strategies():
            job = self._job(strategy)
            if job is not None:
                yield from (Arrangement(mixed, order, job) for order in orders)

    def _repeats(self, order: tuple[int, ...]) -> bool:
        """Whether an order only swaps equal kinds."""
        kinds = self.request.mixed.kinds
        return any(first > second and kinds[first] == kinds[second] for first, second in pairwise(order))

    def shardings(self, strategy: Strategy) -> list[tuple[int, bool]]:
        """Ways to shard the states, least sharded first: ZeRO stage, and whether gathered parameters are kept."""
        allowed = self.request.constraints.candidates
        zeros = allowed("zero", (1, 2, 3) if strategy.gradient_group > 1 else (0,))
        kept = allowed("keep_parameters", (False, True))
        return [(zero, keep) for zero, keep in SHARDINGS if zero in zeros and keep in kept]

    def supported(self, arrangement: Arrangement) -> bool:
        """Whether our engine runs the arrangement, and the user did not exclude it."""
        if self.request.excludes(arrangement.strategy):
            return False
        key = arrangement.strategy.unchecked(microbatch=1)
        if key not in self._verdicts:
            self._verdicts[key] = not findings_of(arrangement.job, any_priced=self.request.any_priced)
        return self._verdicts[key]

    def _strategies(self) -> Iterator[Strategy]:
        allowed, seq = self.request.constraints.candidates, self.request.job.training.seq
        for degrees in self._degrees():
            microbatches = [size for size in MICROBATCHES if size == 1 or size * seq <= MOST_MICROBATCH_TOKENS]
            choices = product(
                allowed("context_method", ("ring", "all-gather", "ulysses")) if degrees["cp"] > 1 else ("ring",),
                allowed("sequence_parallel", (True,)) if degrees["tp"] > 1 else (True,),
                allowed("microbatch", microbatches),
                allowed("recompute", ("none", "selective", "full")),
                self._schedules(degrees["pp"]),
            )
            for method, sp, microbatch, recompute, (schedule, interleave) in choices:
                yield self._plain.unchecked(
                    context_method=method,
                    sequence_parallel=sp,
                    microbatch=microbatch,
                    recompute=recompute,
                    schedule=schedule,
                    interleave=interleave,
                    **degrees,
                )

    def _degrees(self) -> Iterator[dict[str, Any]]:
        """Degrees whose stages, of tp·cp·dp devices, divide the devices of every kind."""
        mixed, job = self.request.mixed, self.request.job
        allowed = self.request.constraints.candidates
        inner = min(kind.levels[0].width for kind in mixed.kinds)
        for stage in divisors(math.gcd(*(kind.devices for kind in mixed.kinds))):
            pp = mixed.devices // stage
            if pp > job.model.layers or pp not in allowed("pp", (pp,)):
                continue
            for tp in allowed("tp", [degree for degree in divisors(stage) if degree <= inner]):
                most = max(1, job.training.seq // FEWEST_CONTEXT_TOKENS)
                for cp in allowed("cp", [degree for degree in divisors(stage) if degree <= most]):
                    dp = stage // (tp * cp)
                    if stage % (tp * cp) or dp not in allowed("dp", (dp,)):
                        continue
                    for ep, expert_tp in expert_choices(job.model, self.request.constraints, (1,), stage):
                        yield {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "expert_tp": expert_tp}

    def _schedules(self, pp: int) -> list[tuple[str, int]]:
        constraints, layers = self.request.constraints, self.request.job.model.layers
        # Left out: two copies, since the second of a stage would be on another kind; and all forwards first, which
        # holds too many activations.
        return [
            (record.name, interleave)
            for record, interleave, _ in schedule_choices(constraints, searched_schedules(), INTERLEAVES, pp, layers)
            if not (record.two_copies or record.forwards_first)
        ]

    @cached_property
    def _plain(self) -> Strategy:
        return plain_strategy(self.request.job)

    def _job(self, strategy: Strategy) -> Job | None:
        """The job of a strategy; None if the model or the batch does not divide."""
        job, minimum, multiple = self.request.job, self.request.minimum_batch, strategy.batch_multiple
        if not self._model_divides(strategy):
            return None
        sequences = job.training.sequences(multiple) if minimum is None else -(-minimum // multiple) * multiple
        if sequences % multiple:
            return None
        ours = job.stack.is_own and not self.request.offers_priced
        hides = strategy.ep > 1 and strategy.schedule_record.hides_exchange and not ours
        overlap = strategy.overlap.unchecked(ep=hides)
        training = job.training.unchecked(global_batch=sequences)
        return job.unchecked(strategy=strategy.unchecked(overlap=overlap), training=training)

    def _model_divides(self, strategy: Strategy) -> bool:
        key = (strategy.tp, strategy.cp, strategy.sequence_parallel, strategy.context_method)
        if key not in self._divides:
            self._divides[key] = model_divides(self.request.job, strategy)
        return self._divides[key]


_BETTER = 0.99  # more sharding has to reduce the bound to less than this share


@dataclass(frozen=True)
class Estimated:
    """An arrangement, its pieces as each kind times them, and a lower bound of its time per token."""

    arrangement: Arrangement
    pieces: dict[int, Pieces]
    seconds_per_token: float


def estimated(space: MixedSpace) -> Iterator[Estimated]:
    """Every arrangement that may fit, with the least sharding, and with more where that lowers the bound."""
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
    """Caches pieces: their bytes do not depend on the schedule, nor their seconds on the sharding."""

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
        # Without prediction modules beside the head, which have layers, the ends have no experts and no recompute.
        key = (strategy if prediction else strategy.unchecked(ep=1, recompute="none", overlap=None), kind)
        pieces = pieces_of(alike.timing_job(kind), timed_ends=self.ends.get(key))
        self.ends.setdefault(key, pieces)
        return pieces


def _alike(arrangement: Arrangement, **changes: Any) -> Arrangement:
    return arrangement.with_strategy(schedule=PLAIN, interleave=1, **changes)


def _most_layers(space: MixedSpace, arrangement: Arrangement, pieces: Pieces) -> dict[int, float]:
    """Layers that each kind has room for, beside nothing but the ends of the model and the framework's allowance."""
    layer, most = pieces.mean_layer, {}
    for kind in arrangement.kinds:
        ranks = arrangement.ranks_of(kind)
        room = space.request.capacities[kind] - arrangement.mixed.kinds[kind].device.framework_memory
        held = (layer.bytes + microbatches_in_flight(arrangement.job, rank) * layer.activation_bytes for rank in ranks)
        ends = (0 in ranks) * pieces.embedding.bytes + (arrangement.head_rank in ranks) * pieces.head.bytes
        most[kind] = max(0.0, sum(room / each for each in held) - ends / layer.bytes)
    return most


def _floor_seconds(arrangement: Arrangement, pieces: dict[int, Pieces], most: dict[int, float]) -> float:
    """A lower bound of a step: all microbatches through a perfectly balanced stage, and the schedule's idle time.

    Layers count as divisible.
    """
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
