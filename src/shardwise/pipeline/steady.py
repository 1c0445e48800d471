"""Times many microbatches by simulating few of them: a full pipeline repeats itself.

Why this is exact: an action starts when the action before it on its rank has ended and the message it needs has
arrived. A message starts when it is sent and the message before it on its link, sent by an earlier action of the same
rank, has arrived. Let no action lag ``depth`` or more microbatches behind the newest one that its rank has begun. Then
every chain of such causes that leads back from a later microbatch passes through any ``depth`` successive ones. If all
actions and messages of these recur ``period`` microbatches later, all of them by the same ``shift``, then so does
everything that follows (by induction along the chains), including the draining of the pipeline:
T(m + period) = T(m) + shift, for every such m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from shardwise.pipeline.schedule import ActionKind, PipelineSchedule, StageTimes, build, equal_stages
from shardwise.pipeline.timeline import Timeline, simulate
from shardwise.spec.schedules import StepEnds, schedule_record

_FEW_ACTIONS = 5_000  # about 10 ms to simulate: not worth extrapolating
_UNITS_PER_PASS = 36  # bits: 1.5e-11 of the longest pass, and sums of 100,000 passes are exact


def simulated_pipeline(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    times: StageTimes,
    message_seconds: float | Sequence[float] = 0.0,
    *,
    ends: StepEnds,
    whole: bool = False,
    ahead: int = 0,
) -> tuple[float, Timeline | None]:
    """Seconds of a step, and its timeline; None if many microbatches were extrapolated from few.

    The schedule is the one that runs, which is built without times: weight gradients are placed as if all passes were
    equal. ``message_seconds`` is one number, or one per boundary between stages. ``whole`` never extrapolates.
    ``ahead`` is as in `build`.
    """
    pipeline = _Pipeline(name, ranks, chunks, *_in_units(times, message_seconds), ends, ahead)
    if not whole and 3 * times.stages * microbatches > _FEW_ACTIONS:
        seconds = pipeline.extrapolated(microbatches)
        if seconds is not None:
            return seconds, None
    timeline = pipeline.timeline(microbatches)
    return timeline.step_seconds(ends), timeline


def _in_units(times: StageTimes, message: float | Sequence[float]) -> tuple[StageTimes, tuple[float, ...]]:
    """Times rounded to multiples of one power of two, so that sums are exact and a recurring state is recognised."""
    messages = (message,) * (times.stages - 1) if isinstance(message, (int, float)) else tuple(message)
    columns = (times.forward, times.input_grad, times.weight_grad, times.backward, messages)
    longest = max(max(column, default=0.0) for column in columns)
    unit = 2.0 ** (math.frexp(longest)[1] - _UNITS_PER_PASS)
    rounded = [tuple(round(seconds / unit) * unit for seconds in column) for column in columns]
    return StageTimes(*rounded[:-1]), rounded[-1]


class _Pipeline:
    """One schedule with its times, for any number of microbatches."""

    def __init__(
        self, name: str, ranks: int, chunks: int, times: StageTimes, messages: tuple[float, ...], ends: StepEnds,
        ahead: int,
    ) -> None:  # fmt: skip
        self.record, self.ranks, self.chunks, self.ahead = schedule_record(name), ranks, chunks, ahead
        self.times, self.messages, self.ends = times, messages, ends

    def timeline(self, microbatches: int) -> Timeline:
        schedule = _schedule(self.record.name, self.ranks, microbatches, self.chunks, ahead=self.ahead)
        return simulate(schedule, self.times, self.messages)

    def seconds(self, microbatches: int) -> float:
        return self.timeline(microbatches).step_seconds(self.ends)

    def extrapolated(self, microbatches: int) -> float | None:
        """Seconds of a step from at most half of the microbatches; None if no repetition is found."""
        if self.record.repeats == "unknown":
            return None
        if self.record.forwards_first:
            # Both halves run at the pace of their slowest stage or message from the first microbatch on.
            first = self.seconds(1)
            return first + (microbatches - 1) * (self.seconds(2) - first)
        fewer = self._like(microbatches, 4 * self.record.lag * self.ranks)
        while 2 * fewer <= microbatches:
            timeline = self.timeline(fewer)
            repeated = repetition(timeline, _order_period(self.record.name, self.ranks, fewer, self.chunks))
            if repeated is not None:
                period, shift = repeated
                left = fewer - (fewer - microbatches) % period
                seconds = timeline.step_seconds(self.ends) if left == fewer else self.seconds(left)
                return seconds + (microbatches - left) // period * shift
            fewer = self._like(microbatches, 2 * fewer)
        return None

    def _like(self, microbatches: int, least: int) -> int:
        """At least ``least`` microbatches, with the remainder of ``microbatches`` over a round, or over two ends."""
        return least + (microbatches - least) % (self.ranks if self.record.in_rounds else 2)


def repetition(timeline: Timeline, order_period: int = 1) -> tuple[int, float] | None:
    """After how many microbatches the full pipeline repeats itself, and how much later; None if it does not.

    ``order_period``: after how many of those that enter at one end the order of actions repeats. Nothing before the
    last ``depth`` microbatches depends on the pipeline draining.
    """
    schedule = timeline.schedule
    copies = len(schedule.placements)
    own = schedule.microbatches // copies  # that enter at one end
    depth, moments = _depth(schedule), _moments(timeline)
    for period in range(order_period, own - 2 * depth + 1, order_period):
        until = own - depth - period
        shift = _common_shift(moments, range(until - depth, until), period)
        if shift is not None:
            return copies * period, shift
    return None


def _entering(schedule: PipelineSchedule) -> int:
    """Microbatches that enter at the first end; DualPipe numbers those of the other end after them."""
    return -(-schedule.microbatches // len(schedule.placements))


def _depth(schedule: PipelineSchedule) -> int:
    """One more than the most microbatches by which an action lags behind the newest that its rank has begun."""
    most, entering = 0, _entering(schedule)
    for actions in schedule.actions:
        newest = 0
        for action in actions:
            index = action.microbatch % entering
            newest = max(newest, index)
            most = max(most, newest - index)
    return most + 1


# For every microbatch, by kind, stage and the end where it entered: when the action starts and its result arrives.
_Moments = list[dict[tuple[ActionKind, int, int], tuple[float, float]]]


def _moments(timeline: Timeline) -> _Moments:
    entering = _entering(timeline.schedule)
    moments: _Moments = [{} for _ in range(entering)]
    for actions, starts, arrivals in zip(timeline.schedule.actions, timeline.starts, timeline.arrivals):
        for (kind, stage, microbatch), start, arrival in zip(actions, starts, arrivals):
            end, index = divmod(microbatch, entering)
            moments[index][kind, stage, end] = start, arrival
    return moments


def _common_shift(moments: _Moments, window: range, period: int) -> float | None:
    """How much later all actions of the window run ``period`` microbatches on; None if they differ."""
    shifts: set[float] = set()
    for index in window:
        later = moments[index + period]
        for action, (start, arrival) in moments[index].items():
            later_start, later_arrival = later.get(action, (math.inf, math.inf))
            shifts |= {later_start - start, later_arrival - arrival}
            if len(shifts) > 1:
                return None
    return shifts.pop()


_schedule = lru_cache(maxsize=64)(build)


@lru_cache(maxsize=256)
def _order_period(name: str, ranks: int, microbatches: int, chunks: int) -> int:
    """After how many microbatches the order of a schedule repeats, as far as ``microbatches`` of them show.

    Interleaving takes p at a time, most others one. Builders that place weight gradients in waits simulate the actions
    with all passes equal: once such a simulation is in the same state again, it continues in the same way.
    """
    record = schedule_record(name)
    if record.repeats == "always":
        return record.rounds(ranks)
    schedule = _schedule(name, ranks, microbatches, chunks)
    repeated = repetition(simulate(schedule, equal_stages(schedule.stages)))
    return repeated[0] if repeated else microbatches
