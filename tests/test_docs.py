"""Every figure in the documentation comes from a command: run them all and compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The two READMEs have the same examples: together each runs once.
PAGES = ["README*.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]

# Traces a model of eight billion parameters; searches a dozen times; scores all published runs.
SLOW = ["docs/dryrun.md", "docs/plan.md", "docs/validate.md"]


@pytest.mark.slow
def test_the_accuracy_page_is_what_the_tables_give() -> None:
    run = subprocess.run([sys.executable, "docs/make_accuracy.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run `python docs/make_accuracy.py` and look at what changed"


@pytest.mark.parametrize("pages", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PAGES])
def test_every_printed_example_is_what_its_command_prints(pages: str) -> None:
    run = subprocess.run(
        [sys.executable, "docs/refresh.py", "--check", pages], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{run.stdout}{run.stderr}\nrun `python docs/refresh.py` and look at what changed"
