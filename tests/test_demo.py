"""The first command of the README: what it only prices ends as the demo expects."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from cli.running import run

FILE = Path(__file__).parents[1] / "examples" / "demo.py"


def demo() -> Any:
    described = importlib.util.spec_from_file_location("demo", FILE)
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


PRICED = [command for _, command in demo().STEPS if "runs/demo" not in command]


def test_the_demo_has_steps_that_are_only_priced() -> None:
    assert {command.split()[0] for command in PRICED} == {"plan", "analyze", "explain"}


# The README shows the search too.
@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[pytest.mark.slow] * command.startswith("plan")) for command in PRICED],
    ids=lambda command: " ".join(command.split()[:3]),
)
def test_a_step_ends_as_the_demo_expects(command: str) -> None:
    result = run(*command.split())
    assert result.status == demo().expected_status(command), result.err


@pytest.mark.slow
def test_what_the_demo_proposes_next_works() -> None:
    proposed = [line.split("#")[0].split() for line in demo().NEXT.splitlines() if "shardwise " in line.split("#")[0]]
    assert [words[1] for words in proposed] == ["plan", "ui"]
    planned = run(*proposed[0][1:], "--out", "-")
    assert planned.status == 0 and "64 × h100-sxm" in planned.out, planned.err
    assert run("ui", "--help").status == 0
