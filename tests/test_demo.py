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


@pytest.mark.parametrize("command", PRICED, ids=lambda command: " ".join(command.split()[:3]))
def test_a_step_ends_as_the_demo_expects(command: str) -> None:
    result = run(*command.split())
    assert result.status == demo().expected_status(command), result.err
