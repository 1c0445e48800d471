"""Simulates a schedule: each rank runs its actions in order, each as early as its inputs allow.

A link leads from one rank to another and carries one message at a time, in the order of the actions that send them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.pipeline.schedule import ActionKind, PipelineSchedule, StageTimes, durations
from shardwise.pipeline.timeline import Timeline
from shardwise.pipeline.verifier import InvalidPipelineSchedule
from shardwise.spec.errors import SpecError

F, W = ActionKind.F, ActionKind.W
_NEVER = -1.0


def simulate(
    schedule: PipelineSchedule,
    times: StageTimes,
    comm_seconds: float | Sequence[float] = 0.0,
    blocking: bool = False,
    overhead_seconds: float = 0.0,
) -> Timeline:
    """The timeline of a ``schedule`` that the verifier accepts.

    ``comm_seconds`` is how long a message between neighbouring stages on different ranks occupies its link: one number,
    or one per boundary. The receiver waits for its arrival, and if ``blocking`` so does the sender.
    ``overhead_seconds`` is added to every action (its launch) and does not count as busy.
    """
    comm = durations("comm_seconds", comm_seconds, schedule.stages - 1, "boundary between stages")
    if times.stages != schedule.stages:
        problem = f"{times.stages} stages, but the schedule has {schedule.stages}"
        raise SpecError("times", problem, "give one time per stage")
    (overhead,) = durations("overhead_seconds", overhead_seconds, 1, "action")
    run = _Run(schedule, times, comm, blocking, overhead)
    run.to_the_end()
    starts, ends, arrivals = (tuple(map(tuple, column)) for column in (run.starts, run.ends, run.arrivals))
    return Timeline(schedule, starts, ends, arrivals, tuple(run.busy))


class _Run:
    """The state of one simulation.

    ``ready[2s + backward][j]`` is when the input of stage s's forward (backward) of microbatch j arrives, and
    ``links[rank][other]`` when the link from rank to the other is free.
    """

    def __init__(
        self, schedule: PipelineSchedule, times: StageTimes, comm: tuple[float, ...], blocking: bool, overhead: float
    ) -> None:
        stages, m, ranks = schedule.stages, schedule.microbatches, schedule.ranks
        self.schedule, self.comm, self.blocking, self.overhead = schedule, comm, blocking, overhead
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
        """Run ``rank`` until it waits for a message that has not been sent yet."""
        ready, waiting, seconds, overhead = self.ready, self.waiting, self.seconds, self.overhead
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
            end = arrival = now + pass_seconds + overhead
            starts.append(now)
            ends.append(end)
            busy += pass_seconds
            now = end
            if target >= 0:
                arrival = self._send(rank, self.schedule.rank_of(target, j), min(stage, target), end)
                channel = 2 * target + (not forward)
                ready[channel][j] = arrival
                if self.blocking:
                    now = arrival
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
