"""Bubbles and activations in flight by formula, without building the schedule.

The formulas of a schedule are beside its builder (`builders`), as `ClosedForms`. A schedule without any is built and
simulated, or its actions are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.collectives.arrays import maximum
from shardwise.pipeline.schedule import PipelineSchedule, build, chunks_per_rank, equal_stages
from shardwise.pipeline.timeline import peak_activations, simulate
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import ScheduleRecord, StepEnds, imported, schedule_record


class EqualStages(NamedTuple):
    """A pipeline of equal stages; all but ``released`` may be numpy arrays."""

    p: Any  # ranks
    m: Any  # microbatches
    v: Any  # chunks (stages) per rank
    F: Any  # seconds of a stage's forward pass
    I: Any  # noqa: E741
    """Seconds of its input gradient."""
    W: Any  # seconds of its weight gradient
    c: Any  # seconds of a message between two stages
    released: float = 0.0  # the share of an activation that the input gradient frees

    @property
    def work(self) -> Any:
        """Seconds that a rank computes in a step."""
        return self.m * self.v * (self.F + self.I + self.W)

    @property
    def is_even(self) -> bool:
        """Whether all passes take equally long, and messages no time."""
        return bool(self.F == self.I == self.W and self.c == 0)


@dataclass(frozen=True, kw_only=True)
class ClosedForms:
    """The formulas of one schedule."""

    bubble: Callable[[EqualStages], Any]  # idle seconds of the longest rank if passes set the pace
    in_flight: Callable[[int, int, int, int], int]
    """Chunk activations that a rank holds at its peak, from p, m, v and the rank."""
    is_exact: Callable[[EqualStages], bool] = lambda case: False  # whether ``bubble`` equals the simulator
    any_messages: bool = False
    """Whether ``bubble`` is right for messages of any length; otherwise ``pace`` counts if it is longer."""
    pace: Callable[[EqualStages], Any] | None = None
    """Seconds of the longest rank if messages set the pace; None: `paced_by_messages`."""
    last_end: Callable[[EqualStages], Any] | None = None
    """Idle seconds from the first start of any rank to the last end, for schedules in which one rank starts first and
    another ends last. Ranks that end a step together wait so long, unless the bubble is longer."""
    text: str = ""
    """The bubble for people to read, as a share of the busy time if all passes take equally long and messages no
    time; divides(d, p) is 1 if d divides p."""


# -- Steps paced by messages, for equal stages -------------------------------------------------------
# A link leads from one rank to another and carries one message at a time. Once the first microbatch has made its round
# trip, every other microbatch adds at least its time on the busiest link; or, if the number in flight is limited, its
# share of a round trip. All arguments but names may be numpy arrays.


def messages_per_link(name: str, ranks: Any, chunks: Any) -> Any:
    """Messages of one microbatch over the busiest link, in one direction.

    If only two ranks interleave, each sends the other both activations and gradients, as neighbours in a V do.
    """
    if schedule_record(name).ends_meet:
        return chunks
    return chunks + (chunks - 1) * (ranks == 2)


def paced_by_messages(case: EqualStages, record: ScheduleRecord, by_round_trips: Any = 0.0) -> Any:
    """Seconds of the longest rank if it always waits for messages and never for passes.

    ``by_round_trips`` (`in_round_trips`) is the time added by microbatches that may enter only when another has
    returned. It is needed only if that limits a schedule more than its links and passes do.
    """
    p, m, v, c = case.p, case.m, case.v, case.c
    first_round_trip = p * v * (case.F + case.I) + case.W + 2 * (p - 1) * v * c
    entering = 2 if record.two_copies else 1  # one at each end
    by_links = maximum(0, m - entering) * messages_per_link(record.name, p, v) * c
    return first_round_trip + maximum(by_links, by_round_trips)


def in_round_trips(case: EqualStages, in_flight: Any, held: Any) -> Any:
    """Seconds added by a limit of ``in_flight`` chunks; ``held`` is how long the chunks of a microbatch are held."""
    return maximum(0.0, case.m - in_flight / case.v) * held / in_flight


def one_f_one_b_wait(p: Any, m: Any, there_and_back: Any, c: Any) -> Any:
    """Seconds that 1F1B waits for messages: the first round trip, then (p-1)/p of one for every further microbatch.

    Exact for any m; the known form 2(p-1)m/p + 2(p-2) is so only if p divides m. Of the microbatches that enter
    together, the second is the first to queue behind a message, unless the passes of a stage (``there_and_back``)
    take longer than the message.
    """
    messages = 2 * (p - 1) + 2 * ((m - 1) * (p - 1) // p)
    return messages * c + ((m - 1) % p == 1) * maximum(0.0, c - there_and_back)


def bubble_seconds(
    name: str,
    ranks: Any,
    microbatches: Any,
    chunks: Any = None,
    forward: Any = 1.0,
    input_grad: Any = 1.0,
    weight_grad: Any = 1.0,
    comm_seconds: Any = 0.0,
    released_by_input_grad: float = 0.0,
    ends: StepEnds = "apart",
) -> Any:
    """Idle seconds of a step (``Timeline.idle_seconds``), for equal stages.

    Times are for one stage (one chunk). All arguments but the name and ``ends`` may be numpy arrays.
    """
    v = chunks_per_rank(name) if chunks is None else chunks
    case = EqualStages(ranks, microbatches, v, forward, input_grad, weight_grad, comm_seconds, released_by_input_grad)
    record = schedule_record(name)
    forms = _forms(record)
    if forms is None:
        return _simulated_bubbles(name, case, ends)
    bubble = forms.bubble(case)
    if forms.last_end is not None and ends == "together":
        bubble = maximum(bubble, (ranks > 1) * forms.last_end(case))
    if forms.any_messages:
        return bubble
    pace = forms.pace(case) if forms.pace else paced_by_messages(case, record)
    return maximum(bubble, (ranks > 1) * (pace - case.work))


def bubble_formula(record: ScheduleRecord) -> str:
    """The bubble of a schedule as text in p, m and v; empty if it is simulated."""
    forms = _forms(record)
    return forms.text if forms is not None else ""


def bubble_is_exact(
    name: str,
    ranks: int,
    microbatches: int,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    comm_seconds: float = 0.0,
    ends: StepEnds = "apart",
) -> bool:
    """Whether ``bubble_seconds`` equals the simulator (equal stages, B = I + W, overlapped messages)."""
    forms = _forms(schedule_record(name))
    if ranks == 1 or forms is None:
        return True
    if ends == "together" and forms.last_end is not None and microbatches < 2 * ranks - 1:
        return False  # the pipeline never fills, and any rank may end last
    case = EqualStages(ranks, microbatches, chunks_per_rank(name), forward, input_grad, weight_grad, comm_seconds)
    return bool(forms.is_exact(case))


def peak_chunks_in_flight(
    name: str, ranks: int, microbatches: int, chunks: int | None, rank: int, ahead: int = 0
) -> int:
    """Activations of one chunk (stage) and microbatch that ``rank`` holds at its peak.

    Equal to the peak of the built schedule; built with times, zbv, zb-1p and zb-2p may hold less, but never more.
    Divide by the chunks per rank for microbatches of the whole rank. ``ahead`` is as in `build`.
    """
    if not 0 <= rank < ranks:
        raise SpecError("rank", f"{rank} is not one of the {ranks} pipeline ranks", f"give 0 to {ranks - 1}")
    v, forms = chunks_per_rank(name, chunks), _forms(schedule_record(name))
    if forms is None:
        return _counted_peaks(name, ranks, microbatches, v, ahead)[rank]
    held = forms.in_flight(ranks, microbatches, v, rank)
    return min(microbatches * v, held + ahead) if ahead else held


def _forms(record: ScheduleRecord) -> ClosedForms | None:
    """The closed forms of a schedule; None if it has none."""
    forms: ClosedForms | None = imported(record.closed_forms)
    return forms


def _simulated_bubbles(name: str, case: EqualStages, ends: StepEnds) -> Any:
    if not any(getattr(value, "ndim", 0) for value in case):
        return _simulated_bubble(name, case, ends)
    import numpy as np

    columns = np.broadcast_arrays(*case)
    rows = zip(*(column.ravel().tolist() for column in columns))
    return np.array([_simulated_bubble(name, EqualStages(*row), ends) for row in rows]).reshape(columns[0].shape)


@lru_cache(maxsize=65536)
def _simulated_bubble(name: str, case: EqualStages, ends: StepEnds) -> float:
    if case.p == 1:
        return 0.0
    schedule = _built(name, int(case.p), int(case.m), int(case.v))
    return simulate(schedule, equal_stages(schedule.stages, case.F, case.I, case.W), case.c).idle_seconds(ends)


@lru_cache(maxsize=4096)
def _counted_peaks(name: str, ranks: int, microbatches: int, chunks: int, ahead: int) -> tuple[int, ...]:
    return tuple(map(round, peak_activations(_built(name, ranks, microbatches, chunks, ahead))))


@lru_cache(maxsize=64)
def _built(name: str, ranks: int, microbatches: int, chunks: int, ahead: int = 0) -> PipelineSchedule:
    """The schedule with microbatches rounded up to whole rounds: a search also prices batches that do not divide into
    rounds, and drops them later."""
    rounds = schedule_record(name).rounds(ranks)
    return build(name, ranks, -(-max(1, microbatches) // rounds) * rounds, chunks, ahead=ahead)
