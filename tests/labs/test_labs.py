"""Every lab: its theory holds, a wrong one is noticed finding by finding, and its pages show what it prints.

A lab runs once, in its short form, for all of that.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cli.running import run
from shardwise.cli.lab import report_on
from shardwise.labs import parameter_server, ranks
from shardwise.labs.registry import LABS, Lab, LabFinding, LabReport, Relation, lab_named, lab_page, own_setup
from test_docs import refresh

ROOT = Path(__file__).parents[2]
TEXT = Namespace(json=False, markdown=False, csv=False, out=None)


def found(lab: Lab) -> LabReport:
    """On processes of its own, as the command runs it: what other tests leave in memory would be counted."""
    with own_setup(short=True, on_progress=lambda text: None) as setup:
        return lab.run(setup)


def printed(lab: Lab, report: LabReport) -> str:
    """As the command prints it to a page of the documentation."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(refresh().WIDTH), "NO_COLOR": "1"}):
        return "\n".join(line.rstrip() for line in lab_page(lab, report).text().strip("\n").splitlines())


def on_ray(lab: Lab) -> bool:
    return lab.name == "parameter-server"


# Starting a Ray takes longer than all other labs together.
ALL = [pytest.param(lab, marks=[pytest.mark.slow] * on_ray(lab), id=lab.name) for lab in LABS]


@pytest.mark.quick(1)
@pytest.mark.parametrize("lab", ALL)
def test_a_lab_holds_and_notices_every_contradiction(lab: Lab) -> None:
    check(lab, found(lab))


def test_without_ray_the_servers_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_server, "is_installed", lambda name: False)
    lab = next(filter(on_ray, LABS))
    report = found(lab)
    assert "pip install 'shardwise[ray]'" in printed(lab, report)
    check(lab, report)


def check(lab: Lab, report: LabReport) -> None:
    """It holds, every planted contradiction is noticed, and its pages show what it prints."""
    # Tests share cores with each other: what a clock has said is judged by the command alone.
    counted = replace(report, findings=tuple(one for one in report.findings if not one.timed))
    assert not counted.contradictions, "\n".join(map(str, counted.contradictions))
    assert status(lab, counted) == 0
    for number, finding in enumerate(counted.findings):
        assert counted.planted(number).contradictions == (finding.planted(),), finding
        assert status(lab, counted.planted(number)) == 1
    assert [one for one in report.planted().findings if one.holds] == []
    for name, text in report.files.items():
        assert name.endswith("-trace.json") and len(json.loads(text)["traceEvents"]) > 10
    commands = {f"shardwise lab {lab.name} --short": printed(lab, report)}
    assert refresh().main(["--check", f"docs/labs/{lab.name}*.md"], commands.__getitem__) == 0


@pytest.mark.slow
def test_without_root_a_lab_says_so_and_counts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "why_not", lambda: "emulate: needs root")
    lab = lab_named("all-reduce")
    report = found(lab)
    assert "emulate: needs root" in printed(lab, report)
    assert report.findings and not report.contradictions and not any(one.timed for one in report.findings)
    commands = {f"shardwise lab {lab.name} --short": printed(lab, report)}
    assert refresh().main(["--check", f"docs/labs/{lab.name}*.md"], commands.__getitem__) == 0


def status(lab: Lab, report: LabReport) -> int:
    """The exit status of the command that prints this report."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        ended = report_on(TEXT, lab, report)
    assert ("contradict the theory" in told.getvalue()) == (ended == 1)
    return ended


@pytest.mark.parametrize(
    ("relation", "measured", "holds"),
    [
        (Relation.EQUAL, 105.0, True), (Relation.EQUAL, 111.0, False), (Relation.EQUAL, 89.0, False),
        (Relation.AT_LEAST, 95.0, True), (Relation.AT_LEAST, 1e9, True), (Relation.AT_LEAST, 89.0, False),
        (Relation.AT_MOST, 105.0, True), (Relation.AT_MOST, 0.0, True), (Relation.AT_MOST, 111.0, False),
        (Relation.EQUAL, float("nan"), False), (Relation.AT_LEAST, float("nan"), False),
    ],
)  # fmt: skip
def test_a_finding_holds_within_its_tolerance(relation: Relation, measured: float, holds: bool) -> None:
    finding = LabFinding("x", 100.0, measured, 0.1, "because", relation)
    assert finding.holds == holds
    exact: Any = LabFinding("x", 100.0, 100.0, 0.0, "because", relation)
    assert exact.holds and not exact.planted().holds


def test_the_command_runs_a_lab_and_fails_on_a_wrong_theory(tmp_path: Path) -> None:
    right = run("lab", "primitives", "--short", "--json")
    assert right.status == 0 and '"holds": true' in right.out
    wrong = run("lab", "primitives", "--short", "--contradict", "--out", str(tmp_path), columns=80)
    assert wrong.status == 1 and "CONTRADICTED" in wrong.out
    note, told = wrong.err.splitlines()
    assert note == f"note: written to {tmp_path}: nothing: this lab draws in the terminal alone"
    assert told.startswith("shardwise: lab primitives: 27 findings of 27 contradict the theory, the first: ")


def test_labs_are_listed_and_a_wrong_name_is_refused(tmp_path: Path) -> None:
    listed = run("lab").out
    assert all(one.name in listed for one in LABS)
    wrong = run("lab", "primitive")
    assert wrong.status == 2 and wrong.err.count("\n") == 1 and "primitives" in wrong.err
    (tmp_path / "file").write_text("")
    assert run("lab", "primitives", "--out", str(tmp_path / "file")).status == 2


def test_every_lab_has_its_pages_in_both_languages() -> None:
    folder = ROOT / "docs" / "labs"
    wanted = {f"{name}{end}" for name in ("README", *(one.name for one in LABS)) for end in (".md", ".zh-CN.md")}
    assert {path.name for path in folder.glob("*.md")} == wanted
    for end in (".md", ".zh-CN.md"):
        text = (folder / f"README{end}").read_text(encoding="utf-8")
        assert [one.name for one in LABS if f"| `{one.name}` | [" not in text] == []


def test_what_is_written_by_hand_has_fifty_lines() -> None:
    text = (ROOT / "src" / "shardwise" / "labs" / "by_hand.py").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) <= 50
