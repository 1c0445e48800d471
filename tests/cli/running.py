"""Runs the command line in this process, as the tests of it need."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

from shardwise.cli.main import main

HEADLINE = (
    "analyze --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --dp 16 --zero 1 --global-batch 1024 --seq 8192"
)


@dataclass(frozen=True)
class Result:
    status: Any
    out: str
    err: str


def run(*arguments: str, columns: int = 132) -> Result:
    """What `shardwise ARGUMENTS` prints and its exit status; any exception but SystemExit goes through."""
    out, err = io.StringIO(), io.StringIO()
    wide = mock.patch.dict(os.environ, {"COLUMNS": str(columns)})  # whatever terminal the tests run in
    with wide, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status: Any = main(list(arguments))
        except SystemExit as end:
            status = end.code
    printed = out.getvalue() + err.getvalue()
    assert "⟨" not in printed or "⟨" in "".join(arguments), printed  # the mark of a setting without words for it
    return Result(status, out.getvalue(), err.getvalue())


def run_json(*arguments: str) -> Any:
    """The JSON document that a command prints; it must succeed (`analyze` may say that a job does not fit).

    It holds no NaN or infinity.
    """
    result = run(*arguments, "--json")
    assert result.status in ((0, 1) if arguments[0] == "analyze" else (0,)), result.err
    assert result.err == ""
    return strict_json(result.out)


def strict_json(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def error_line(result: Result) -> str:
    """The message of a refused command, after checking that it is one line and status 2."""
    return _one_line(result, 2)


def does_not_fit_line(result: Result) -> str:
    """The message of a command that finds no room, after checking that it is one line and status 1."""
    return _one_line(result, 1)


def without_notes(text: str) -> list[str]:
    """The lines that are no remark about what was assumed, which may stand before an error too."""
    return [line for line in text.splitlines() if not line.startswith("note: ")]


def _one_line(result: Result, status: int) -> str:
    assert result.status == status, (result.status, result.err)
    assert result.out == ""
    lines = without_notes(result.err)
    assert len(lines) == 1, result.err
    assert lines[0].startswith("shardwise: error: "), result.err
    assert result.err.endswith("\n")
    return lines[0].removeprefix("shardwise: error: ")
