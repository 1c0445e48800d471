"""`shardwise validate`: what it prints, and one clear line for a table that it cannot read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from shardwise.cli.main import main

TABLES = Path(__file__).parents[2] / "validation"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["validate", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_json_has_the_promised_fields(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, str(TABLES / "training_runs.csv"), "--json")
    data = json.loads(out)
    assert status == 0
    assert len(data["rows"]) == 144
    wanted = {"row_id", "device", "reported_seconds", "predicted_seconds", "time_error", "reported_memory_bytes",
              "predicted_memory_bytes", "memory_error"}  # fmt: skip
    assert wanted <= set(data["rows"][0])
    row = data["rows"][0]
    assert row["time_error"] == pytest.approx(row["predicted_seconds"] / row["reported_seconds"] - 1)
    summary = data["summary"]["B200-SXM"]
    assert {"rows", "time_mape", "time_worst", "time_bias", "memory_mape", "memory_worst"} <= set(summary)


@pytest.mark.parametrize("name", ["collectives.csv", "pipeline_bubble.csv"])
def test_the_other_layouts(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, str(TABLES / name), "--json")
    data = json.loads(out)
    assert status == 0
    assert data["summary"]["all"]["rows"] == len(data["rows"]) > 30


def changed(tmp_path: Path, column: str, value: str | None) -> str:
    """The first rows of the table of runs, with a column dropped or its values replaced."""
    with (TABLES / "training_runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[:3]
    for row in rows:
        if value is None:
            del row[column]
        else:
            row[column] = value
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [("layers", None, "layers"), ("layers", "many", "layers"), ("gpu", "H900", "gpu"), ("tp", "3", "tp"),
     ("hidden", "-1", "hidden"), ("gbs", "1.5", "gbs")],
)  # fmt: skip
def test_a_bad_table_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, column: str, value: str | None, named: str
) -> None:
    status, out, err = run(capsys, changed(tmp_path, column, value))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00\x01", "collective\nx\n", "bubble_rate\n0.1\n"])
def test_any_other_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    status, _, err = run(capsys, str(path))
    assert status == 2
    assert err.count("\n") == 1
