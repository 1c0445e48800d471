"""Every figure in the documentation comes from a command: run them all and compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_accuracy_page_is_what_the_tables_give() -> None:
    run = subprocess.run([sys.executable, "docs/make_accuracy.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run `python docs/make_accuracy.py` and look at what changed"


def test_every_printed_example_is_what_its_command_prints() -> None:
    run = subprocess.run(
        [sys.executable, "docs/refresh.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{run.stdout}{run.stderr}\nrun `python docs/refresh.py` and look at what changed"
