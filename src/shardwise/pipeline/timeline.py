"""When every action of a schedule runs: its simulation, activations held, a drawing and a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.pipeline.schedule import (
    Action,
    ActionKind,
    InvalidPipelineSchedule,
    PipelineSchedule,
    StageTimes,
    durations,
)
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import StepEnds


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs; entry [rank][i] belongs to ``schedule.actions[rank][i]``, in seconds."""

    schedule: PipelineSchedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    arrivals: tuple[tuple[float, ...], ...]
    """When the result reaches the rank that needs it next: at its end, unless a message carries it there."""
    busy: tuple[float, ...]  # seconds that each rank computes, without messages

    @property
    def makespan_seconds(self) -> float:
        """From the first action of any rank to the last end of any rank."""
        return max(self._last_ends()) - min(self._first_starts())

    @property
    def longest_rank_seconds(self) -> float:
        """The cost of a step in the zero-bubble papers: each rank starts its next step when its own is over, so that
        a step which is skewed over the ranks costs only its longest rank (Qi et al. 2023, arXiv 2401.10241, section 4
        and Table 5)."""
        return max(end - start for start, end in zip(self._first_starts(), self._last_ends()))

    def step_seconds(self, ends: StepEnds) -> float:
        """Seconds from one step to the next."""
        return self.makespan_seconds if ends == "together" else self.longest_rank_seconds

    def idle_seconds(self, ends: StepEnds) -> float:
        """``step_seconds`` minus the mean computation of a rank."""
        return self.step_seconds(ends) - sum(self.busy) / len(self.busy)

    @property
    def bubble_seconds(self) -> float:
        """The bubble of those papers, in which ranks end a step apart."""
        return self.idle_seconds("apart")

    @property
    def bubble_rate(self) -> float:
        """1 - m(F + I + W)/cost (Qi et al. 2023, section 5.3): the longest rank over the mean computation."""
        cost = self.longest_rank_seconds
        return self.bubble_seconds / cost if cost else 0.0

    def _first_starts(self) -> list[float]:
        return [own[0] for own in self.starts if own]

    def _last_ends(self) -> list[float]:
        return [own[-1] for own in self.ends if own]


# -- Activations held for the backward pass ----------------------------------------------------------
# The activation of a microbatch on a stage is held from the start of its forward to the end of its backward, or of its
# weight gradient if the backward is split.


def peak_activations(schedule: PipelineSchedule) -> tuple[float, ...]:
    """The most activations of a stage and microbatch that each rank holds at any time.

    A rank runs one action at a time, so that only the order of its actions matters.
    """
    return tuple(max((held for _, held in _levels(actions)), default=0.0) for actions in schedule.actions)


def live_activations(timeline: Timeline) -> tuple[tuple[tuple[float, float], ...], ...]:
    """How many activations each rank holds over time, as steps (seconds, held from then on)."""
    steps = []
    for actions, starts, ends in zip(timeline.schedule.actions, timeline.starts, timeline.ends):
        levels = zip(_levels(actions), starts, ends)
        steps.append(
            tuple((start if action.kind is ActionKind.F else end, held) for (action, held), start, end in levels)
        )
    return tuple(steps)


def _levels(actions: Sequence[Action]) -> Iterator[tuple[Action, float]]:
    """Every action, and what its rank holds once a forward has started, or any other action has ended."""
    change = {ActionKind.F: 1.0, ActionKind.B: -1.0, ActionKind.I: 0.0, ActionKind.W: -1.0}
    held = 0.0
    for action in actions:
        held += change[action.kind]
        yield action, held


def draw_timeline(timeline: Timeline, max_width: int = 160) -> str:
    """A small timeline as text: one row per rank, time to the right.

    ``F0`` is the forward of microbatch 0, in lower case on all but the rank's first stage; dots are idle time. Every
    label fits, unless that takes more than ``max_width`` characters.
    """
    schedule = timeline.schedule
    width = min(max_width, _full_width(timeline))
    start_of_all = min(own[0] for own in timeline.starts if own)
    scale = width / (timeline.makespan_seconds or 1.0)
    lines = [
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches, "
        f"{timeline.makespan_seconds:.4g} s, bubble {timeline.bubble_rate:.1%}"
    ]
    margin = len(str(schedule.ranks - 1))
    for rank, actions in enumerate(schedule.actions):
        row = ["."] * width
        first_stage = min(schedule.stages_of(rank), default=0)
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank]):
            left, right = round((start - start_of_all) * scale), round((end - start_of_all) * scale)
            row[left:right] = _label(action, first_stage).ljust(right - left, "-")[: right - left]
        lines.append(f"{rank:>{margin}} {''.join(row)}")
    return "\n".join(lines)


def _label(action: Action, first_stage: int) -> str:
    letter = str(action.kind) if action.stage == first_stage else action.kind.lower()
    return f"{letter}{action.microbatch}"


def _full_width(timeline: Timeline) -> int:
    """The width at which even the shortest action has room for its label and a separator."""
    span = timeline.makespan_seconds

    def needed() -> Iterator[float]:
        for actions, starts, ends in zip(timeline.schedule.actions, timeline.starts, timeline.ends):
            for action, start, end in zip(actions, starts, ends):
                if end > start:
                    yield (len(_label(action, 0)) + 1) * span / (end - start)

    return max(1, round(max(needed(), default=1.0)))


_COLOURS = {ActionKind.F: "good", ActionKind.B: "bad", ActionKind.I: "bad", ActionKind.W: "yellow"}


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Chrome trace events (for Perfetto or chrome://tracing), in microseconds: a thread per rank with a slice per
    action, and a counter of the activations it holds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": timeline.schedule.name}}
    ]
    for rank, actions in enumerate(timeline.schedule.actions):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank]):
            events.append(
                {
                    "ph": "X",
                    "name": f"{action.kind}{action.microbatch}",
                    "cat": action.kind.words,
                    "cname": _COLOURS[action.kind],
                    "pid": 0,
                    "tid": rank,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    for rank, steps in enumerate(live_activations(timeline)):
        counter = {"ph": "C", "name": f"activations of rank {rank}", "pid": 0, "tid": rank}
        events += [{**counter, "ts": at * 1e6, "args": {"held": held}} for at, held in steps]
    return events


# -- Simulation --------------------------------------------------------------------------------------
# Each rank runs its actions in order, each as early as its inputs allow. A link leads from one rank to another and
# carries one message at a time, in the order of the actions that send them.

F, W = ActionKind.F, ActionKind.W
_NEVER = -1.0


def simulate(schedule: PipelineSchedule, times: StageTimes, comm_seconds: float | Sequence[float] = 0.0) -> Timeline:
    """The timeline of a ``schedule`` that the verifier accepts.

    ``comm_seconds`` is how long a message between neighbouring stages on different ranks occupies its link: one number,
    or one per boundary. The receiver waits for its arrival.
    """
    comm = durations("comm_seconds", comm_seconds, schedule.stages - 1, "boundary between stages")
    if times.stages != schedule.stages:
        problem = f"{times.stages} stages, but the schedule has {schedule.stages}"
        raise SpecError("times", problem, "give one time per stage")
    run = _Run(schedule, times, comm)
    run.to_the_end()
    starts, ends, arrivals = (tuple(map(tuple, column)) for column in (run.starts, run.ends, run.arrivals))
    return Timeline(schedule, starts, ends, arrivals, tuple(run.busy))


class _Run:
    """The state of one simulation.

    ``ready[2s][j]`` is when the input of the forward of microbatch j on stage s arrives, ``ready[2s + 1][j]`` that of
    its backward; ``links[rank][other]`` is when the link from one rank to another is free.
    """

    def __init__(self, schedule: PipelineSchedule, times: StageTimes, comm: tuple[float, ...]) -> None:
        stages, m, ranks = schedule.stages, schedule.microbatches, schedule.ranks
        self.schedule, self.comm = schedule, comm
        self.seconds = {
            ActionKind.F: times.forward,
            ActionKind.B: times.backward,
            ActionKind.I: times.input_grad,
            ActionKind.W: times.weight_grad,
        }
        self.ready = [[_NEVER] * m for _ in range(2 * stages)]
        self.ready[0] = [0.0] * m
        self.ready[2 * stages - 1] = [0.0] * m
        self.waiting: dict[tuple[int, int], int] = {}
        self.starts: list[list[float]] = [[] for _ in range(ranks)]
        self.ends: list[list[float]] = [[] for _ in range(ranks)]
        self.arrivals: list[list[float]] = [[] for _ in range(ranks)]
        self.busy = [0.0] * ranks
        self.free = [0.0] * ranks
        self.links = [[0.0] * ranks for _ in range(ranks)]
        self.runnable = list(range(ranks))

    def to_the_end(self) -> None:
        while self.runnable:
            self._advance(self.runnable.pop())
        for (channel, microbatch), rank in self.waiting.items():
            action = self.schedule.actions[rank][len(self.ends[rank])]
            what = "gradient" if channel % 2 else "input"
            raise InvalidPipelineSchedule(
                f"deadlock: rank {rank} waits before {action} for the {what} of microbatch {microbatch}"
            )

    def _advance(self, rank: int) -> None:
        """Runs ``rank`` until it waits for a message that has not been sent yet."""
        ready, waiting, seconds = self.ready, self.waiting, self.seconds
        starts, ends, arrivals = self.starts[rank], self.ends[rank], self.arrivals[rank]
        now, busy = self.free[rank], self.busy[rank]
        last, actions = self.schedule.stages - 1, self.schedule.actions[rank]
        for position in range(len(ends), len(actions)):
            kind, stage, j = actions[position]
            forward = kind is F
            target = -1
            if kind is not W:
                channel = 2 * stage + (not forward)
                arrived = ready[channel][j]
                if arrived < 0.0:
                    waiting[channel, j] = rank
                    break
                if arrived > now:
                    now = arrived
                if not forward:
                    target = stage - 1
                elif stage < last:
                    target = stage + 1
            pass_seconds = seconds[kind][stage]
            end = arrival = now + pass_seconds
            starts.append(now)
            ends.append(end)
            busy += pass_seconds
            now = end
            if target >= 0:
                arrival = self._send(rank, self.schedule.rank_of(target, j), min(stage, target), end)
                channel = 2 * target + (not forward)
                ready[channel][j] = arrival
                if (channel, j) in waiting:
                    self.runnable.append(waiting.pop((channel, j)))
            arrivals.append(arrival)
        self.free[rank], self.busy[rank] = now, busy

    def _send(self, sender: int, receiver: int, boundary: int, end: float) -> float:
        """When a message that is ready to be sent at ``end`` arrives."""
        if sender == receiver:
            return end
        links = self.links[sender]
        links[receiver] = arrival = max(end, links[receiver]) + self.comm[boundary]
        return arrival
