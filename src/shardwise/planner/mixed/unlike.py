"""Ways to use kinds of nodes that no equal stages have: replicas with unlike shares, and stages of unlike degrees.

Data parallelism across the kinds: every kind runs the whole model, and takes as many microbatches as its speed allows.
A pipeline whose stages have the degrees that suit their own kind: no common number of devices is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations, product

from shardwise.cost.memory.device import device_memories
from shardwise.cost.memory.room import room_of, tightest
from shardwise.cost.step.prediction import predict
from shardwise.layout.views import replicas_by_kind
from shardwise.planner.candidate import candidate
from shardwise.planner.constraints import field_value
from shardwise.planner.mixed.space import FIXED, MixedRequest
from shardwise.planner.mixed.step import Arrangement, MixedStep
from shardwise.planner.request import Deadline
from shardwise.planner.search.space import plain_strategy
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import divisors, stage_layer_counts
from shardwise.spec.schedules import PLAIN, schedule_record, searched_schedules
from shardwise.spec.strategy import Dimension, Strategy
from shardwise.spec.support import verdict

_OUTSIDE: tuple[Dimension, ...] = ("tp", "cp", "pp", "dp")  # whole replicas side by side
_RECOMPUTES = ("none", "selective", "full")
_MOST_STAGES = 4  # of a kind, of unlike degrees
_MOST_MOVES = 24  # single layers moved to better a division


def unlike_steps(request: MixedRequest, deadline: Deadline) -> list[MixedStep]:
    """All that fit and run, of both kinds of ways."""
    steps: list[MixedStep] = []
    orders = list(permutations(range(len(request.mixed.kinds))))
    for order in orders:
        ways = _with_shares(request, order) if order == orders[0] else iter(())
        for arrangement in deadline.until((*ways, *_with_unlike_stages(request, order))):
            step = _priced(request, arrangement)
            if step is not None:
                steps.append(_polished(request, step) if step.arrangement.strategy.has_unlike_stages else step)
    return steps


def _priced(request: MixedRequest, arrangement: Arrangement) -> MixedStep | None:
    try:
        job = arrangement.whole_job()
        runs = verdict(job).status == "runs" or request.any_priced
        if not runs or not _fits(request, job) or _is_excluded(request, job.strategy):
            return None
        return MixedStep(arrangement, candidate(job))
    except SpecError:  # degrees that the model, the batch or a network does not take
        return None


def _is_excluded(request: MixedRequest, strategy: Strategy) -> bool:
    entries = request.constraints.excluded
    return any(all(field_value(strategy, name) in values for name, values in entry.items()) for entry in entries)


def _fits(request: MixedRequest, job: Job) -> bool:
    view, memory = tightest(job, device_memories(job))
    return memory.total <= room_of(view, request.memory_bytes).planned_bytes


# -- replicas with unlike shares -------------------------------------------------------------------------------


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
    """Whether the constraints allow what is not varied here."""
    allowed = request.constraints.candidates
    plain = {"cp": 1, "ep": 1, **({"schedule": PLAIN} if pp > 1 else {}), **FIXED}
    return all(value in allowed(name, (value,)) for name, value in plain.items())


def _shared(request: MixedRequest, order: Sequence[int], whole: Strategy) -> Iterator[Arrangement]:
    """Each kind's replicas take microbatches by their speed, so that all kinds are done as early as possible."""
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
    ways = [
        counts for counts in _divided(total, replicas, seconds) if sum(n * m for n, m in zip(replicas, counts)) == total
    ]
    if ways:
        counts = min(ways, key=lambda way: max(m * each for m, each in zip(way, seconds)))
        shares = tuple(m for n, m in zip(replicas, counts) for _ in range(n))
        common = math.gcd(*shares)
        unlike = None if len(set(shares)) == 1 else tuple(share // common for share in shares)
        yield plain.with_strategy(dp_shares=unlike)


def _divided(total: int, replicas: Sequence[int], seconds: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Microbatches of a replica of each kind: those of all kinds but the last near their share, the last the rest."""
    speed = sum(n / each for n, each in zip(replicas, seconds))
    ideal = [total / each / speed for each in seconds]
    near = [range(max(1, math.floor(share) - 3), math.ceil(share) + 4) for share in ideal[:-1]]
    for first in product(*near):
        left = total - sum(n * m for n, m in zip(replicas, first))
        if left >= replicas[-1] and left % replicas[-1] == 0:
            yield (*first, left // replicas[-1])


# -- stages of unlike degrees ----------------------------------------------------------------------------------


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
    """The plain one, and the simplest that splits the backward pass, with one stage per rank."""
    split = (record for record in map(schedule_record, searched_schedules()) if record.splits_backward)
    return (PLAIN, *[record.name for record in split if record.chunks_per_rank(2, 1) == 1][:1])


def _of_stages(numbers: Sequence[int], stages: Sequence[int]) -> tuple[int, ...] | None:
    """Of each stage; None where all are equal."""
    return (
        None
        if len(set(numbers)) == 1
        else tuple(number for number, times in zip(numbers, stages) for _ in range(times))
    )


def _by_speed(arrangement: Arrangement) -> tuple[int, ...] | None:
    """Layers of every stage: of even ones each rank's time shows its speed, and what its ends take beside them."""
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


def _polished(request: MixedRequest, step: MixedStep) -> MixedStep:
    """The step with single layers moved from its slowest rank to others while that helps."""
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
