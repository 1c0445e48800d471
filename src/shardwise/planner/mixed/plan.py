"""A plan for a cluster of several kinds of nodes.

Each kind gets layers according to its speed and memory, or replicas with a share of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from shardwise.cost.memory.activations import microbatches_in_flight
from shardwise.cost.memory.device import memory_of_rank
from shardwise.layout.stages import stages_of_rank
from shardwise.pipeline import Place
from shardwise.planner.candidate import Candidate, complexity
from shardwise.planner.mixed.space import MixedRequest, MixedSpace, estimated
from shardwise.planner.mixed.step import Arrangement, MixedStep, mixed_step
from shardwise.planner.mixed.unlike import unlike_steps
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Deadline, Request
from shardwise.planner.search.stages import Pieces, divisions, pieces_of, room_for_pieces
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.support import Status, verdict
from shardwise.spec.units import readable_bytes

_SIMULATED = 200_000  # passes simulated to try neighbours of one division
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
    """The pieces in seconds of the first kind; the head is as slow as it is on the kind that has it."""
    last = arrangement.kind_of_rank[arrangement.head_rank]
    sharded = pieces_of(arrangement.joined(arrangement.kinds[0]), timed=pieces[arrangement.kinds[0]])
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

    The partitioner makes the slowest stage as fast as possible. Among divisions with the same slowest stage the best
    has short stages beside it: two that are equally slow also wait for each other's messages.
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
    """From a stage of one of the slowest ranks to one of the fastest."""
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
POLISHED = 4  # of the fastest, whose neighbouring divisions are tried too
TIE = 0.005  # strategies this close are ranked by simplicity
BEYOND = 1.02  # strategies whose lower bound is this many times the best time are not simulated


@dataclass(frozen=True)
class MixedPlan:
    """``candidates``: all that were simulated, best first; ``alone``: the best on each kind alone, if asked for."""

    request: MixedRequest
    tried: int
    candidates: tuple[MixedStep, ...]
    alone: tuple[Candidate | None, ...]
    was_stopped: bool = False  # by its time limit: these are the best so far

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
    """The best strategies with the pipeline across the kinds, and the best plan on each kind alone."""
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
    """By time; the simplest of those that tie with the fastest comes first."""
    if not steps:
        return []
    by_time = sorted(steps, key=lambda step: step.seconds_per_token)
    tied = [step for step in by_time if step.seconds_per_token <= by_time[0].seconds_per_token * (1 + TIE)]
    first = min(tied, key=lambda step: (complexity(step.arrangement.strategy), step.seconds_per_token))
    return [first, *(step for step in by_time if step is not first)]


def _search(space: MixedSpace, deadline: Deadline) -> tuple[int, list[MixedStep]]:
    """Simulates strategies by a lower bound of their time until no other can beat the best that fits."""
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
        problem, remedy = "nothing that fits was found within the time limit", "give it longer (--time-limit 10min)"
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
