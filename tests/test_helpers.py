"""What the tests themselves are made with: tables of cases, what a machine must have, the browser, limits of time."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

import pytest

import conftest
from browser import Browser, Page, require_browser
from durations import Durations
from required import require
from tables import table


def test_every_row_is_tried_and_those_that_fail_are_named() -> None:
    tried = []

    @table(("number", "name"), [(1, "one"), (2, "two"), (3, "three"), (4, "four")])
    def odd(number: int, name: str) -> None:
        tried.append(name)
        if number == 4:
            with pytest.raises(ValueError):
                pass
        assert number % 2

    with pytest.raises(AssertionError) as found:
        odd()
    assert tried == ["one", "two", "three", "four"]
    said = str(found.value).splitlines()
    assert said[0] == "2 of 4 rows fail:"
    assert said[1].startswith("number=2, name='two': AssertionError: ") and "test_helpers.py" in said[1]
    assert said[2].startswith("number=4, name='four': Failed: DID NOT RAISE")


def test_tables_above_each_other_and_fixtures() -> None:
    seen = []

    @table("first", "ab")
    @table("second", [1, 2])
    def check(first: str, second: int, tmp: str) -> None:
        seen.append((first, second, tmp))
        assert (first, second) != ("b", 1)

    assert list(inspect.signature(check).parameters) == ["tmp"]
    with pytest.raises(AssertionError, match=r"1 of 2 rows fail:\nfirst='b': .*1 of 2 rows fail:\nsecond=1: Ass"):
        check(tmp="here")
    assert seen == [("a", 1, "here"), ("a", 2, "here"), ("b", 1, "here"), ("b", 2, "here")]


def test_a_table_without_rows_fails() -> None:
    with pytest.raises(AssertionError, match="no rows"):
        table("row", [])(lambda row: None)()


def test_what_is_missing_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_REQUIRE", "cuda,emulate")
    require("emulate", None)
    with pytest.raises(pytest.fail.Exception, match="emulate, but: no root"):
        require("emulate", "no root")
    with pytest.raises(pytest.skip.Exception, match="no slurm"):
        require("slurm", "no slurm")


# `one` moves down by its own height when it has been aimed at for the first time; `other` is then under the mouse.
MOVING = """data:text/html,<button id=other style="display:none">other</button><button id=one>one</button><script>
window.pressed = [];
for (const each of document.querySelectorAll('button')) each.onclick = () => pressed.push(each.id);
one.scrollIntoView = () => requestAnimationFrame(() => other.style.display = 'block');
</script>"""
COVERED = """data:text/html,<button id=one>one</button><p style="position:fixed;inset:0">above</p>"""


@pytest.fixture
def page() -> Iterator[Page]:
    require_browser()
    with Browser() as browser:
        yield browser.page()


def test_an_element_that_moves_away_is_clicked_all_the_same(page: Page) -> None:
    page.open(MOVING)
    page.click("#one")
    assert page.evaluate("pressed") == ["one"]


def test_what_is_covered_or_missing_is_said(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("browser._SECONDS", 1.0)
    page.open(COVERED)
    with pytest.raises(AssertionError, match="something else lies over #one"):
        page.click("#one")
    with pytest.raises(AssertionError, match="nothing matches #two"):
        page.click("#two")


FILE_OF_A_SLOW_TEST = """
import time, pytest

@pytest.mark.parametrize("case", range(20))
@pytest.mark.quick(3)
def test_a_grid(case):
    pass

def test_kept():
    time.sleep(0.1)

def test_too_long():
    time.sleep(2)

def test_too_long_once(durations=[2, 0]):
    time.sleep(durations.pop(0))

def test_longer_but_so_is_all():
    time.sleep(0.25)
"""


def test_a_quick_test_above_its_limit_fails(pytester: pytest.Pytester) -> None:
    """On a machine that takes twice as long for all tests, what takes twice as long passes."""
    kept = pytester.makefile(".json", durations=json.dumps({"test_it.py::test_kept": 0.05}))
    limits = Durations(write=False, file=kept, quick=0.05, evidence=0.01)
    pytester.makepyfile(test_it=FILE_OF_A_SLOW_TEST)
    options = ("-m", "not slow", "-p", "no:xdist", "--hypothesis-profile=steady")  # with which conftest adds no limits
    result = pytester.inline_run(*options, plugins=[conftest, limits])
    passed, _, failed = result.listoutcomes()
    assert [report.nodeid for report in failed] == ["test_it.py::test_too_long"]
    assert "mark it slow" in str(failed[0].longrepr)
    assert [report.nodeid for report in passed if "grid" in report.nodeid] == [
        f"test_it.py::test_a_grid[{case}]" for case in (0, 6, 13)
    ]
