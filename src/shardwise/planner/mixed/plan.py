"""A plan for a cluster of several kinds of nodes.

There are three ways to use the kinds together:

- A pipeline of stages of equal degrees, with layers by the speed and memory of each kind.
- Data parallelism across kinds: each kind runs the whole model, on as many microbatches as its speed allows.
- A pipeline of unlike stages, each with the degrees that suit its kind; no common number of devices is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from shardwise.cost.memory.device import device_memories, memory_of_rank
from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.cost.memory.room import room_of, tightest
from shardwise.cost.step.prediction import predict
from shardwise.layout.stages import stages_of_rank
from shardwise.layout.views import replicas_by_kind
from shardwise.pipeline import Place
from shardwise.planner.candidate import Candidate, candidate, complexity
from shardwise.planner.mixed.step import FIXED, Arrangement, MixedRequest, MixedSpace, MixedStep, estimated, mixed_step
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Deadline, Request
from shardwise.planner.search.space import plain_strategy
from shardwise.planner.search.stages import Pieces, divisions, pieces_of, room_for_pieces
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import divisors, stage_layer_counts
from shardwise.spec.schedules import PLAIN, schedule_record, searched_schedules
from shardwise.spec.strategy import Dimension, Strategy
from shardwise.spec.support import Status, verdict
from shardwise.spec.units import readable_bytes

_SIMULATED = 200_000  # passes that are simulated to improve one division
_MOST_TRIED = 48
_GAIN = 1e-4


def divided(request: MixedRequest, arrangement: Arrangement, pieces: dict[int, Pieces]) -> list[Arrangement]:
    """The arrangement with layers divided by the speed and memory of each kind, in every way that fits."""
    own = _in_first_kinds_seconds(arrangement, pieces)
    speeds = _speeds(arrangement, pieces)
    places = []
    for rank, kind in enumerate(arrangement.kind_of_rank):
        room = room_for_pieces(arrangement.on(kind), own, rank, request.capacities[kind])
        places.append(Place(speeds[kind], max(1.0, room), microbatches_in_flight(arrangement.job, rank)))
    ways = [arrangement.with_strategy(stage_layers=counts) for counts in divisions(arrangement.job, own, places)]
    return [way for way in ways if fits_kinds(request, way)]


def _speeds(arrangement: Arrangement, pieces: dict[int, Pieces]) -> dict[int, float]:
    """The speed of each kind relative to the first stage's."""
    first = pieces[arrangement.kinds[0]].mean_layer.seconds
    return {kind: first / own.mean_layer.seconds for kind, own in pieces.items()}


def _in_first_kinds_seconds(arrangement: Arrangement, pieces: dict[int, Pieces]) -> Pieces:
    """The pieces in seconds of the first kind, but the head as slow as on the kind that holds it."""
    last = arrangement.kind_of_rank[arrangement.head_rank]
    sharded = pieces_of(arrangement.timing_job(arrangement.kinds[0]), timed=pieces[arrangement.kinds[0]])
    seconds = pieces[last].head.seconds * _speeds(arrangement, pieces)[last]
    return replace(sharded, head=replace(sharded.head, seconds=seconds))


def fits_kinds(request: MixedRequest, arrangement: Arrangement) -> bool:
    """Whether every inner stage has a layer, and every rank fits its device."""
    counts = arrangement.strategy.stage_layers
    if not isinstance(counts, tuple) or 0 in counts[1:-1] or min(counts) < 0:
        return False
    return all(
        memory_of_rank(arrangement.on(kind), rank).total <= request.capacities[kind]
        for rank, kind in enumerate(arrangement.kind_of_rank)
    )


def polished(request: MixedRequest, step: MixedStep, deadline: Deadline | None = None) -> MixedStep:
    """The step with single layers moved while that helps and there is time.

    The partitioner minimises the slowest stage. Of divisions with the same slowest stage the best has short stages
    beside it: two neighbours that are equally slow also wait for each other's messages.
    """
    arrangement = step.arrangement
    passes = arrangement.job.microbatches * arrangement.strategy.stages
    left, deadline = min(_MOST_TRIED, _SIMULATED // passes), deadline or Deadline(None)
    moves = _moves(step)
    while left > 0 and not deadline.leaves_out() and (move := next(moves, None)) is not None:
        way = _moved(step.arrangement, *move)
        if not fits_kinds(request, way):
            continue
        left -= 1
        other = mixed_step(way)
        if other.step_seconds < step.step_seconds * (1 - _GAIN):
            step, moves = other, _moves(other)
    return step


def _moves(step: MixedStep) -> Iterator[tuple[int, int]]:
    """Pairs of stages: from one of the slowest ranks to one of the fastest."""
    job = step.arrangement.job
    by_time = sorted(range(job.strategy.pp), key=lambda rank: -step.ranks[rank].microbatch_seconds)
    for slow, fast in product(by_time[:3], by_time[:-4:-1]):
        if by_time.index(slow) < by_time.index(fast):
            yield from product(stages_of_rank(job, slow), stages_of_rank(job, fast))


def _moved(arrangement: Arrangement, source: int, target: int) -> Arrangement:
    assert isinstance(arrangement.strategy.stage_layers, tuple)
    counts = list(arrangement.strategy.stage_layers)
    counts[source] -= 1
    counts[target] += 1
    return arrangement.with_strategy(stage_layers=tuple(counts))


MOST_SIMULATED = 64
POLISHED = 4  # of the fastest, whose divisions are improved layer by layer
TIE = 0.005  # strategies this close are ranked by simplicity
BEYOND = 1.02  # strategies whose lower bound is this many times the best time are not simulated


@dataclass(frozen=True)
class MixedPlan:
    """The strategies across all kinds, ranked."""

    request: MixedRequest
    tried: int
    candidates: tuple[MixedStep, ...]  # all that were simulated, best first
    alone: tuple[Candidate | None, ...]  # the best on each kind alone, if asked for
    was_stopped: bool = False  # by the time limit: these are the best so far

    @property
    def best(self) -> MixedStep:
        return self.candidates[0]

    @property
    def status(self) -> Status:
        """Whether our engine runs the best."""
        return verdict(self.best.job).status

    @property
    def best_alone(self) -> Candidate | None:
        return max(filter(None, self.alone), key=lambda candidate: candidate.tokens_per_second, default=None)

    @property
    def gain(self) -> float | None:
        """Throughput relative to the best kind alone; None if the job fits on none of them."""
        return self.best.tokens_per_second / self.best_alone.tokens_per_second if self.best_alone else None


def plan_mixed(request: MixedRequest, *, alone: bool = True) -> MixedPlan:
    """The best strategies across the kinds, and with ``alone`` the best on each kind by itself."""
    space = MixedSpace(request)
    space.check()
    request = request.started()
    deadline = request.deadline
    tried, simulated = _search(space, deadline.part())
    equal = _ranked(simulated)
    polishing = deadline.part()
    better = [polished(request, step, polishing) for step in polishing.until(equal[:POLISHED])]
    others = unlike_steps(request, deadline.part())
    steps = _ranked([*better, *equal[len(better) :], *others])
    if not steps:
        raise _what_is_missing(space, stopped=deadline.was_hit)
    tried += len(others)
    apart = tuple(_fastest(request.on(kind)) for kind in request.mixed.kinds) if alone else ()
    return MixedPlan(request, tried, tuple(steps), apart, deadline.was_hit)


def _fastest(request: Request) -> Candidate | None:
    result = plan(request)
    return result.fastest if isinstance(result, Plan) else None


def _ranked(steps: list[MixedStep]) -> list[MixedStep]:
    """Ordered by time, but the simplest of those that tie with the fastest comes first."""
    if not steps:
        return []
    by_time = sorted(steps, key=lambda step: step.seconds_per_token)
    tied = [step for step in by_time if step.seconds_per_token <= by_time[0].seconds_per_token * (1 + TIE)]
    first = min(tied, key=lambda step: (complexity(step.arrangement.strategy), step.seconds_per_token))
    return [first, *(step for step in by_time if step is not first)]


def _search(space: MixedSpace, deadline: Deadline) -> tuple[int, list[MixedStep]]:
    """Simulates strategies in the order of a lower bound on their time, until no other can beat the best that fits."""
    floors = sorted(deadline.part().until(estimated(space)), key=lambda floor: floor.seconds_per_token)
    fitting: list[MixedStep] = []
    fastest = float("inf")
    for floor in deadline.until(floors):
        if len(fitting) >= MOST_SIMULATED or floor.seconds_per_token > fastest * BEYOND:
            break
        steps = [mixed_step(way) for way in divided(space.request, floor.arrangement, floor.pieces)]
        if steps:
            fitting.append(min(steps, key=lambda step: step.seconds_per_token))
            fastest = min(fastest, fitting[-1].seconds_per_token)
    return len(floors), fitting


def _what_is_missing(space: MixedSpace, *, stopped: bool) -> SpecError:
    request = space.request
    if stopped:
        problem, remedy = "nothing that fits was found within the time limit", "give it longer (⟨time_limit=10min⟩)"
        return SpecError("plan", problem, remedy)
    if next(space.arrangements(), None) is None:
        sizes = " and ".join(f"{kind.devices:,}" for kind in request.mixed.kinds)
        problem = f"no tp·cp·dp divides {sizes} devices into stages of {request.job.model.layers} layers and the batch"
        remedy = "use numbers of nodes with a common divisor, or a batch in tokens, which is rounded"
        return SpecError("plan", problem, remedy)
    there = " and ".join(
        f"{readable_bytes(request.capacities[number])} per {kind.device.name}"
        for number, kind in enumerate(request.mixed.kinds)
    )
    problem = f"no strategy across the kinds fits in {there}"
    return DoesNotFit("plan", problem, "use more nodes of either kind")


# -- ways without equal stages ------------------------------------------------------------------------

_OUTSIDE: tuple[Dimension, ...] = ("tp", "cp", "pp", "dp")  # whole replicas side by side
_RECOMPUTES = ("none", "selective", "full")
_MOST_STAGES = 4  # of a kind, in a pipeline of unlike stages
_MOST_MOVES = 24  # of single layers, tried to improve a division


def unlike_steps(request: MixedRequest, deadline: Deadline) -> list[MixedStep]:
    """Steps that fit and run, with unlike shares or with unlike stages."""
    steps: list[MixedStep] = []
    orders = list(permutations(range(len(request.mixed.kinds))))
    for order in orders:
        ways = _with_shares(request, order) if order == orders[0] else iter(())
        for arrangement in deadline.until((*ways, *_with_unlike_stages(request, order))):
            step = _priced(request, arrangement)
            if step is not None:
                steps.append(_rebalanced(request, step) if step.arrangement.strategy.has_unlike_stages else step)
    return steps


def _priced(request: MixedRequest, arrangement: Arrangement) -> MixedStep | None:
    try:
        job = arrangement.whole_job()
        if verdict(job).status != "runs" and not request.any_priced:
            return None
        view, memory = tightest(job, device_memories(job))
        if memory.total > room_of(view, request.memory_bytes).planned_bytes or request.excludes(job.strategy):
            return None
        return MixedStep(arrangement, candidate(job))
    except SpecError:  # degrees that the model, the batch or a network does not take
        return None


# Replicas with unlike shares:


def _with_shares(request: MixedRequest, order: Sequence[int]) -> Iterator[Arrangement]:
    mixed, allowed = request.mixed, request.constraints.candidates
    common = math.gcd(*(kind.devices for kind in mixed.kinds))
    inner = min(kind.levels[0].width for kind in mixed.kinds)
    for tp, pp in product(divisors(common), divisors(common)):
        if common % (tp * pp) or tp > inner or pp > request.job.model.layers or mixed.devices == tp * pp:
            continue
        for microbatch, recompute, zero in product(
            allowed("microbatch", (1, 2, 4)), allowed("recompute", _RECOMPUTES), allowed("zero", (0, 1))
        ):
            if tp not in allowed("tp", (tp,)) or pp not in allowed("pp", (pp,)) or not _as_fixed(request, pp):
                continue
            whole = plain_strategy(request.job).unchecked(
                tp=tp, pp=pp, dp=mixed.devices // (tp * pp), microbatch=microbatch, recompute=recompute, zero=zero,
                order=_OUTSIDE,
            )  # fmt: skip
            if whole.dp in allowed("dp", (whole.dp,)):
                yield from _shared(request, order, whole)


def _as_fixed(request: MixedRequest, pp: int) -> bool:
    """Whether the constraints allow the values that are not varied here."""
    allowed = request.constraints.candidates
    plain = {"cp": 1, "ep": 1, **({"schedule": PLAIN} if pp > 1 else {}), **FIXED}
    return all(value in allowed(name, (value,)) for name, value in plain.items())


def _shared(request: MixedRequest, order: Sequence[int], whole: Strategy) -> Iterator[Arrangement]:
    """The strategy with microbatches divided over replicas by their speed, so that the last kind ends early."""
    plain = Arrangement(request.mixed, tuple(order), _job_of(request, whole))
    total, rest = divmod(plain.job.sequences, whole.microbatch)
    replicas = [request.mixed.kinds[kind].devices * whole.data_parallel // request.mixed.devices for kind in order]
    if rest or total < sum(replicas):
        return
    try:
        views = replicas_by_kind(plain.unchecked_job())
        seconds = [predict(view).slowest.microbatch_seconds for view in views]
    except SpecError:
        return
    ways = list(_microbatch_counts(total, replicas, seconds))
    if ways:
        counts = min(ways, key=lambda way: max(m * each for m, each in zip(way, seconds)))
        shares = tuple(m for n, m in zip(replicas, counts) for _ in range(n))
        common = math.gcd(*shares)
        unlike = None if len(set(shares)) == 1 else tuple(share // common for share in shares)
        yield plain.with_strategy(dp_shares=unlike)


def _microbatch_counts(total: int, replicas: Sequence[int], seconds: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Microbatches per replica of each kind: near the share of its speed, except the last kind, which gets the rest."""
    speed = sum(n / each for n, each in zip(replicas, seconds))
    ideal = [total / each / speed for each in seconds]
    near = [range(max(1, math.floor(share) - 3), math.ceil(share) + 4) for share in ideal[:-1]]
    for first in product(*near):
        left = total - sum(n * m for n, m in zip(replicas, first))
        if left >= replicas[-1] and left % replicas[-1] == 0:
            yield (*first, left // replicas[-1])


# Stages of unlike degrees:


def _with_unlike_stages(request: MixedRequest, order: Sequence[int]) -> Iterator[Arrangement]:
    kinds, allowed = [request.mixed.kinds[kind] for kind in order], request.constraints.candidates
    if not all(value in allowed(name, (value,)) for name, value in {"cp": 1, "ep": 1, **FIXED}.items()):
        return
    numbers = [[n for n in divisors(kind.devices) if n <= _MOST_STAGES] for kind in kinds]
    for stages in product(*numbers):
        tensor = [
            [tp for tp in divisors(kind.devices // n) if tp <= kind.levels[0].width and tp in allowed("tp", (tp,))]
            for kind, n in zip(kinds, stages)
        ]
        for degrees in product(*tensor):
            replicas = [kind.devices // n // tp for kind, n, tp in zip(kinds, stages, degrees)]
            alike = len(set(degrees)) == 1 and len(set(replicas)) == 1
            if alike or any(max(replicas) % dp for dp in replicas) or sum(stages) not in allowed("pp", (sum(stages),)):
                continue
            yield from _arranged(request, order, stages, degrees, replicas)


def _arranged(
    request: MixedRequest, order: Sequence[int], stages: Sequence[int], degrees: Sequence[int], replicas: Sequence[int]
) -> Iterator[Arrangement]:
    allowed = request.constraints.candidates
    choices = product(
        allowed("microbatch", (1, 2)), allowed("recompute", _RECOMPUTES), allowed("schedule", _schedules()),
        allowed("zero", (1,) if max(replicas) > 1 else (0,)),
    )  # fmt: skip
    for microbatch, recompute, schedule, zero in choices:
        if schedule not in _schedules() or max(replicas) not in allowed("dp", (max(replicas),)):
            continue
        whole = plain_strategy(request.job).unchecked(
            pp=sum(stages), tp=max(degrees), dp=max(replicas), microbatch=microbatch, recompute=recompute,
            schedule=schedule, zero=zero, stage_tp=_of_stages(degrees, stages), stage_dp=_of_stages(replicas, stages),
        )  # fmt: skip
        plain = Arrangement(request.mixed, tuple(order), _job_of(request, whole))
        counts = _by_speed(plain)
        if counts is not None:
            yield plain.with_strategy(stage_layers=counts)


def _schedules() -> tuple[str, ...]:
    """The plain schedule, and the simplest that splits the backward pass and has one stage per rank."""
    split = (record for record in map(schedule_record, searched_schedules()) if record.splits_backward)
    return (PLAIN, *[record.name for record in split if record.chunks_per_rank(2, 1) == 1][:1])


def _of_stages(numbers: Sequence[int], stages: Sequence[int]) -> tuple[int, ...] | None:
    """A number per stage from one per kind; None if all are equal."""
    if len(set(numbers)) == 1:
        return None
    return tuple(number for number, times in zip(numbers, stages) for _ in range(times))


def _by_speed(arrangement: Arrangement) -> tuple[int, ...] | None:
    """Layers of every stage in proportion to the speed of its rank, which the times of even stages show."""
    model, pp = arrangement.job.model, arrangement.strategy.pp
    if pp > model.layers or not arrangement.job.microbatches:  # fewer sequences than replicas
        return None
    even = [model.layers // pp + (rank < model.layers % pp) for rank in range(pp)]
    try:
        job = arrangement.with_strategy(stage_layers=tuple(even)).unchecked_job()
        seconds = [rank.microbatch_seconds for rank in predict(job).ranks]
    except SpecError:
        return None
    speeds = [count / each for count, each in zip(even, seconds)]
    counts = [max(1, round(model.layers * speed / sum(speeds))) for speed in speeds]
    while sum(counts) != model.layers:
        step = 1 if sum(counts) < model.layers else -1
        movable = [rank for rank in range(pp) if counts[rank] + step >= 1]
        rank = min(movable, key=lambda other: step * (counts[other] + step) / speeds[other])
        counts[rank] += step
    return tuple(counts)


def _rebalanced(request: MixedRequest, step: MixedStep) -> MixedStep:
    """The step with single layers moved from its slowest rank to the fastest while that helps."""
    left = _MOST_MOVES
    while left > 0:
        counts = list(stage_layer_counts(step.arrangement.job.model, step.arrangement.strategy))
        seconds = [rank.microbatch_seconds for rank in step.ranks]
        slow = max(range(len(counts)), key=lambda rank: seconds[rank])
        better = None
        for fast in sorted(range(len(counts)), key=lambda rank: seconds[rank])[:2]:
            left -= 1
            if fast == slow or counts[slow] < 2:
                continue
            moved = [count - (rank == slow) + (rank == fast) for rank, count in enumerate(counts)]
            other = _priced(request, step.arrangement.with_strategy(stage_layers=tuple(moved)))
            if other is not None and other.step_seconds < (better or step).step_seconds:
                better = other
        if better is None:
            return step
        step = better
    return step


def _job_of(request: MixedRequest, strategy: Strategy) -> Job:
    training = request.job.training
    multiple, least = strategy.data_parallel * strategy.microbatch, request.minimum_batch
    sequences = training.sequences(multiple) if least is None else -(-least // multiple) * multiple
    return request.job.unchecked(strategy=strategy, training=training.unchecked(global_batch=sequences))
