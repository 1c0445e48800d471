"""What a lab has found: theory beside measurement, and whether the one contradicts the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from shardwise.report.page import Piece
from shardwise.spec.units import readable_bytes, readable_seconds, readable_share

Unit = Literal["", "bytes", "seconds", "share"]
WRONG = 10.0  # by how much a planted theory is wrong


class Relation(Enum):
    """How a measurement has to stand to the theory; the sign is for tables."""

    EQUAL = "="
    AT_LEAST = "≥"
    AT_MOST = "≤"


@dataclass(frozen=True)
class LabFinding:
    """One number of the theory and what was measured; ``tolerance`` is relative to the expected, 0 is to the byte.

    ``timed`` says that it depends on the machine's clock, ``why`` where the theory comes from.
    """

    what: str
    expected: float
    measured: float
    tolerance: float
    why: str
    relation: Relation = Relation.EQUAL
    unit: Unit = ""
    timed: bool = False

    @property
    def holds(self) -> bool:
        """False if either is NaN."""
        room = self.tolerance * abs(self.expected)
        above, below = self.measured >= self.expected - room, self.measured <= self.expected + room
        if self.relation is Relation.AT_LEAST:
            return above
        return below if self.relation is Relation.AT_MOST else above and below

    def planted(self) -> LabFinding:
        """The same under a theory that is wrong by a factor of ten: no lab may believe it."""
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
    """A lab that has run: ``pieces`` teach, ``findings`` judge, ``files`` are pictures and traces by their names."""

    pieces: tuple[Piece, ...]
    findings: tuple[LabFinding, ...]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def contradictions(self) -> tuple[LabFinding, ...]:
        return tuple(finding for finding in self.findings if not finding.holds)

    def planted(self, number: int | None = None) -> LabReport:
        """With a wrong theory for every finding, or for one of them."""
        wrong = (
            finding.planted() if number in (None, place) else finding for place, finding in enumerate(self.findings)
        )
        return replace(self, findings=tuple(wrong))
