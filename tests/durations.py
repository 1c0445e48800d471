"""How long quick tests take, kept in durations.json (`make durations` writes it, on two idle cores).

A quick test that takes far longer than is kept of it, or far longer than a quick test may, fails. A busy machine makes
all tests slower: what a test takes is divided by how much longer than kept this process's tests have taken so far. It
is also busy in bursts, and compiles kernels once: a test that took too long runs again, and its second run counts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol  # what plugins that run a test again call

FILE = Path(__file__).with_name("durations.json")
QUICK = 5.0  # seconds of a test for which nothing is kept
TOLERANCE = 4
EVIDENCE = 60.0  # kept seconds of tests that have run here, before which nothing is said of this machine
_KEPT_FROM = 1.0  # shorter tests are not worth a line


class Durations:
    def __init__(self, *, write: bool, file: Path = FILE, quick: float = QUICK, evidence: float = EVIDENCE) -> None:
        self._kept: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
        self._write, self._file, self._quick, self._evidence = write, file, quick, evidence
        self._seen: dict[str, float] = {}
        self._taken, self._expected = 0.0, 0.0  # by the tests that durations are kept of

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if self._too_long(item, reports):
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            if why := self._too_long(item, reports):
                call = next(report for report in reports if report.when == "call")
                call.outcome, call.longrepr = "failed", why
        if kept := self._kept.get(item.nodeid):
            self._taken, self._expected = self._taken + _seconds(reports), self._expected + kept
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _too_long(self, item: pytest.Item, reports: list[pytest.TestReport]) -> str | None:
        if item.get_closest_marker("slow") or not all(report.passed for report in reports):
            return None
        seconds = _seconds(reports)
        allowed = TOLERANCE * max(self._quick, self._kept.get(item.nodeid, 0.0))  # on an idle machine
        busy = max(1.0, self._taken / self._expected) if self._expected >= self._evidence else None
        if busy is None or seconds <= busy * allowed:
            return None
        return (
            f"took {seconds:.1f} s, {seconds / busy:.1f} s without what else runs here, where "
            f"{allowed:.0f} s are allowed: make it faster, mark it slow, or run `make durations`"
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._write and report.when != "teardown" and "slow" not in report.keywords:
            self._seen[report.nodeid] = self._seen.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._write and not hasattr(session.config, "workerinput"):  # the workers report to one process
            long = {name: round(taken, 1) for name, taken in sorted(self._seen.items()) if taken >= _KEPT_FROM}
            self._file.write_text(json.dumps(long, indent=0) + "\n", encoding="utf-8")


def _seconds(reports: list[pytest.TestReport]) -> float:
    return sum(report.duration for report in reports if report.when != "teardown")
