"""Every figure in the documentation comes from a command: run them all and compare."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.cli.main import VERBS

ROOT = Path(__file__).parents[1]
# The two READMEs have the same examples: together each runs once.
PAGES = [
    "README*.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))),
    "docs/labs/README*.md",  # those of the labs are checked where the labs run
]  # fmt: skip

# The commands of the other pages run in `make test-all`.
EXAMPLES = [pytest.param(page, marks=[pytest.mark.slow] * (page != "README*.md")) for page in PAGES]


@cache
def refresh() -> ModuleType:
    """`docs/refresh.py`, which runs each command once for all pages of this process."""
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_fields_and_the_keywords_are_what_the_dataclasses_give() -> None:
    run = subprocess.run([sys.executable, "docs/make_fields.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run `python docs/make_fields.py` and look at what changed"


def test_the_page_of_families_is_what_they_give() -> None:
    run = subprocess.run([sys.executable, "docs/make_models.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run `python docs/make_models.py` and look at what changed"


@pytest.mark.slow
def test_the_accuracy_page_is_what_the_tables_give() -> None:
    run = subprocess.run([sys.executable, "docs/make_accuracy.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run `python docs/make_accuracy.py` and look at what changed"


@pytest.mark.slow
def test_the_cases_are_what_the_planner_says() -> None:
    run = subprocess.run([sys.executable, "docs/make_cases.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run `python docs/make_cases.py` and look at what changed"


@pytest.mark.slow
def test_the_page_of_imported_configurations_is_what_they_give() -> None:
    run = subprocess.run([sys.executable, "docs/make_imports.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run `python docs/make_imports.py` and look at what changed"


@pytest.mark.parametrize("pages", EXAMPLES)
def test_every_printed_example_is_what_its_command_prints(pages: str) -> None:
    try:
        stale = refresh().main(["--check", pages])
    except SystemExit as end:
        pytest.fail(str(end.code))
    assert stale == 0, "run `python docs/refresh.py` and look at what changed"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_every_verb_is_in_the_table(page: str) -> None:
    rows = re.findall(r"^\| `([a-z]+)` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(VERBS)


def test_every_verb_is_in_the_architecture() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("Commands:"))
    assert sorted(re.findall(r"\[`([a-z]+)`\]", line)) == sorted(VERBS)


def test_the_pictures_have_todays_figures() -> None:
    run = subprocess.run([sys.executable, "docs/make_pictures.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run `python docs/make_pictures.py` and look at what changed"


def test_the_picture_names_verbs_that_there_are() -> None:
    """It called what is there "next"."""
    text = (ROOT / "docs/pictures/loop.svg").read_text(encoding="utf-8")
    named = [word for words in re.findall(r">([a-z]+(?: · [a-z]+)+)<", text) for word in words.split(" · ")]
    assert len(named) == 9
    assert set(named) <= set(VERBS)
    assert ">next<" not in text
