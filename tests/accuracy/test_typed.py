"""A published run that a user types, naming its stack by version, is priced as `validate` prices its row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.accuracy.runs import PublishedRun, run_from_row, run_rows
from shardwise.accuracy.table import TRAINING_RUNS, TableRow, table_path
from shardwise.api.given import JobArguments
from shardwise.api.inputs import job_from
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.stack import Stack, stack_from

# What the stack decides, unless a user says otherwise.
_OF_THE_STACK = ("overlap", "dispatch", "accumulate")


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return [run for table in TRAINING_RUNS for run in readable(run_rows(table_path(table))) if run.reported_seconds]


def readable(rows: list[TableRow]) -> Iterator[PublishedRun]:
    for row in rows:
        with contextlib.suppress(SpecError):
            yield run_from_row(row)


def typed(run: PublishedRun, **said: Any) -> tuple[float, float]:
    """Seconds and bytes of the job as typed: model, machine, layout and training, and the version of the stack.

    ``said`` are fields of the stack: ``--set stack.cuda_graphs=full``.
    """
    job = run.job
    strategy = {name: value for name, value in vars(job.strategy).items() if name not in _OF_THE_STACK}
    if job.strategy.accumulate != job.usual_accumulation(job.strategy):
        strategy["accumulate"] = job.strategy.accumulate
    fields = {"model": job.model, "cluster": job.cluster, "strategy": strategy, "training": job.training.to_dict()}
    overrides = {"stack": job.stack.version, **{f"stack.{name}": value for name, value in said.items()}}
    price, _ = job_from(JobArguments(source=fields, overrides=overrides))
    return predict(price).step_seconds, peak_memory(price).total


def priced(run: PublishedRun) -> tuple[float, float]:
    return predict(run.job).step_seconds, peak_memory(run.job).total


def says(run: PublishedRun) -> dict[str, Any]:
    """What of the stack the recipe of a row sets otherwise than the version has it."""
    said: dict[str, Any] = {}
    for variant in run.source.variants:
        for name, value in variant.stack.items() if variant.applies(run.row) else ():
            said[name] = {**said.get(name, {}), **value} if isinstance(value, dict) else value
    return said


def versioned(run: PublishedRun) -> bool:
    return "@" in run.job.stack.version


def test_a_version_says_all_of_most_rows(runs: list[PublishedRun]) -> None:
    rows = [run for run in runs if versioned(run)]
    named = [run for run in rows if run.job.stack == stack_from(run.job.stack.version)]
    assert len(rows) > 350 and len(named) > 0.7 * len(rows)
    for run in named[::8]:
        assert typed(run) == pytest.approx(priced(run), rel=1e-3), run.row_id


def test_the_newest_mixtures_need_nothing_but_the_version(runs: list[PublishedRun]) -> None:
    """NVIDIA's mixtures in MXFP8 on GB200 and GB300 since 26.06."""
    newest = [run for run in runs if run.row_id.startswith(("mbridge_26.06", "mbridge_26.08")) and "GB" in run.row_id]
    mixtures = [run for run in newest if run.job.model.moe]
    assert len(mixtures) >= 12
    for run in mixtures:
        assert run.job.stack.name == presets.at_release("stack", "megatron-bridge", run.row_id.split("_")[1])
        assert typed(run) == pytest.approx(priced(run), rel=1e-3), run.row_id


def test_what_a_recipe_sets_otherwise_can_be_said(runs: list[PublishedRun]) -> None:
    rows = [run for run in runs if versioned(run) and run.job.stack.name.endswith("-changed")]
    assert len(rows) > 50
    for run in rows[::6]:
        assert typed(run, **says(run)) == pytest.approx(priced(run), rel=1e-3), run.row_id


def test_versions_of_one_release_matter(runs: list[PublishedRun]) -> None:
    """The same line of the performance summary in two containers, 1.57 times apart as printed."""
    rows = {run.row_id: run for run in runs}
    older, newer = (rows[f"mbridge_{name}_DGX-GB200_Qwen3-30B-A3B_8_MXFP8_1"] for name in ("26.04.01", "26.06.01"))
    assert typed(newer)[0] < 0.8 * typed(older)[0]
    assert isinstance(newer.job.stack, Stack) and newer.job.stack.base == older.job.stack.base
