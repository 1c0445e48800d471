"""A lab's report as a page and as plain data; the list of all labs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.labs.findings import LabFinding, LabReport
from shardwise.labs.registry import LABS, Lab
from shardwise.report.console import table, table_of
from shardwise.report.page import Line, Piece, paged
from shardwise.spec.units import counted, readable_share


@paged
def lab_page(lab: Lab, report: LabReport) -> Iterator[Piece | str]:
    """Drawings, then theory beside measurement: first what was counted, then what was timed."""
    yield Line(f"{lab.title}: {lab.asks}\n", "bold")
    yield from report.pieces
    for title, timed in (("Theory beside what was counted", False), ("Theory beside what was timed", True)):
        chosen = [finding for finding in report.findings if finding.timed is timed]
        if chosen:
            yield _judged(title, chosen)
            yield from _reasons(chosen)
    yield Line(_verdict(report), "bold")


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


def _reasons(findings: Sequence[LabFinding]) -> Iterator[str]:
    """Each reason once, in the order of what it is for."""
    for reason in dict.fromkeys(finding.why for finding in findings):
        yield f"  {reason}"
    yield ""


def _verdict(report: LabReport) -> str:
    wrong = len(report.contradictions)
    findings = counted(len(report.findings), "finding")
    return f"All {findings} hold." if not wrong else f"{wrong} of {findings} contradict the theory."


def lab_data(lab: Lab, report: LabReport) -> dict[str, Any]:
    return {
        "lab": lab.name,
        "holds": not report.contradictions,
        "findings": [finding.to_dict() for finding in report.findings],
        "files": sorted(report.files),
    }


@paged
def labs_page() -> Iterator[Piece | str]:
    columns = {"lab": lambda lab: lab.name, "what one learns": lambda lab: f"{lab.title}: {lab.asks}"}
    yield table_of("Labs: theory beside measurement, on this machine", LABS, columns, numbers_from=2)
    yield "`shardwise lab NAME` runs one in under two minutes; `docs/labs` has a page for each."


def labs_data() -> list[dict[str, Any]]:
    return [{"lab": lab.name, "title": lab.title, "asks": lab.asks, "processes": lab.processes} for lab in LABS]
