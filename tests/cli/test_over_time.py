"""`analyze --trace`, `--memory-over-time` and `--memory-picture`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.running import HEADLINE, error_line, run, run_json, strict_json

SMALL = [
    "analyze",
    "--model",
    "llama3-8b",
    "--cluster",
    "dgx-h100:1",
    "--pp",
    "4",
    "--dp",
    "2",
    "--global-batch",
    "16",
    "--seq",
    "2048",
]


def test_a_trace_is_written_and_said(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    result = run(*SMALL, "--trace", str(target))
    assert result.status == 0
    assert result.out.splitlines()[-1] == f"wrote {target}: open in ui.perfetto.dev"
    trace = strict_json(target.read_text(encoding="utf-8"))
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M", "C"}
    assert trace["otherData"]["step_seconds"] > 0


def test_memory_over_time_is_a_table_with_a_curve(tmp_path: Path) -> None:
    result = run(*SMALL, "--memory-over-time")
    assert result.status == 0
    table = result.out[result.out.index("Memory over the step") :].splitlines()
    assert "▁" in table[0]
    rows = [line for line in table if "microbatch" in line]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert "█" in rows[0]
    assert all("GiB" in row for row in rows)


def test_json_stays_json_and_gains_the_memory(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    data = run_json(*SMALL, "--memory-over-time")
    ranks = data["memory_over_time"]["ranks"]
    assert [rank["pipeline_rank"] for rank in ranks] == [0, 1, 2, 3]
    highest = max(rank["peak"]["total_bytes"] for rank in ranks)
    assert highest == pytest.approx(data["memory"]["total_bytes"], rel=1e-9)
    result = run(*SMALL, "--json", "--trace", str(target))
    json.loads(result.out)
    assert result.err == f"wrote {target}: open in ui.perfetto.dev\n"


def test_a_picture_is_written(tmp_path: Path) -> None:
    target = tmp_path / "memory.svg"
    result = run(*HEADLINE.split(), "--memory-picture", str(target))
    assert result.status == 0
    assert result.out.splitlines()[-1] == f"wrote {target}"
    assert target.read_text(encoding="utf-8").startswith("<svg ")


@pytest.mark.quick(4)
@pytest.mark.parametrize("flag", ["--trace", "--memory-picture"])
@pytest.mark.parametrize("path", ["/nowhere/at/all/x", "{folder}", "", "x\0y"])
def test_a_path_that_cannot_be_written_is_one_line(flag: str, path: str, tmp_path: Path) -> None:
    line = error_line(run(*SMALL, flag, path.format(folder=tmp_path)))
    assert line.startswith(f"{flag}: ")
    assert "cannot be written" in line


@pytest.mark.parametrize("flag", ["--trace", "--memory-picture", "--memory-over-time"])
def test_too_many_passes_are_refused_before_they_are_simulated(flag: str, tmp_path: Path) -> None:
    value = [] if flag == "--memory-over-time" else [str(tmp_path / "x")]
    line = error_line(run(*SMALL, flag, *value, "--global-batch", "4000000"))
    assert line.startswith(f"{flag}: 2,000,000 microbatches")
    assert not list(tmp_path.iterdir())


def test_nothing_changes_without_the_flags() -> None:
    result = run(*SMALL)
    assert "over the step" not in result.out
    assert "wrote" not in result.out
