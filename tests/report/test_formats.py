"""Versions of `--json`: printed by every verb, documented on one page."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.running import run_json
from shardwise.api import VERBS
from shardwise.report.console import CHANGES, formats_table

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
JOB = [
    "--model",
    "tiny",
    "--cluster",
    "laptop:2",
    "--dp",
    "2",
    "--seq",
    "128",
    "--global-batch",
    "8",
    "--precision",
    "fp32",
]


@pytest.mark.parametrize(
    "command",
    [
        ["analyze", *JOB],
        ["plan", *JOB[:4], *JOB[6:], "--out", "-"],
        ["explain", "flops", "--model", "tiny"],
        ["export", *JOB, "--to", "megatron"],
        ["dryrun", *JOB],
    ],
    ids=lambda command: command[0],
)
def test_a_result_begins_with_its_version(command: list[str]) -> None:
    data = run_json(*command)
    assert next(iter(data)) == "format"
    assert data["format"] == len(CHANGES[command[0]])


def test_every_result_of_the_api_has_a_version() -> None:
    import importlib

    from shardwise.api.results import Result

    for module in set(VERBS.values()):
        importlib.import_module(f"shardwise.api.{module}")
    classes = [result for result in Result.__subclasses__() if result.__module__.startswith("shardwise.")]
    assert len(classes) >= 12
    assert {result.verb for result in classes} <= CHANGES.keys()


def test_the_page_has_the_table() -> None:
    assert "\n".join(formats_table()) in PAGE.read_text(encoding="utf-8")
