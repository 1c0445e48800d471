"""`shardwise validate`: what it prints, and one clear line for a table that it cannot read."""

from __future__ import annotations

import csv
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run, run_json
from shardwise.accuracy.table import SCORED

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "validation"
LAYOUTS = ("training_runs", "collectives", "pipeline_bubble")
SAME_LAYOUT = ("training_runs_2", "training_runs_3", "memory_runs")  # as training_runs
# A row of each layout that is scored.
FIRST = {"training_runs": 0, "collectives": 20, "pipeline_bubble": 0}


SOME = slice(0, None, 2)  # rows: all of them are scored by tests of `accuracy`


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_json("validate", table(tmp_path_factory.mktemp("runs"), "training_runs", SOME))


def some_rows() -> list[dict[str, str]]:
    with (TABLES / "training_runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))[SOME]


def test_json_has_the_promised_fields(runs: Any) -> None:
    assert len(runs["rows"]) == len(some_rows())
    wanted = {"row_id", "device", "reported_seconds", "predicted_seconds", "time_error", "reported_memory_bytes",
              "predicted_memory_bytes", "memory_error"}  # fmt: skip
    assert wanted <= set(runs["rows"][0])
    row = runs["rows"][0]
    assert row["time_error"] == pytest.approx(row["predicted_seconds"] / row["reported_seconds"] - 1)
    summary = runs["summary"]["B200-SXM"]
    assert {"rows", "time_mape", "time_worst", "time_bias", "memory_mape", "memory_worst"} <= set(summary)


def test_rows_with_something_assumed_have_a_range(runs: Any) -> None:
    assumed = {row["row_id"] for row in some_rows() if row["assumed_fields"]}
    ranged = {row["row_id"]: row for row in runs["rows"] if row["predicted_seconds_low"] is not None}
    assert set(ranged) == assumed
    for row in ranged.values():
        assert row["predicted_seconds_low"] <= row["predicted_seconds"] * (1 + 1e-9)
        assert row["predicted_seconds"] <= row["predicted_seconds_high"] * (1 + 1e-9)
        between = row["predicted_seconds_low"] <= row["reported_seconds"] <= row["predicted_seconds_high"]
        assert row["in_range"] == between


def test_every_row_has_the_bar_of_a_plan_and_whether_the_report_is_in_it(runs: Any) -> None:
    for row in runs["rows"]:
        assert row["bar_low_seconds"] < row["predicted_seconds"] < row["bar_high_seconds"]
        assert row["in_bar"] == (row["bar_low_seconds"] <= row["reported_seconds"] <= row["bar_high_seconds"])
        if row["reported_memory_bytes"] is None:
            assert row["memory_in_bar"] is None
        else:
            inside = row["bar_low_bytes"] <= row["reported_memory_bytes"] <= row["bar_high_bytes"]
            assert row["memory_in_bar"] == inside
    counted = [row["in_bar"] for row in runs["rows"] if not row["set_aside"]]
    total = next(one for one in runs["coverage"] if (one["what"], one["of"]) == ("step time", "all"))
    assert (total["rows"], total["in_bar"]) == (len(counted), sum(counted) / len(counted))
    classes = [one for one in runs["coverage"] if one["what"] == "step time" and one["of"] != "all"]
    assert sum(one["rows"] for one in classes) == total["rows"]


def test_regret_of_every_job_with_several_layouts(runs: Any) -> None:
    assert runs["choice"]["jobs"] == len(runs["choices"]) > 5
    assert runs["choice"]["worst_regret"] == max(one["regret"] for one in runs["choices"])
    reported = {row["row_id"]: row["reported_seconds"] for row in runs["rows"]}
    for one in runs["choices"]:
        assert one["regret"] == pytest.approx(reported[one["chosen"]] / reported[one["fastest"]] - 1)


def test_a_row_that_cannot_be_priced_is_listed_beside_the_others(tmp_path: Path) -> None:
    path = Path(table(tmp_path, "training_runs", slice(0, 2)))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2].replace(",8,8,8,", ",8,8,3,")]))
    data = run_json("validate", str(path))
    assert len(data["rows"]) == len(data["not_scored"]) == 1
    assert "3 does not divide 64 query heads" in data["not_scored"][0]["reason"]
    assert "not scored: kor22_t5_22B_seqsel: " in run("validate", str(path)).out


def test_the_share_in_range_is_printed_per_device_and_for_all(runs: Any) -> None:
    counted = [row for row in runs["rows"] if row["in_range"] is not None and not row["set_aside"]]
    assert runs["ranges"] == {"rows": len(counted), "in_range": sum(row["in_range"] for row in counted) / len(counted)}
    for device, summary in runs["summary"].items():
        own = [row["in_range"] for row in counted if row["device"] == device]
        assert summary["ranged_rows"] == len(own)
        assert summary["in_range"] == pytest.approx(sum(own) / len(own))


def test_the_text_says_where_a_time_comes_from_and_its_range(tmp_path: Path) -> None:
    result = run("validate", table(tmp_path, "training_runs", slice(126, 127)))
    assert result.status == 0
    for part in ("iteration time", "in range", "of 1 rows contain the report"):
        assert part in result.out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["collectives", "pipeline_bubble"])
def test_the_other_layouts(name: str) -> None:
    data = run_json("validate", str(TABLES / f"{name}.csv"))
    assert data["summary"]["all"]["rows"] == len(data["rows"]) > 30
    text = run("validate", str(TABLES / f"{name}.csv"))
    assert text.status == 0
    assert len(text.out.splitlines()) > len(data["rows"])


# -- tables that cannot be read ------------------------------------------------------------------------


def table(tmp_path: Path, layout: str, rows: slice, without: str = "", **cells: str) -> str:
    """Some rows of a table, with a column dropped or cells replaced."""
    with (TABLES / f"{layout}.csv").open(newline="") as file:
        chosen = [{**row, **cells} for row in list(csv.DictReader(file))[rows]]
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        columns = [column for column in chosen[0] if column != without]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(chosen)
    return str(path)


def first(tmp_path: Path, layout: str, without: str = "", **cells: str) -> str:
    return table(tmp_path, layout, slice(FIRST[layout], FIRST[layout] + 2), without, **cells)


@pytest.mark.parametrize(
    ("layout", "column"),
    [(layout, column) for layout, columns in (
        ("training_runs", ("row_id", "source", "layers", "kv_heads", "n_experts", "gpu", "tp", "zero", "gbs")),
        ("collectives", ("hardware", "gpus", "nodes", "collective", "size_bytes", "time_us")),
        ("pipeline_bubble", ("stages", "microbatches", "schedule", "bubble_rate", "t_forward_ms", "t_comm_ms")),
    ) for column in columns],
)  # fmt: skip
def test_a_missing_column_is_named(tmp_path: Path, layout: str, column: str) -> None:
    assert f"column '{column}' is missing" in error_line(run("validate", first(tmp_path, layout, without=column)))


@pytest.mark.parametrize("text", ["many", "inf", "-3", "1e999"])
@pytest.mark.parametrize(
    ("layout", "column"),
    [(layout, column) for layout, columns in (
        ("training_runs", ("layers", "hidden", "mbs", "rep_iter_s", "rep_mem_gib")),
        ("collectives", ("gpus", "size_bytes", "time_us")),
        ("pipeline_bubble", ("stages", "bubble_rate", "t_forward_ms")),
    ) for column in columns],
)  # fmt: skip
def test_text_in_a_numbers_place_is_named(tmp_path: Path, layout: str, column: str, text: str) -> None:
    line = error_line(run("validate", first(tmp_path, layout, **{column: text})))
    assert line.startswith("row ")
    assert column in line
    assert text in line


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", ["nothing", "the header"])
def test_a_table_without_rows(tmp_path: Path, layout: str, keep: str) -> None:
    path = tmp_path / "table.csv"
    header = (TABLES / f"{layout}.csv").read_text().splitlines()[0]
    path.write_text("" if keep == "nothing" else header + "\n")
    assert ("is empty" if keep == "nothing" else "has no rows") in error_line(run("validate", str(path)))


@pytest.mark.parametrize(
    ("layout", "cells", "parts"),
    [
        ("training_runs", {"gpu": "H900"}, ["gpu: 'H900' is unknown", "H100-SXM-80GB", "GB200-NVL72"]),
        ("collectives", {"hardware": "8x H900"}, ["hardware: '8x H900' is unknown", "H100-SXM-80GB"]),
        ("pipeline_bubble", {"schedule": "2F2B"}, ["schedule: '2F2B' is unknown", "1f1b"]),
        ("training_runs", {"tp": "3"}, ["row kor22_t5_22B_full", "tp", "3 does not divide 64 query heads"]),
        ("training_runs", {"dp": "2"}, ["16 ranks, but the cluster has 8 devices"]),
        ("training_runs", {"gbs": "6"}, ["6 sequences do not divide"]),
        ("training_runs", {"ep": "2"}, ["ep: 2", "no experts"]),
        ("training_runs", {"rep_iter_s": "", "rep_mfu_pct": ""}, ["the row reports no time"]),
        ("collectives", {"nodes": "3"}, ["nodes: 3 do not divide 8 gpus"]),
        ("collectives", {"collective": "broadcast"}, ["no rows that can be scored"]),
        ("pipeline_bubble", {"microbatches": "1000000"}, ["too many to simulate"]),
        ("pipeline_bubble", {"bubble_rate": "24"}, ["bubble_rate: 24 is above 1"]),
        ("pipeline_bubble", {"schedule": "1F1B-I", "microbatches": "9"}, ["not a multiple of the 8 pipeline ranks"]),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    tmp_path: Path, layout: str, cells: dict[str, str], parts: list[str]
) -> None:
    line = error_line(run("validate", first(tmp_path, layout, **cells)))
    for part in parts:
        assert part in line


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "\x00\x01", "collective\nx\n", "bubble_rate\n0.1\n"])
def test_any_other_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    error_line(run("validate", str(path)))


@pytest.mark.parametrize("path", ["nowhere.csv", str(TABLES), str(TABLES / "hardware.csv")])
def test_a_path_that_is_no_such_table(path: str) -> None:
    error_line(run("validate", path))


@pytest.mark.slow
def test_tables_that_come_with_the_package_have_names() -> None:
    assert {*LAYOUTS, *SAME_LAYOUT} == set(SCORED)
    by_name, by_path = (run("validate", table) for table in ("pipeline_bubble", str(TABLES / "pipeline_bubble.csv")))
    assert (by_name.status, by_name.out) == (0, by_path.out)


def test_every_file_beside_the_code_is_in_the_wheel() -> None:
    """What setuptools is told to take covers every file of the package that git has and that is no module."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["shardwise"]
    package = ROOT / "src/shardwise"
    taken = {path for pattern in declared for path in package.glob(pattern)}
    left = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")} - taken
    assert not left
    assert package / "accuracy/tables/training_runs.csv" in taken


def test_a_folder_that_goes_away_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as its name was read: a run that ends removes its own."""
    (tmp_path / "gone" / "inner").mkdir(parents=True)
    listed = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).startswith(str(tmp_path / "gone")):
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "has no run's folder in it" in error_line(run("validate", str(tmp_path)))
    assert not (tmp_path / "gone").exists()
