"""The verbs as functions: what they take, what they return, and that they say what the command line says."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardwise
from cli.running import run, run_json
from shardwise.api.results import Figure
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

KEYWORDS: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100:1", "tp": 8, "global_batch": 16, "seq": 2048}
FLAGS = "--model llama3-8b --cluster dgx-h100:1 --tp 8 --global-batch 16 --seq 2048"


def test_a_job_a_file_a_mapping_and_keywords_are_the_same(tmp_path: Path) -> None:
    by_keywords = shardwise.analyze(**KEYWORDS)
    path = tmp_path / "job.yaml"
    path.write_text(by_keywords.job.to_yaml())
    for given in (by_keywords.job, path, str(path), by_keywords.job.to_dict()):
        assert shardwise.analyze(given).to_dict() == by_keywords.to_dict()


def test_results_say_what_the_commands_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert shardwise.analyze(**KEYWORDS).to_dict() == run_json("analyze", *FLAGS.split())
    text = str(shardwise.analyze(**KEYWORDS))
    assert " ".join(run("analyze", *FLAGS.split(), columns=200).out.split()) == " ".join(text.split())
    scored = shardwise.validate("pipeline_bubble")
    assert json.loads(json.dumps(scored.to_dict())) == run_json("validate", "pipeline_bubble")


def test_the_floor_is_not_the_prediction() -> None:
    result = shardwise.predict(**KEYWORDS)
    assert (
        result.floor_seconds < result.predicted_seconds_low < result.predicted_seconds < result.predicted_seconds_high
    )
    assert not hasattr(result, "step_seconds") and not hasattr(shardwise.analyze(result.job), "step_seconds")
    assert result.predicted_seconds == shardwise.analyze(result.job).predicted_seconds


def test_results_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        shardwise.predict(**KEYWORDS).mfu = 1.0  # type: ignore[misc]


def test_a_result_is_html_markdown_and_csv() -> None:
    result = shardwise.analyze(**KEYWORDS)
    shown = result._repr_html_()
    assert shown.count("<table>") == shown.count("</table>") > 3 and "tensor" in shown.lower()
    markdown = run("analyze", *FLAGS.split(), "--markdown").out
    assert markdown == result.page.markdown() and "| matmuls |" in markdown
    table = run("analyze", *FLAGS.split(), "--csv").out
    assert table == result.page.csv() and "part,seconds,share\n" in table


def test_a_frame_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    result = shardwise.predict(**KEYWORDS)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SpecError, match=r"to_frame: pandas is not installed; pip install pandas"):
        result.to_frame()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", rows)))
    row = {name: value for name, value in result.to_dict().items() if name != "format"}
    assert result.to_frame() == ("frame", [row])
    with pytest.raises(SpecError, match="did you mean prediction"):
        result.to_frame("predictions")


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"clster": "dgx-h100:1"}, "clster: is not a keyword of a job; did you mean cluster?"),
        ({"cluster": None}, "cluster: is missing"),
        ({"strategy": 3}, "strategy: 3 should be a mapping of fields"),
        ({"gpus": -3}, "gpus: -3 is not a positive whole number"),
        ({"price": 2}, "price: has no effect without tokens"),
    ],
)
def test_a_mistake_is_one_line_in_keywords(keywords: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as error:
        shardwise.analyze(**{**KEYWORDS, **keywords})
    assert str(error.value).startswith(line)
    assert "--" not in str(error.value) and "\n" not in str(error.value)


def test_a_plan_is_a_job() -> None:
    found = shardwise.plan(model="llama3-8b", cluster="dgx-h100:1", global_batch=64, seq=2048, tp="1,2", pp=1, cp=1)
    assert isinstance(found.job, Job) and found.job.strategy.tp in (1, 2)
    assert found.predicted_seconds == pytest.approx(shardwise.analyze(found.job).predicted_seconds)
    assert found.tables()["layouts"][0]["predicted_seconds"] == found.predicted_seconds


SMALL: dict[str, Any] = {"model": "tiny", "cluster": "laptop:2", "seq": 32, "global_batch": 4}


@pytest.mark.parametrize(
    ("verb", "keywords", "seconds"),
    [
        (shardwise.analyze, {**SMALL, "dp": 2}, {"predicted_seconds", "floor_seconds", "mfu", "memory_bytes"}),
        (shardwise.plan, SMALL, {"predicted_seconds", "mfu", "memory_bytes"}),
    ],
)
def test_every_figure_is_there(verb: Any, keywords: dict[str, Any], seconds: set[str]) -> None:
    result = verb(**keywords)
    figures = {name: getattr(result, name) for name, one in inspect.getmembers(type(result)) if isinstance(one, Figure)}
    assert seconds < set(figures)
    for name in seconds:
        assert isinstance(figures[name], float) and figures[name] > 0
    assert figures["predicted_seconds_low"] < figures["predicted_seconds"] < figures["predicted_seconds_high"]
    assert isinstance(figures["job"], shardwise.Job)
