"""What a lab has found: theory beside measurement, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from shardwise.report.page import Piece
from shardwise.spec.units import readable_bytes, readable_seconds, readable_share

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
    tolerance: float
    """Relative to the expected number; 0 is exact."""
    why: str
    """Where the theory comes from."""
    relation: Relation = Relation.EQUAL
    unit: Unit = ""
    timed: bool = False
    """It depends on the machine's speed."""

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
            "what": self.what,
            "expected": self.expected,
            "measured": self.measured,
            "tolerance": self.tolerance,
            "relation": self.relation.name.lower().replace("_", " "),
            "unit": self.unit,
            "timed": self.timed,
            "why": self.why,
            "holds": self.holds,
        }


@dataclass(frozen=True)
class LabReport:
    """What a lab shows and finds."""

    pieces: tuple[Piece, ...]
    """What teaches: drawings and tables."""
    findings: tuple[LabFinding, ...]
    files: dict[str, str] = field(default_factory=dict)
    """Pictures and traces, by name."""

    @property
    def contradictions(self) -> tuple[LabFinding, ...]:
        return tuple(finding for finding in self.findings if not finding.holds)

    def planted(self, number: int | None = None) -> LabReport:
        """With a wrong theory for every finding, or for one of them."""
        wrong = (
            finding.planted() if number in (None, place) else finding for place, finding in enumerate(self.findings)
        )
        return replace(self, findings=tuple(wrong))
