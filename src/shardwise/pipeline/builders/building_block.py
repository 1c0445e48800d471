"""V-Half and V-Min: one building block per rank, repeated for every microbatch and run as early as memory allows.

Stage r on the way down and stage 2p-1-r on the way back are on one rank, so that every rank has six actions for a
microbatch. A building block says when they are due if each takes a unit; repeated every six units, blocks never collide
(Qi et al. 2024, arXiv 2405.15362, section 3).

The blocks alone leave long waits while the pipeline fills and drains. So they are run early:

- While the pipeline fills, a rank runs the action due first among those whose inputs have arrived. A forward that
  overtakes others of its rank leaves memory for them.
- Once the first microbatch has left a rank, the rank keeps to the order of its blocks: with unequal passes or messages
  the slack in their waits for each other helps, and other orders that take six units can be slower.
- Once the last microbatch has entered a rank, memory is no longer short, and nobody waits for weight gradients: they
  come last, and before them again what is due first.

Nothing deadlocks: of all actions left, the one due first has its inputs. If it is a forward, it also has memory:
whatever overtook it has left some for it, and all weight gradients before it in the blocks have run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

from shardwise.collectives.arrays import maximum, minimum, select
from shardwise.pipeline.forms import ClosedForms, EqualStages, in_round_trips, paced_by_messages
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, one_copy, v_placement
from shardwise.spec.schedules import schedule_record

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W  # noqa: E741
_UNITS = 6  # of a block, and from one microbatch to the next
# The six actions of a block. Forwards and input gradients are due in this order.
_STEPS = ((F, "down"), (F, "back"), (I, "back"), (I, "down"), (W, "back"), (W, "down"))
_ALL_STEPS, _FORWARDS, _PASSES, _WEIGHT_GRADIENTS = range(6), range(2), range(4), range(4, 6)
_ENTERS, _LEAVES = 0, 3
_NEVER = 1 << 60

Starts: TypeAlias = tuple[int, int, int, int]  # of the first four steps, for the first microbatch
_Starts: TypeAlias = Callable[[int, int], Starts]  # of ranks and rank
_Limit: TypeAlias = Callable[[int, int, int], int]  # of ranks, microbatches and rank, in activations of one chunk


def _run_early(name: str, starts: _Starts, limit: _Limit, ranks: int, microbatches: int) -> PipelineSchedule:
    all_ranks = _block_ranks(starts, limit, ranks, microbatches)
    for _ in _units_of_time(all_ranks):
        pass
    return one_copy(name, microbatches, v_placement(ranks), (rank.made for rank in all_ranks))


def _peaks(starts: _Starts, limit: _Limit, ranks: int, microbatches: int) -> tuple[int, ...]:
    """The most activations that each rank holds; the run stops as soon as no rank can hold more."""
    all_ranks = _block_ranks(starts, limit, ranks, microbatches)
    for _ in _units_of_time(all_ranks):
        if all(rank.has_peaked for rank in all_ranks):
            break
    return tuple(rank.most_held for rank in all_ranks)


def _block_ranks(starts: _Starts, limit: _Limit, ranks: int, microbatches: int) -> list[_BlockRank]:
    progress = {kind: [0] * (2 * ranks) for kind in (F, I, W)}
    return [
        _BlockRank(rank, ranks, microbatches, starts(ranks, rank), limit(ranks, microbatches, rank), progress)
        for rank in range(ranks)
    ]


def _units_of_time(all_ranks: Sequence[_BlockRank]) -> Iterator[None]:
    """Runs all actions, those of one unit of time after the other."""
    ranks = len(all_ranks)
    left = sum(rank.microbatches for rank in all_ranks) * len(_STEPS)
    awake = set(range(ranks))  # what another rank may run changes only with its own progress and its neighbours'
    while left:
        # What starts in this unit of time is not yet an input of anything else that does.
        starting = [(rank, step) for rank in awake if (step := all_ranks[rank].due_first()) is not None]
        for rank, step in starting:
            all_ranks[rank].run(step)
        left -= len(starting)
        awake = {near for rank, _ in starting for near in (rank - 1, rank, rank + 1) if 0 <= near < ranks}
        yield


class _BlockRank:
    """One rank: what it has run, when each of its six steps is next due, and how many activations it holds.

    ``progress[kind][stage]``, which all ranks share, counts the microbatches done; each stage takes them in order.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        microbatches: int,
        starts: Starts,
        limit: int,
        progress: dict[ActionKind, list[int]],
    ) -> None:
        stage_of = {"down": rank, "back": 2 * ranks - 1 - rank}
        self.steps = [(kind, stage_of[way]) for kind, way in _STEPS]
        # By step: the counts of microbatches done, of its own stage and of those that it waits for.
        self.done = [(progress[kind], stage) for kind, stage in self.steps]
        self.inputs = [_inputs(kind, stage, progress) for kind, stage in self.steps]
        self.due = list(_with_weight_gradients(starts))
        self.microbatches, self.limit = microbatches, limit
        self.held = self.most_held = 0
        self.made: list[Action] = []

    @property
    def has_peaked(self) -> bool:
        """Whether it cannot come to hold more than it has held: it has held all it may, or has no forward left."""
        return self.most_held == self.limit or self.due[0] == self.due[1] == _NEVER

    def due_first(self) -> int | None:
        """The step to run now, or None if it has to wait."""
        due, (left, last) = self.due, self.done[_LEAVES]
        all_entered = due[_ENTERS] == _NEVER
        if left[last] and not all_entered:
            step = due.index(min(due))
            return step if self._can_run(step) else None
        for steps in (_PASSES, _WEIGHT_GRADIENTS) if all_entered else (_ALL_STEPS,):
            first, when = None, _NEVER
            for step in steps:
                if due[step] < when and self._can_run(step):
                    first, when = step, due[step]
            if first is not None:
                return first
        return None

    def _can_run(self, step: int) -> bool:
        counts, stage = self.done[step]
        microbatch = counts[stage]
        for inputs, before in self.inputs[step]:
            if inputs[before] <= microbatch:
                return False
        return step not in _FORWARDS or self.held + self._overtaken(step) < self.limit

    def _overtaken(self, step: int) -> int:
        """Forwards on the other way that are due before this one and have not run."""
        other = 1 - step
        units_earlier = self.due[step] - self.due[other]
        if units_earlier <= 0:
            return 0
        counts, stage = self.done[other]
        return min(self.microbatches - counts[stage], -(-units_earlier // _UNITS))

    def run(self, step: int) -> None:
        kind, stage = self.steps[step]
        counts, _ = self.done[step]
        microbatch = counts[stage]
        self.made.append(Action(kind, stage, microbatch))
        counts[stage] += 1
        self.due[step] = self.due[step] + _UNITS if microbatch + 1 < self.microbatches else _NEVER
        if kind is F:
            self.held += 1
            self.most_held = max(self.most_held, self.held)
        elif kind is W:
            self.held -= 1


def _inputs(kind: ActionKind, stage: int, progress: dict[ActionKind, list[int]]) -> list[tuple[list[int], int]]:
    if kind is F:
        return [(progress[F], stage - 1)] if stage else []
    if kind is W:
        return [(progress[I], stage)]
    is_last = stage == len(progress[I]) - 1
    return [(progress[F], stage), *(() if is_last else [(progress[I], stage + 1)])]


def _with_weight_gradients(starts: Starts) -> tuple[int, ...]:
    """The starts of all six steps: weight gradients take the two units left, that of the way back the first of these
    after its input gradient."""
    free = {*range(_UNITS)} - {start % _UNITS for start in starts}
    after_back, after_down = starts[2] + 1, starts[3] + 1
    wait = min((unit - after_back) % _UNITS for unit in free)
    (other,) = free - {(after_back + wait) % _UNITS}
    return *starts, after_back + wait, after_down + (other - after_down) % _UNITS


# -- The blocks --------------------------------------------------------------------------------------
# A microbatch goes down and back, and its gradients go down and back again. Offsets are the units from one rank to the
# next; the shift is the least with which no blocks collide. A rank may hold what its blocks hold if every action runs
# when it is due: of few microbatches, all on the way down and some on the way back.


def _half_starts(p: int, rank: int) -> Starts:
    """Offsets of 2 down and 1 back; the shift is between forwards and backwards."""
    shift = 0 if p % 2 else 3
    return 2 * rank, 3 * p - rank - 2, 3 * p + shift + 2 * rank - 1, 6 * p + shift - rank - 2


def _half_limit(p: int, m: int, rank: int) -> int:
    """Half of 1F1B: (p+2)//2 microbatches of two chunks."""
    return min(2 * m, m + (rank + 1) // 2 + 1, 2 * ((p + 2) // 2))


def _min_starts(p: int, rank: int) -> Starts:
    """Offsets of 1; the shift is between ranks 1 and 2 on both ways down, where it gives messages time.

    In the authors' block it is between forwards and backwards, where there is no message.
    """
    shift = 0 if p % 3 else 2
    down = rank + shift * (rank >= 2)
    return down, 2 * p - 1 + shift - rank, 2 * p + shift + down, 4 * p - 1 + 2 * shift - rank


def _min_limit(p: int, m: int, rank: int) -> int:
    """A third of 1F1B: (p+4)//3 microbatches of two chunks, one less on every third rank where p = 2 mod 3."""
    back = (rank + 1 + (p % 3 != 1)) // 3 + 1
    return min(2 * m, m + back, 2 * ((p + 4) // 3 - (p % 3 == 2 and rank % 3 == 0)))


v_half = partial(_run_early, "v-half", _half_starts, _half_limit)
v_min = partial(_run_early, "v-min", _min_starts, _min_limit)


# -- Closed forms ------------------------------------------------------------------------------------
# Exact for F = I = W, c = 0 and m >= p, otherwise fitted to the simulator; short messages are assumed. The first rank
# is the first to start and the last to end, so that it makes no difference whether ranks end a step together or apart.


def _half_bubble(case: EqualStages) -> Any:
    """Half of 1F1B's 6(p-1) units, less 1, and less another 3 where p is even; few microbatches fill less."""
    p, m, W = case.p, case.m, case.W
    slower, faster = maximum(case.F, case.I), minimum(case.F, case.I)
    even = 1 * (p % 2 == 0)
    filling = 3 * (p - 1) * slower + (p - 1 - 2 * even) * faster - (p + even - 2 * (p == 2)) * minimum(W, faster)
    unfilled = 2 * (p - 1) * (case.F + case.I) - (2 * m - 1) * W
    # The busiest chain of passes in a full pipeline: four of the slower and a weight gradient, for every microbatch.
    slack = W - 2 * (slower - faster) - 2 * case.c
    waits = maximum(0, m - (p + 2) // 2) * maximum(0.0, -slack) + 6 * (p - 1) * case.c
    return (p > 1) * (maximum(filling, unfilled) + waits)


def _half_pace(case: EqualStages) -> Any:
    """Of the p + 2 activations that it holds, p are in flight, as seen in the simulator."""
    held = 2 * case.p * (case.F + case.I) + 4 * (case.p - 1) * case.c
    return paced_by_messages(case, schedule_record("v-half"), in_round_trips(case, case.p, held))


def _min_bubble(case: EqualStages) -> Any:
    """Two thirds of 1F1B's 6(p-1) units, less 1, and less another 2 where 3 divides p."""
    p, m = case.p, case.m
    slower, faster = maximum(case.F, case.I), minimum(case.F, case.I)
    shift = 2 * (p % 3 == 0)
    held = (p + 4) // 3
    deferred = (2 * held - 3 + 2 * (p % 3 == 2)) * maximum(0.0, faster - case.W)
    filling = (4 * p - 5 - shift * (m > 1)) * slower + deferred
    # The busiest chain in a full pipeline: six passes for every microbatch, and its share of a round trip's messages.
    of_two = 3 * slower + faster + maximum(2 * faster, slower + case.W)
    work = 2 * (case.F + case.I + case.W)
    passes = select(p > 3, 6 * slower, select(p == 3, work, of_two))
    messages = select(p == 2, 2.0, 12 * (p - 1) / (2 * p + 1 + shift)) * case.c
    # The first of two ranks sends a gradient and the next activation at once: three messages, one after another.
    in_turn = (p == 2) * (3 * (slower + case.c) + faster)
    per_microbatch = maximum(0.0, maximum(passes + messages, in_turn) - work)
    waits = maximum(0, m - held) * per_microbatch + 6 * (p - 1) * case.c
    return (p > 1) * (filling + waits)


def _in_flight(starts: _Starts, limit: _Limit) -> Any:
    """What a rank may hold; with at most p microbatches it may hold less, so the actions are counted."""
    counted = lru_cache(maxsize=4096)(partial(_peaks, starts, limit))

    return lambda p, m, v, r: limit(p, m, r) if m > p else counted(p, m)[r]


def _is_exact(case: EqualStages) -> bool:
    return case.is_even and bool(case.m >= case.p)


HALF_FORMS = ClosedForms(
    bubble=_half_bubble,
    in_flight=_in_flight(_half_starts, _half_limit),
    is_exact=_is_exact,
    pace=_half_pace,
    text="max(min(1, p−1), 3·p−4 − 3·divides(2, p), 4·p−3−2·m)/(6·m)",
)
MIN_FORMS = ClosedForms(
    bubble=_min_bubble,
    in_flight=_in_flight(_min_starts, _min_limit),
    is_exact=_is_exact,
    text="max(0, 4·p−5 − 2·divides(3, p)·min(1, m−1))/(6·m)",
)
