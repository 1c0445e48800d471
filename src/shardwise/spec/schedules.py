"""The pipeline schedules: one record of facts each. All else asks the record and never compares names.

To add one: a file in ``pipeline/builders`` (its order of actions, its closed forms) and a record here. A schedule of
another package is registered by `register`, or found by its entry point in the group ``shardwise.schedules``, which
every process that meets the name looks up, workers included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from shardwise.spec.errors import SpecError, nearest_name, shown

PLAIN = "1f1b"  # the default, and what a job without a pipeline is priced as
ENTRY_POINTS = "shardwise.schedules"
_BUILDERS = "shardwise.pipeline.builders."


@dataclass(frozen=True, kw_only=True)
class ScheduleRecord:
    """What there is to know of a pipeline schedule before it is built.

    ``builder`` and ``closed_forms`` are objects, or where to import them from ("package.module:name"). The builder is
    called with what it takes of ``ranks``, ``microbatches``, ``chunks``, ``times``, ``comm_seconds``, ``memory_limit``
    and ``released_by_input_grad``, and returns a `pipeline.PipelineSchedule`. Without a `pipeline.ClosedForms` bubbles
    and activations in flight are read off the built schedule: right, and slower to search.
    """

    name: str
    builder: str | Callable[..., Any]
    source: str  # of the activations that it keeps
    closed_forms: str | Any | None = None
    chunks: int | None = 1  # stages per rank; None: the user's choice (``strategy.interleave``)
    # Rank r of p holds r, r+p, ... ("loop"); turns round at the end, so r and 2p-1-r ("folded"); or has one stage, and
    # a copy of that of its mirror, for half of the microbatches ("both ends").
    placement: Literal["loop", "folded", "both ends"] = "loop"
    splits_backward: bool = False  # weight gradients apart from input gradients
    in_rounds: bool = False  # takes a multiple of p microbatches
    forwards_first: bool = False  # all losses before any backward pass
    hides_exchange: bool = False  # runs two microbatches side by side: the exchange of experts under computation
    instead: str | None = None  # no engine of ours runs it: the schedule to use
    complexity: int = 2  # how much more there is to get right than in the simplest; the planner prefers less
    searched: bool = True
    in_jobs: bool = True  # may be a job's; the others are for comparison
    # The order of actions repeats: with every microbatch (or round); after some (found by simulation); or unknown.
    repeats: Literal["always", "sometime", "unknown"] = "unknown"
    lag: int = 2  # pipeline depths by which a microbatch's passes may be apart

    @property
    def runs(self) -> bool:
        """Whether our engine runs it."""
        return self.instead is None

    @property
    def chooses_chunks(self) -> bool:
        """Whether the user says how many stages a rank has."""
        return self.chunks is None

    @property
    def ends_meet(self) -> bool:
        """Whether the first and the last stage are on one rank."""
        return self.placement == "folded"

    @property
    def two_copies(self) -> bool:
        """Whether every rank holds the parameters of its mirror's stage too."""
        return self.placement == "both ends"

    def chunks_per_rank(self, ranks: int, chosen: int) -> int:
        """Stages of a rank; ``chosen`` is the user's choice, if it is one."""
        if self.chunks is None:
            return chosen
        return self.chunks if ranks > 1 else 1

    def rounds(self, ranks: int) -> int:
        """Microbatches that it takes at a time."""
        return ranks if self.in_rounds else 1

    def stages_of(self, rank: int, ranks: int, chunks: int) -> tuple[int, ...]:
        """The stages that a rank runs, in model order (of two copies, those of the first).

        Chunks in a loop: Narayanan et al. 2021, section 2.2; folded: Qi et al. 2024, arXiv 2405.15362.
        """
        turns = self.placement == "folded"
        return tuple(
            (chunk + 1) * ranks - 1 - rank if turns and chunk % 2 else chunk * ranks + rank for chunk in range(chunks)
        )


# fmt: off
_TABLE = (
    ScheduleRecord(
        name="sequential", builder=_BUILDERS + "flush:sequential", closed_forms=_BUILDERS + "flush:SEQUENTIAL_FORMS",
        source="one microbatch at a time", repeats="always", searched=False, in_jobs=False,
    ),
    ScheduleRecord(
        name="gpipe", builder=_BUILDERS + "flush:gpipe", closed_forms=_BUILDERS + "flush:GPIPE_FORMS",
        source="Huang et al. 2019 (arXiv 1811.06965): all m microbatches", forwards_first=True, repeats="always",
    ),
    ScheduleRecord(
        name=PLAIN, builder=_BUILDERS + "flush:one_f_one_b", closed_forms=_BUILDERS + "flush:ONE_F_ONE_B_FORMS",
        source="Narayanan et al. 2021 (arXiv 2104.04473) section 2.2: p − rank",
        complexity=0, repeats="always", lag=1,
    ),
    ScheduleRecord(
        name="interleaved", builder=_BUILDERS + "flush:interleaved",
        closed_forms=_BUILDERS + "flush:INTERLEAVED_FORMS",
        source="Megatron-LM schedules: 2(p−rank−1) + (v−1)p + 1 chunks; rank 0: L(1 + (p−1)/(pv)) layers",
        chunks=None, in_rounds=True, complexity=1, repeats="always",
    ),
    ScheduleRecord(
        name="zb-h1", builder=_BUILDERS + "zero_bubble:zb_h1", closed_forms=_BUILDERS + "zero_bubble:H1_FORMS",
        source="Qi et al. 2023 (arXiv 2401.10241): the memory of 1F1B, p on every rank at most",
        splits_backward=True, repeats="always", lag=1,
    ),
    ScheduleRecord(
        name="zb-h2", builder=_BUILDERS + "zero_bubble:zb_h2", closed_forms=_BUILDERS + "zero_bubble:H2_FORMS",
        source="Qi et al. 2023: 2p − 1", splits_backward=True, repeats="always",
    ),
    # Built for a memory limit, the best of several orders, and priced like zb-h1 and zb-h2: not searched.
    ScheduleRecord(
        name="zb-1p", builder=_BUILDERS + "zero_bubble:zb_1p", closed_forms=_BUILDERS + "zero_bubble:ONE_P_FORMS",
        source="Qi et al. 2023: limited to p", splits_backward=True, searched=False,
    ),
    ScheduleRecord(
        name="zb-2p", builder=_BUILDERS + "zero_bubble:zb_2p", closed_forms=_BUILDERS + "zero_bubble:TWO_P_FORMS",
        source="Qi et al. 2023: limited to 2p", splits_backward=True, searched=False,
    ),
    ScheduleRecord(
        name="zb-auto", builder=_BUILDERS + "zero_bubble:zb_auto", source="the memory limit that is given",
        splits_backward=True, searched=False, in_jobs=False,
    ),
    ScheduleRecord(
        name="zbv", builder=_BUILDERS + "v_shape:zbv", closed_forms=_BUILDERS + "v_shape:ZBV_FORMS",
        source="Qi et al. 2023: 2p chunks of half a stage",
        chunks=2, placement="folded", splits_backward=True, repeats="sometime",
    ),
    ScheduleRecord(
        name="v-half", builder=_BUILDERS + "v_shape:v_half", closed_forms=_BUILDERS + "v_shape:HALF_FORMS",
        source="Qi et al. 2024 (arXiv 2405.15362): half of 1F1B, rounded up to a chunk",
        chunks=2, placement="folded", splits_backward=True, repeats="sometime", lag=1,
    ),
    ScheduleRecord(
        name="v-min", builder=_BUILDERS + "v_shape:v_min", closed_forms=_BUILDERS + "v_shape:MIN_FORMS",
        source="Qi et al. 2024: a third of 1F1B, rounded up to a chunk",
        chunks=2, placement="folded", splits_backward=True, repeats="sometime", lag=1,
    ),
    ScheduleRecord(
        name="dualpipe", builder=_BUILDERS + "dualpipe:dualpipe", closed_forms=_BUILDERS + "dualpipe:FORMS",
        source="DeepSeek DualPipe README: p + 1",
        placement="both ends", splits_backward=True, hides_exchange=True, instead="dualpipev", repeats="always",
    ),
    ScheduleRecord(
        name="dualpipev", builder=_BUILDERS + "dualpipe:dualpipev", closed_forms=_BUILDERS + "dualpipe:V_FORMS",
        source="DeepSeek DualPipe README: PP + 1 chunks of the PP = 2p half stages",
        chunks=2, placement="folded", splits_backward=True, hides_exchange=True, repeats="always",
    ),
)
# fmt: on
_RECORDS: dict[str, ScheduleRecord] = {}


def register(record: ScheduleRecord) -> ScheduleRecord:
    """Makes a schedule known to all of the project in this process; the same record again changes nothing."""
    known = _RECORDS.get(record.name)
    if known is not None and known != record:
        raise SpecError("schedule", f"{shown(record.name)} is registered already, as another", "use another name")
    if record.placement == "folded" and (record.chunks or 1) % 2:
        problem = f"a folded {record.name} ends where it began after an even number of chunks, not {record.chunks}"
        raise SpecError("schedule", problem, 'give chunks=2, or placement="loop"')
    if record.two_copies and (record.runs or record.chunks != 1):
        problem = f"{record.name} keeps two copies of one stage per rank, which no engine of ours keeps equal"
        raise SpecError("schedule", problem, "name the schedule to use instead, and give chunks=1")
    _RECORDS[record.name] = record
    return record


for _record in _TABLE:
    register(_record)


def schedule_record(name: str) -> ScheduleRecord:
    """The record of a schedule; raises SpecError with the nearest name where there is none."""
    found = _RECORDS.get(name)
    if found is None:
        _load_entry_points()
        found = _RECORDS.get(name)
    if found is None:
        problem = f"{shown(name)} is not a pipeline schedule"
        close = nearest_name(str(name), _RECORDS) or "choose one of " + ", ".join(job_schedules())
        raise SpecError("schedule", problem, close)
    return found


def schedule_records() -> tuple[ScheduleRecord, ...]:
    """All schedules, those of other installed packages last."""
    _load_entry_points()
    return registered_schedules()


def registered_schedules() -> tuple[ScheduleRecord, ...]:
    """The schedules that this process has seen so far: those of this project, and of any job that was read."""
    return tuple(_RECORDS.values())


def own_schedules() -> tuple[ScheduleRecord, ...]:
    """The schedules of this project that a job may have."""
    return tuple(one for one in _TABLE if one.in_jobs)


def other_schedules() -> tuple[ScheduleRecord, ...]:
    """The schedules of other packages that this process has seen so far."""
    return registered_schedules()[len(_TABLE) :]


def job_schedules() -> tuple[str, ...]:
    """Names that a job may give."""
    return tuple(one.name for one in schedule_records() if one.in_jobs)


def searched_schedules(*, any_priced: bool = False) -> tuple[str, ...]:
    """Names that a search goes through, the simplest first; with ``any_priced``, then those that no engine runs."""
    records = [one for one in schedule_records() if one.searched and (one.runs or any_priced)]
    records.sort(key=lambda one: (not one.runs, one.forwards_first, one.complexity))
    return tuple(one.name for one in records)


def hiding_schedule() -> str:
    """The schedule to use to overlap the expert exchange."""
    return next(one.name for one in _TABLE if one.hides_exchange and one.runs)


def chosen_chunks_schedules() -> tuple[str, ...]:
    """Names of the schedules whose chunks per rank the user chooses."""
    return tuple(one.name for one in registered_schedules() if one.chooses_chunks)


@lru_cache(maxsize=1)
def _load_entry_points() -> None:
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        try:
            found = point.load()
        except Exception as error:  # whatever another package does when it is imported
            problem = f"entry point {point.name} ({point.value}) fails: {type(error).__name__}: {error}"
            raise SpecError(ENTRY_POINTS, problem, "repair or uninstall that package") from error
        for record in found if isinstance(found, Iterable) else (found,):
            if not isinstance(record, ScheduleRecord):
                problem = f"entry point {point.name} ({point.value}) is {shown(record)}"
                raise SpecError(ENTRY_POINTS, problem, "make it a ScheduleRecord, or several")
            register(record)


def imported(place: str | Any) -> Any:
    """What ``place`` ("package.module:name") names; anything but a string is itself."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
