"""When every action of a schedule runs: each rank does its list in order, as early as its inputs allow.

A link leads from one rank to another, and carries one message after the other, in the order of the actions that send.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.pipeline.schedule import ActionKind, PipelineSchedule, StageTimes, checked_seconds
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

    ``comm_seconds``: a message between neighbouring stages on different ranks (one number, or one per boundary); as
    long, its link carries no other. Overlapped, the sender continues at once and the receiver waits for the arrival;
    ``blocking``, the sender waits too. ``overhead_seconds`` is added to every action (launching it), and is not busy
    time.
    """
    comm = boundary_seconds(schedule, comm_seconds)
    if times.stages != schedule.stages:
        raise SpecError(
            "times", f"{times.stages} stages, the schedule has {schedule.stages}", "give one time per stage"
        )
    (overhead,) = checked_seconds("overhead_seconds", [overhead_seconds])
    run = _Run(schedule, times, comm, blocking, overhead)
    run.to_the_end()
    return Timeline(
        schedule,
        tuple(map(tuple, run.starts)),
        tuple(map(tuple, run.ends)),
        tuple(map(tuple, run.arrivals)),
        tuple(run.busy),
    )


def boundary_seconds(schedule: PipelineSchedule, comm_seconds: float | Sequence[float]) -> tuple[float, ...]:
    """One message time per boundary between stages s and s+1."""
    count = schedule.stages - 1
    given = [comm_seconds] * count if isinstance(comm_seconds, (int, float)) else list(comm_seconds)
    if len(given) != count:
        raise SpecError("comm_seconds", f"{len(given)} boundaries, the schedule has {count}", "give one time each")
    return checked_seconds("comm_seconds", given)


class _Run:
    """The state of one simulation.

    ``ready[2s + backward][j]`` is when the input of stage s's forward (backward) of microbatch j is there, and
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
            seen = kind is F
            target = -1
            if kind is not W:
                channel = 2 * stage + (not seen)
                there = ready[channel][j]
                if there < 0.0:
                    waiting[channel, j] = rank
                    break
                if there > now:
                    now = there
                if seen:
                    target = stage + 1 if stage < last else -1
                else:
                    target = stage - 1
            pass_seconds = seconds[kind][stage]
            end = arrival = now + pass_seconds + overhead
            starts.append(now)
            ends.append(end)
            busy += pass_seconds
            now = end
            if target >= 0:
                arrival = self._send(rank, self.schedule.rank_of(target, j), min(stage, target), end)
                channel = 2 * target + (not seen)
                ready[channel][j] = arrival
                if self.blocking:
                    now = arrival
                if (channel, j) in waiting:
                    self.runnable.append(waiting.pop((channel, j)))
            arrivals.append(arrival)
        self.free[rank], self.busy[rank] = now, busy

    def _send(self, sender: int, receiver: int, boundary: int, end: float) -> float:
        """When a message that is there to be sent at ``end`` arrives."""
        if sender == receiver:
            return end
        links = self.links[sender]
        links[receiver] = arrival = max(end, links[receiver]) + self.comm[boundary]
        return arrival
