"""Zero-bubble schedules: the backward pass is split, and weight gradients fill what would be bubbles."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import product
from typing import Any

from shardwise.collectives.arrays import maximum, minimum
from shardwise.pipeline.builders.flush import one_forward_one_backward
from shardwise.pipeline.forms import ClosedForms, EqualStages, one_f_one_b_wait
from shardwise.pipeline.schedule import (
    Action,
    ActionKind,
    PipelineSchedule,
    StageTimes,
    equal_stages,
    loop_placement,
    one_copy,
    v_placement,
)
from shardwise.pipeline.timeline import simulate
from shardwise.spec.errors import SpecError, shown

# -- Weight gradients where a rank would otherwise wait ----------------------------------------------
# Given the order of forwards and input gradients on every rank, the actions are simulated. A pending weight gradient
# runs when the next action is not ready yet, or when memory is full.

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W  # noqa: E741
_ROUNDING = 1e-9


def fill_weight_gradients(
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    orders: Sequence[Sequence[Action]],
    limits: Sequence[float],
    times: StageTimes,
    comm_seconds: float = 0.0,
    smallest_gap: float = 0.6,
    released_by_input_grad: float = 0.0,
) -> PipelineSchedule:
    """``orders`` (forwards and input gradients, per rank) with the weight gradients inserted.

    No rank starts a forward that would exceed its limit while it can run a weight gradient instead. A forward counts
    1, of which the input gradient frees ``released_by_input_grad``. A wait is filled if it lasts at least
    ``smallest_gap`` times a weight gradient.
    """
    ranks = [_FilledRank(order, limit, released_by_input_grad) for order, limit in zip(orders, limits)]
    messages = _Messages(placement, times, comm_seconds)
    queue = [(0.0, number) for number in range(len(ranks))]
    while queue:
        now, number = heappop(queue)
        rank = ranks[number]
        action = rank.next
        if action is None:
            rank.finish()
            continue
        ready, certain = messages.earliest(action, now)
        if rank.pending and (
            rank.is_full or ready - now >= smallest_gap * times.weight_grad[rank.pending[0].stage] > 0
        ):
            action, ready = rank.pending[0], now
        elif not certain:
            messages.sleeping[action] = number
            continue
        rank.take(action)
        end = max(now, ready) + messages.seconds[action.kind][action.stage]
        heappush(queue, (end, number))
        woken = messages.send(action, end)
        if woken is not None:
            heappush(queue, (now, woken))
    return one_copy(name, microbatches, placement, (rank.made for rank in ranks))


class _FilledRank:
    """The state of one rank: its position, what it holds, and the weight gradients it could run."""

    def __init__(self, order: Sequence[Action], limit: float, released: float) -> None:
        self.order, self.limit, self.released = order, limit, released
        self.position, self.held = 0, 0.0
        self.pending: deque[Action] = deque()
        self.made: list[Action] = []

    @property
    def next(self) -> Action | None:
        return self.order[self.position] if self.position < len(self.order) else None

    @property
    def is_full(self) -> bool:
        return self.order[self.position].kind is F and self.held + 1 > self.limit + _ROUNDING

    def take(self, action: Action) -> None:
        self.made.append(action)
        if action.kind is W:
            self.pending.popleft()
            self.held -= 1 - self.released
            return
        self.position += 1
        if action.kind is F:
            self.held += 1
        else:
            self.held -= self.released
            self.pending.append(Action(W, action.stage, action.microbatch))

    def finish(self) -> None:
        self.made += self.pending
        self.pending.clear()


class _Messages:
    """When the input of each action arrives; missing if its sender has not started yet."""

    def __init__(self, placement: tuple[int, ...], times: StageTimes, comm_seconds: float) -> None:
        self.placement, self.comm_seconds = placement, comm_seconds
        self.seconds = {F: times.forward, I: times.input_grad, W: times.weight_grad}
        self.arrival: dict[Action, float] = {}
        self.sleeping: dict[Action, int] = {}
        self.link_free: dict[tuple[int, int], float] = {}

    def earliest(self, action: Action, now: float) -> tuple[float, bool]:
        """When the action's input arrives, and whether that is certain or only the earliest possible time."""
        source = action.stage - 1 if action.kind is F else action.stage + 1
        if not 0 <= source < len(self.placement):
            return now, True
        if action in self.arrival:
            return self.arrival[action], True
        return now + self.seconds[action.kind][source] + self._hop(source, action.stage), False

    def send(self, action: Action, end: float) -> int | None:
        """Sends the result on; returns the rank that was waiting for it, if any."""
        target = action.stage + 1 if action.kind is F else action.stage - 1
        if action.kind is W or not 0 <= target < len(self.placement):
            return None
        message = Action(action.kind, target, action.microbatch)
        link = self.placement[action.stage], self.placement[target]
        arrival = max(end, self.link_free.get(link, 0.0)) + self._hop(action.stage, target)
        self.arrival[message] = self.link_free[link] = arrival
        return self.sleeping.pop(message, None)

    def _hop(self, source: int, target: int) -> float:
        return self.comm_seconds if self.placement[source] != self.placement[target] else 0.0


# -- ZB-H1 and ZB-H2 ---------------------------------------------------------------------------------
# Qi et al. 2023, arXiv 2401.10241, section 2. Rank r has ``in_flight`` microbatches between forward and input gradient
# and lets ``lag`` weight gradients wait, so that every rank holds the same number of activations: (p-r) + r = p in H1,
# (2(p-r)-1) + 2r = 2p-1 in H2. With fewer microbatches no weight gradient waits unless there is a forward to run
# instead.


def _handcrafted(name: str, h: int, ranks: int, microbatches: int) -> PipelineSchedule:
    actions = []
    for rank in range(ranks):
        in_flight = h * (ranks - rank - 1) + 1
        lag = min(h * rank, max(0, microbatches - in_flight))
        actions.append(_split(rank, microbatches, in_flight, lag))
    return one_copy(name, microbatches, loop_placement(ranks), actions)


zb_h1, zb_h2 = partial(_handcrafted, "zb-h1", 1), partial(_handcrafted, "zb-h2", 2)


def _split(stage: int, microbatches: int, in_flight: int, lag: int) -> list[Action]:
    """The weight gradient of microbatch j follows the input gradient of j + lag; the last ones come at the end."""
    order: list[Action] = []
    for action in one_forward_one_backward(stage, microbatches, in_flight, ActionKind.I):
        order.append(action)
        if action.kind is ActionKind.I and action.microbatch >= lag:
            order.append(Action(ActionKind.W, stage, action.microbatch - lag))
    left = range(max(0, microbatches - lag), microbatches)
    return order + [Action(ActionKind.W, stage, j) for j in left]


def h1_bubble(case: EqualStages) -> Any:
    """(p-1)(F+I-W) for m >= p and W <= F: Qi et al. 2023, section 2.2; generalised to other cases."""
    p, m, F, I, W, c = case.p, case.m, case.F, case.I, case.W, case.c  # noqa: E741
    waits = minimum(one_f_one_b_wait(p, m, F + I, c), 4 * (p - 1) * c)
    return (p - 1) * (F + I) - minimum(m - 1, p - 1) * minimum(W, F) + waits


def h2_bubble(case: EqualStages) -> Any:
    """(p-1)(F+I-2W): Qi et al. 2023, section 2.2; fewer microbatches fill less."""
    return deferred_bubble(case, 2 * (case.p - 1))


def last_rank_end(case: EqualStages) -> Any:
    """The last rank starts when the first forward pass reaches it, and then never waits."""
    return (case.p - 1) * (case.F + case.c)


def deferred_bubble(case: EqualStages, waiting: Any) -> Any:
    """The round trip of the first microbatch, filled by at most ``waiting`` deferred weight gradients."""
    hops = case.p - 1
    filled = minimum(case.m - 1, waiting) * case.W
    return maximum(0.0, hops * (case.F + case.I) - filled) + 2 * hops * case.c


def h1_pace(case: EqualStages) -> Any:
    """As 1F1B, but all weight gradients except the last run in the waits."""
    there_and_back = case.F + case.I
    waits = one_f_one_b_wait(case.p, case.m, there_and_back, case.c)
    return (case.m + case.p - 1) * there_and_back + case.W + waits


def _few_messages(case: EqualStages) -> bool:
    return bool(case.c == 0 or 2 * case.p * case.c <= case.W)


def _h1_is_exact(case: EqualStages) -> bool:
    return _few_messages(case) and bool(case.W <= case.F or (case.m >= case.p and case.c == 0))


def _h2_is_exact(case: EqualStages) -> bool:
    fills = 2 * case.W <= case.F + case.I or (case.m >= 2 * case.p - 1 and case.c == 0)
    return _few_messages(case) and bool(case.W <= case.F and fills)


# Every rank r holds p activations, r of which wait for their weight gradient.
_H1_TEXT = "(2·(p−1) − min(m−1, p−1))/(3·m)"
H1_FORMS = ClosedForms(
    bubble=h1_bubble,
    in_flight=lambda p, m, v, r: min(m, p),
    is_exact=_h1_is_exact,
    pace=h1_pace,
    last_end=last_rank_end,
    text=_H1_TEXT,
)
H2_FORMS = ClosedForms(
    bubble=h2_bubble,
    in_flight=lambda p, m, v, r: min(m, 2 * p - 1),
    is_exact=_h2_is_exact,
    last_end=last_rank_end,
    text="max(0, 2·(p−1) − (m−1))/(3·m)",
)


# -- Zero bubble under a memory limit: ZB-1p (p microbatches), ZB-2p (2p), or any other --------------
# A simplified form of the search in Qi et al. 2023, arXiv 2401.10241, section 3.1: a 1F1B order with as many forwards
# ahead as memory and the first backward's arrival allow, weight gradients filled in, and the few open choices tried.


def zb_auto(
    ranks: int,
    microbatches: int,
    memory_limit: float | None = None,
    times: StageTimes | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
    *,
    name: str = "zb-auto",
) -> PipelineSchedule:
    """Of the orders tried, the one whose longest rank is the shortest; the limit is in microbatch activations.

    The near-zero bubbles published for ZB-2p need ``released_by_input_grad``: 1 - 32/(34 + 5as/h) for an unfused
    transformer layer (Table 1 of the paper).
    """
    if memory_limit is None:
        raise SpecError("memory_limit", "zb-auto needs one", f"give a number of microbatches, such as {ranks}")
    if not memory_limit >= 1:
        raise SpecError("memory_limit", f"{shown(memory_limit)} holds no microbatch", "give 1 or more")
    known = times or equal_stages(ranks)

    def cost(schedule: PipelineSchedule) -> float:
        return simulate(schedule, known, comm_seconds).longest_rank_seconds

    candidates = []
    placement, limits = loop_placement(ranks), [memory_limit] * ranks
    ahead = dict.fromkeys(_in_flights(known, memory_limit, comm_seconds))
    for in_flight, gap in product(ahead, (0.3, 0.6, 1.0)):
        orders = [one_forward_one_backward(r, microbatches, in_flight[r], ActionKind.I) for r in range(ranks)]
        options = (known, comm_seconds, gap, released_by_input_grad)
        candidates.append(fill_weight_gradients(name, placement, microbatches, orders, limits, *options))
    return min(candidates, key=cost)


def _limited(
    name: str,
    per_rank: int,
    ranks: int,
    microbatches: int,
    times: StageTimes | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
) -> PipelineSchedule:
    limit = per_rank * ranks
    return zb_auto(ranks, microbatches, limit, times, comm_seconds, released_by_input_grad, name=name)


zb_1p, zb_2p = partial(_limited, "zb-1p", 1), partial(_limited, "zb-2p", 2)


def _in_flights(times: StageTimes, memory_limit: float, comm_seconds: float) -> Iterator[tuple[int, ...]]:
    """Choices of forwards ahead of the first backward, per rank: as in 1F1B, as many as fit before it arrives (rounded
    down), and the same rounded up."""
    ranks, limit = times.stages, int(memory_limit)
    yield tuple(min(limit, ranks - rank) for rank in range(ranks))
    for extra in (0.0, 0.999):
        yield tuple(max(1, min(limit, int(_fitting(times, rank, comm_seconds) + extra))) for rank in range(ranks))


def _fitting(times: StageTimes, rank: int, comm_seconds: float) -> float:
    """Forwards that ``rank`` can run between its first input and its first gradient, which has to return from the last
    rank."""
    hops = times.stages - 1 - rank
    away = sum(times.forward[rank:]) + sum(times.input_grad[rank + 1 :]) + 2 * hops * comm_seconds
    pace = max(times.forward[: rank + 1])
    return away / pace if pace else float(times.stages)


def _2p_bubble(case: EqualStages) -> Any:
    """As zb-h2; the memory of 2p activations limits how many weight gradients are deferred."""
    return deferred_bubble(case, (2 * case.p - 1) / max(1 - case.released, 1e-9))


ONE_P_FORMS = ClosedForms(bubble=h1_bubble, in_flight=lambda p, m, v, r: min(m, p), pace=h1_pace, text=_H1_TEXT)
TWO_P_FORMS = ClosedForms(
    bubble=_2p_bubble,
    in_flight=lambda p, m, v, r: min(m, 2 * p),
    last_end=last_rank_end,
    text=H2_FORMS.text,
)

# -- ZB-V: two chunks per rank, stage r on the way down and stage 2p-1-r on the way back, in the memory of 1F1B
# Forwards and input gradients have a fixed order; weight gradients fill the waits within the memory limit (Qi et al.
# 2023, arXiv 2401.10241, appendix).


def zbv(ranks: int, microbatches: int, times: StageTimes | None = None, comm_seconds: float = 0.0) -> PipelineSchedule:
    """No bubble for F = I = W and m >= 2p-1, with the 2p chunks of memory that 1F1B has."""
    orders = [_zbv_order(ranks, rank, microbatches) for rank in range(ranks)]
    known, limits = times or equal_stages(2 * ranks), [2 * ranks] * ranks
    return fill_weight_gradients("zbv", v_placement(ranks), microbatches, orders, limits, known, comm_seconds)


def _zbv_order(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Fills the way down, then the way back, then one forward and one backward of each in turn."""
    down, back = rank, 2 * ranks - 1 - rank
    warmup = [(F, down)] * (2 * (ranks - rank) - 1) + [(F, back), (F, down)] * rank
    warmup += [(F, back), (I, back)] * (ranks - rank)

    def endless() -> Iterator[tuple[ActionKind, int]]:
        yield from warmup
        while True:
            yield from ((F, down), (I, down), (F, back), (I, back))

    order: list[Action] = []
    done = dict.fromkeys(((F, down), (F, back), (I, down), (I, back)), 0)
    for kind, stage in endless():
        if done[kind, stage] < microbatches:
            order.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1
        if len(order) == 4 * microbatches:
            break
    return order


# Exact for F = I = W and c = 0, otherwise fitted to the simulator; W <= F, W <= I and short messages are assumed.


def _zbv_bubble(case: EqualStages) -> Any:
    """0 for F = I = W (Qi et al. 2023); with fewer microbatches than 2p-1 the pipeline never fills."""
    p, m = case.p, case.m
    unfilled = maximum(0, maximum(2 * p - 1 - m, 4 * (p - m) - 1)) * (p > 1)
    return unfilled * (case.F + case.I + case.W) / 3 + _zbv_waits(case)


def _zbv_waits(case: EqualStages) -> Any:
    """Idle seconds of the first rank in a full pipeline."""
    F, I, W = case.F, case.I, case.W  # noqa: E741
    uneven = maximum(maximum(F, I), W) - minimum(minimum(F, I), W)
    return (case.p - 1) * (2 * uneven + 6 * case.c)


def _zbv_last_end(case: EqualStages) -> Any:
    """In a full pipeline each rank ends later than the one before, by two weight gradients less an input gradient and a
    message."""
    return _zbv_waits(case) + (case.p - 1) * maximum(0.0, 2 * case.W - case.I - case.c)


ZBV_FORMS = ClosedForms(
    bubble=_zbv_bubble,
    in_flight=lambda p, m, v, r: min(2 * m, 2 * p),
    is_exact=lambda case: case.is_even,
    last_end=_zbv_last_end,
    text="max(0, 2·p−1−m, 4·(p−m)−1)/(6·m)",
)
