"""Weight gradients scheduled where a rank would wait: they are not needed soon, so they fill the bubbles.

Given the order of forwards and input gradients on every rank, the actions are run in time (as the simulator
would), and a pending weight gradient goes in when the next action is not ready yet or when memory is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, one_copy
from shardwise.pipeline.times import StageTimes

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
    """``orders`` (forwards and input gradients, per rank) with the weight gradients put in.

    No rank starts a forward that would make it hold more than its limit while it can run a weight gradient
    instead; a forward counts 1, of which the input gradient gives ``released_by_input_grad`` back. A wait is
    filled when it lasts at least ``smallest_gap`` weight gradients.
    """
    ranks = [_Rank(order, limit, released_by_input_grad) for order, limit in zip(orders, limits)]
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
        if rank.pending and (rank.is_full or ready - now >= smallest_gap * rank.pending_seconds(times) > 0):
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


class _Rank:
    """How far a rank is, what it holds, and which weight gradients it could run."""

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

    def pending_seconds(self, times: StageTimes) -> float:
        return times.weight_grad[self.pending[0].stage]

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
    """When inputs arrive; an action with no arrival yet has a sender that has not started."""

    def __init__(self, placement: tuple[int, ...], times: StageTimes, comm_seconds: float) -> None:
        self.placement, self.comm_seconds = placement, comm_seconds
        self.seconds = {F: times.forward, I: times.input_grad, W: times.weight_grad}
        self.arrival: dict[Action, float] = {}
        self.sleeping: dict[Action, int] = {}
        self.link_free: dict[tuple[int, int], float] = {}

    def earliest(self, action: Action, now: float) -> tuple[float, bool]:
        """When the action's input is there, and whether that is certain or only the earliest possible time."""
        source = action.stage - 1 if action.kind is F else action.stage + 1
        if not 0 <= source < len(self.placement):
            return now, True
        if action in self.arrival:
            return self.arrival[action], True
        return now + self.seconds[action.kind][source] + self._hop(source, action.stage), False

    def send(self, action: Action, end: float) -> int | None:
        """Pass the result on; the rank that slept until it was sent, if one did."""
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
