"""The pipeline schedules: one record of facts each. All other code reads the record and never compares names.

To add one: a file in ``pipeline/builders`` (its order of actions, its closed forms) and a record here. A schedule of
another package is registered by `register`, or found by its entry point in the group ``shardwise.schedules``, which
every process that reads the name looks up, workers included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from shardwise.spec.errors import SpecError, nearest_name, shown

PLAIN = "1f1b"  # the default, and what a job without a pipeline is priced as
# Whether a pipeline rank waits for all others at the end of a step, or goes on to the next one.
StepEnds = Literal["together", "apart"]
ENTRY_POINTS = "shardwise.schedules"


@dataclass(frozen=True, kw_only=True)
class ScheduleRecord:
    """What is known of a pipeline schedule before it is built.

    ``builder`` and ``closed_forms`` are objects, or where to import them from ("package.module:name"). The builder is
    called with what it takes of ``ranks``, ``microbatches``, ``chunks``, ``ahead``, ``times``, ``comm_seconds``,
    ``memory_limit`` and ``released_by_input_grad``, and returns a `pipeline.PipelineSchedule`. Without a
    `pipeline.ClosedForms` bubbles and activations in flight are read off the built schedule: right, and slower to
    search.
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
    forwards_first: bool = False  # all forward passes before any backward pass
    hides_exchange: bool = False  # runs two microbatches side by side: overlaps the expert exchange with computation
    # Forward passes more before the first backward one where a framework runs the expert exchange of one microbatch
    # beside the computation of another: the two must not depend on each other.
    ahead_of_exchange: int = 0
    instead: str | None = None  # our engine does not run it: the schedule to use instead
    complexity: int = 2  # how much more there is to get right than in the simplest; the planner prefers less
    searched: bool = True
    in_jobs: bool = True  # a job may use it; the others are for comparison
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


def _own(name: str, builder: str, forms: str | None, source: str, **facts: Any) -> ScheduleRecord:
    """A record of this project; ``builder`` is "module:function" in ``pipeline/builders``, the ``forms`` beside it."""
    place = f"shardwise.pipeline.builders.{builder}"
    closed_forms = forms and f"{place.partition(':')[0]}:{forms}"
    return ScheduleRecord(name=name, builder=place, closed_forms=closed_forms, source=source, **facts)


_SPLIT: dict[str, Any] = {"splits_backward": True}
_FOLDED: dict[str, Any] = {"chunks": 2, "placement": "folded", "splits_backward": True}
_TABLE = (
    _own("sequential", "flush:sequential", "SEQUENTIAL_FORMS", "one microbatch at a time",
         repeats="always", searched=False, in_jobs=False),
    _own("gpipe", "flush:gpipe", "GPIPE_FORMS", "Huang et al. 2019 (arXiv 1811.06965): all m microbatches",
         forwards_first=True, repeats="always"),
    _own(PLAIN, "flush:one_f_one_b", "ONE_F_ONE_B_FORMS",
         "Narayanan et al. 2021 (arXiv 2104.04473) section 2.2: p − rank", complexity=0, repeats="always", lag=1),
    _own("interleaved", "flush:interleaved", "INTERLEAVED_FORMS",
         "Megatron-LM schedules: 2(p−rank−1) + (v−1)p + 1 chunks; rank 0: L(1 + (p−1)/(pv)) layers",
         # Megatron-LM, get_pp_rank_microbatches with overlap_moe_expert_parallel_comm.
         chunks=None, in_rounds=True, complexity=1, repeats="always", ahead_of_exchange=1),
    _own("zb-h1", "zero_bubble:zb_h1", "H1_FORMS",
         "Qi et al. 2023 (arXiv 2401.10241): the memory of 1F1B, p on every rank at most",
         **_SPLIT, repeats="always", lag=1),
    _own("zb-h2", "zero_bubble:zb_h2", "H2_FORMS", "Qi et al. 2023: 2p − 1", **_SPLIT, repeats="always"),
    # Built for a memory limit, the best of several orders, and priced like zb-h1 and zb-h2: not searched.
    _own("zb-1p", "zero_bubble:zb_1p", "ONE_P_FORMS", "Qi et al. 2023: limited to p", **_SPLIT, searched=False),
    _own("zb-2p", "zero_bubble:zb_2p", "TWO_P_FORMS", "Qi et al. 2023: limited to 2p", **_SPLIT, searched=False),
    _own("zb-auto", "zero_bubble:zb_auto", None, "the memory limit that is given",
         **_SPLIT, searched=False, in_jobs=False),
    _own("zbv", "zero_bubble:zbv", "ZBV_FORMS", "Qi et al. 2023: 2p chunks of half a stage",
         **_FOLDED, repeats="sometime"),
    _own("v-half", "building_block:v_half", "HALF_FORMS",
         "Qi et al. 2024 (arXiv 2405.15362): half of 1F1B, rounded up to a chunk",
         **_FOLDED, repeats="always", lag=1),
    _own("v-min", "building_block:v_min", "MIN_FORMS", "Qi et al. 2024: a third of 1F1B, rounded up to a chunk",
         **_FOLDED, repeats="always", lag=1),
    _own("dualpipe", "dualpipe:dualpipe", "FORMS", "DeepSeek DualPipe README: p + 1",
         placement="both ends", **_SPLIT, hides_exchange=True, instead="dualpipev", repeats="always"),
    _own("dualpipev", "dualpipe:dualpipev", "V_FORMS",
         "DeepSeek DualPipe README: PP + 1 chunks of the PP = 2p half stages",
         **_FOLDED, hides_exchange=True, repeats="always"),
)  # fmt: skip
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
    if name not in _RECORDS:
        _load_entry_points()
    if name not in _RECORDS:
        remedy = nearest_name(str(name), _RECORDS) or "choose one of " + ", ".join(job_schedules())
        raise SpecError("schedule", f"{shown(name)} is not a pipeline schedule", remedy)
    return _RECORDS[name]


def schedule_records() -> tuple[ScheduleRecord, ...]:
    """All schedules, those of other installed packages last."""
    _load_entry_points()
    return registered_schedules()


def registered_schedules() -> tuple[ScheduleRecord, ...]:
    """The schedules that this process has seen so far: those of this project, and of any job that was read."""
    return tuple(_RECORDS.values())


def own_schedules() -> tuple[ScheduleRecord, ...]:
    """The schedules of this project that a job may have."""
    return tuple(record for record in _TABLE if record.in_jobs)


def other_schedules() -> tuple[ScheduleRecord, ...]:
    """The schedules of other packages that this process has seen so far."""
    return registered_schedules()[len(_TABLE) :]


def job_schedules() -> tuple[str, ...]:
    """Names that a job may give."""
    return tuple(record.name for record in schedule_records() if record.in_jobs)


def searched_schedules(*, any_priced: bool = False) -> tuple[str, ...]:
    """Names that a search goes through, the simplest first; with ``any_priced``, then those that no engine runs."""
    records = [record for record in schedule_records() if record.searched and (record.runs or any_priced)]
    records.sort(key=lambda record: (not record.runs, record.forwards_first, record.complexity))
    return tuple(record.name for record in records)


def chosen_chunks_schedules() -> tuple[str, ...]:
    """Names of the schedules whose chunks per rank the user chooses."""
    return tuple(record.name for record in registered_schedules() if record.chooses_chunks)


@lru_cache(maxsize=1)
def _load_entry_points() -> None:
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        try:
            loaded = point.load()
        except Exception as error:  # whatever another package does when it is imported
            problem = f"entry point {point.name} ({point.value}) fails: {type(error).__name__}: {error}"
            raise SpecError(ENTRY_POINTS, problem, "repair or uninstall that package") from error
        for record in loaded if isinstance(loaded, Iterable) else (loaded,):
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
