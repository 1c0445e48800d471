"""The labs: what each asks, how it is run, what it found, and the page of that. Imports torch only when one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import import_module
from typing import Any, Literal

from shardwise.launch.pool import Pool
from shardwise.report.console import picked, table, table_of
from shardwise.report.page import Line, Piece, paged
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.units import counted, readable_bytes, readable_seconds, readable_share

# -- theory beside measurement, and whether they agree -----------------------------------------------

Unit = Literal["", "bytes", "seconds", "share"]
WRONG = 10.0  # factor by which a planted theory is wrong


class Relation(Enum):
    """How a measurement must relate to the theory; the sign is for tables."""

    EQUAL = "="
    AT_LEAST = "≥"
    AT_MOST = "≤"


@dataclass(frozen=True)
class LabFinding:
    """A number that theory predicts, and what was measured."""

    what: str
    expected: float
    measured: float
    tolerance: float  # relative to the expected number; 0 is exact
    why: str  # where the theory comes from
    relation: Relation = Relation.EQUAL
    unit: Unit = ""
    timed: bool = False  # it depends on the machine's speed

    @property
    def holds(self) -> bool:
        """False if either is NaN."""
        room = self.tolerance * abs(self.expected)
        above, below = self.measured >= self.expected - room, self.measured <= self.expected + room
        if self.relation is Relation.AT_LEAST:
            return above
        return below if self.relation is Relation.AT_MOST else above and below

    def planted(self) -> LabFinding:
        """The same under a theory that is wrong by a factor of ten, which every lab must notice."""
        at_most = self.relation is Relation.AT_MOST
        return replace(self, expected=self.expected / WRONG if at_most else WRONG * self.expected + 1)

    def shown(self, number: float) -> str:
        match self.unit:
            case "bytes":
                return readable_bytes(number) if number >= 1e5 else f"{number:,.0f} B"
            case "seconds":
                return readable_seconds(number)
            case "share":
                return readable_share(number)
            case _:
                return f"{number:,.0f}" if number == int(number) else f"{number:.4g}"

    def to_dict(self) -> dict[str, Any]:
        return {
            **picked(self, "what", "expected", "measured", "tolerance"),
            "relation": self.relation.name.lower().replace("_", " "),
            **picked(self, "unit", "timed", "why", "holds"),
        }


@dataclass(frozen=True)
class LabReport:
    """What a lab shows and finds."""

    pieces: tuple[Piece, ...]  # what teaches: drawings and tables
    findings: tuple[LabFinding, ...]
    files: dict[str, str] = field(default_factory=dict)  # pictures and traces, by name

    @property
    def contradictions(self) -> tuple[LabFinding, ...]:
        return tuple(finding for finding in self.findings if not finding.holds)

    def planted(self, number: int | None = None) -> LabReport:
        """With a wrong theory for every finding, or for one of them."""
        wrong = (
            finding.planted() if number in (None, place) else finding for place, finding in enumerate(self.findings)
        )
        return replace(self, findings=tuple(wrong))


# -- the labs ----------------------------------------------------------------------------------------

# What workers import, loaded once so that each starts quickly.
PRELOAD = ("torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "shardwise.labs.ranks")


@dataclass(frozen=True)
class LabSetup:
    """What a lab is given."""

    pool: Pool  # runs functions on processes
    short: bool = False  # measures less of the same, for tests
    on_progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Lab:
    """A lab; the module of its name has ``run(setup)``."""

    name: str
    title: str
    asks: str  # what one learns
    processes: int

    def run(self, setup: LabSetup) -> LabReport:
        module = import_module(f"shardwise.labs.{self.name.replace('-', '_')}")
        report: LabReport = module.run(setup)
        return report


LABS = (
    Lab("primitives", "The nine collectives", "what does each rank hold before and after?", 4),
    Lab("pipeline", "Pipeline bubbles", "how much of a step does each schedule wait?", 4),
    Lab("all-reduce", "All-reduce", "ring, tree or hierarchical, and how does a step hide it?", 4),
    Lab("zero", "DDP against ZeRO-1, 2 and 3", "what is kept, what is sent, and what does prefetch save?", 4),
    Lab("tensor", "Tensor and sequence parallelism by hand", "is it the engine's, to the rounding?", 4),
    Lab("experts", "Expert routing", "what do skewed tokens cost the busiest rank?", 4),
    Lab("ring-attention", "Ring attention", "what grows with the length, and what with its square?", 4),
    Lab("scaling", "Strong and weak scaling", "what is left of N times the speed?", 4),
    Lab("parameter-server", "Parameter server on Ray against all-reduce", "whose link is the bottleneck?", 3),
)


def lab_named(name: str) -> Lab:
    labs = {lab.name: lab for lab in LABS}
    if name not in labs:
        raise SpecError("lab", f"{shown(name)} is not a lab", nearest_name(name, labs) or "`shardwise lab` lists them")
    return labs[name]


@contextmanager
def own_setup(*, short: bool, on_progress: Callable[[str], None]) -> Iterator[LabSetup]:
    """A setup with processes of its own."""
    with Pool(PRELOAD) as pool:
        yield LabSetup(pool, short, on_progress)


# -- pages, and the same as plain data ---------------------------------------------------------------


@paged
def lab_page(lab: Lab, report: LabReport) -> Iterator[Piece | str]:
    """Drawings, then theory beside measurement: first what was counted, then what was timed."""
    yield Line(f"{lab.title}: {lab.asks}\n", "bold")
    yield from report.pieces
    for title, timed in (("Theory beside what was counted", False), ("Theory beside what was timed", True)):
        chosen = [finding for finding in report.findings if finding.timed is timed]
        if chosen:
            yield _judged(title, chosen)
            yield from (f"  {reason}" for reason in dict.fromkeys(finding.why for finding in chosen))
            yield ""
    wrong, findings = len(report.contradictions), counted(len(report.findings), "finding")
    yield Line(f"{wrong} of {findings} contradict the theory." if wrong else f"All {findings} hold.", "bold")


def _judged(title: str, findings: Sequence[LabFinding]) -> Piece:
    rows = [
        (
            finding.what,
            f"{finding.relation.value} {finding.shown(finding.expected)}",
            finding.shown(finding.measured),
            readable_share(finding.tolerance, 0 if finding.tolerance in (0, 1) or finding.tolerance > 0.009 else 3),
            "holds" if finding.holds else "CONTRADICTED",
        )
        for finding in findings
    ]
    return table(title, ("", "theory", "measured", "allowed", "verdict"), rows, optional=("allowed",))


def lab_data(lab: Lab, report: LabReport) -> dict[str, Any]:
    return {
        "lab": lab.name,
        "holds": not report.contradictions,
        **picked(report, "findings"),
        "files": sorted(report.files),
    }


@paged
def labs_page() -> Iterator[Piece | str]:
    columns = {"lab": lambda lab: lab.name, "what one learns": lambda lab: f"{lab.title}: {lab.asks}"}
    yield table_of("Labs: theory beside measurement, on this machine", LABS, columns, numbers_from=2)
    yield "`shardwise lab NAME` runs one in under two minutes; `docs/labs` has a page for each."


def labs_data() -> list[dict[str, Any]]:
    return [{"lab": lab.name, **picked(lab, "title", "asks", "processes")} for lab in LABS]
