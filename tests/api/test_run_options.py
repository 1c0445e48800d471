"""Options of a run: one record, of which the keywords, the flags and what excludes what are made."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest

from shardwise import api
from shardwise.api.execution import TrainKeywords, job_for
from shardwise.api.given import JobArguments, JobKeywords, job_arguments
from shardwise.api.run_options import EXCLUDED, RunKeywords, RunOptions, RunPlace, require_compatible
from shardwise.cli.train import run as train_command
from shardwise.launch.targets.registry import target_named
from shardwise.run.environment import Started
from shardwise.spec.errors import SpecError
from shardwise.spec.fields import fields_of, job_fields

SMALL = {"model": "tiny", "seq": 32, "global_batch": 4, "precision": "fp32", "cluster": "laptop:2", "dp": 2}
NAMES = [item.name for item in fields(RunOptions)]


def described(**run: object) -> JobArguments:
    return job_arguments(None, {**SMALL, "run": run} if run else SMALL)


def test_the_keywords_and_the_flags_are_those_of_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(RunKeywords.__annotations__) == NAMES
    assert set(TrainKeywords.__annotations__) == {*NAMES, *JobKeywords.__annotations__}
    with pytest.raises(SystemExit):
        train_command(["--help"])
    shown = "".join(capsys.readouterr().out.split())
    for record in fields_of(RunOptions):
        assert "".join(record.help.split()) in shown
        assert f"--{record.name.replace('_', '-')}" in shown


def test_an_option_sets_the_field_that_it_names() -> None:
    assert {item.metadata["path"] for item in fields(RunOptions) if "path" in item.metadata} <= set(job_fields())
    options = RunOptions(
        steps="7", run_folder=Path("runs/x"), data="shards/a", profile="steps=2:3", wait_for_resources="5s",
        least_devices=1, metrics_port="0",
    )  # fmt: skip
    job, _ = job_for(options.over(described()), RunPlace())
    same = described(
        steps=7, folder="runs/x", data={"shards": ["shards/a"]}, profile={"first": 2, "last": 3},
        restarts={"wait": 5, "shrink": True, "least_devices": 1}, logging={"metrics_port": 0},
    )  # fmt: skip
    assert job == job_for(same, RunPlace())[0]
    assert (
        job_for(RunOptions().over(described(steps=9)), RunPlace())[0].run.steps == 9
    )  # an option not given sets nothing


def test_what_excludes_what() -> None:
    """Every row of the table is refused with its reason, and neither of its two alone."""
    on_slurm = RunPlace(target=target_named("slurm"))
    places = {
        "a rank": RunPlace(started_as=Started(0, 2, 2)),
        "renders": RunPlace(target=target_named("kubernetes,runs=a")),
        "writes only": on_slurm,
        "printed": RunPlace(target=target_named("skypilot,out=-")),
    }
    for option, other, _, remedy in EXCLUDED:
        place = places.get(other, RunPlace())
        given = [option] if other in places else [option, other]
        with pytest.raises(SpecError) as error:
            require_compatible(given, place)
        assert (error.value.field, error.value.remedy) == (f"⟨{option}⟩", remedy)
        assert "{" not in str(error.value)
        require_compatible([option], RunPlace())
        require_compatible([], place)
    submitted = replace(on_slurm, target=target_named("slurm,submit"))
    require_compatible(["csv", "json", "on"], submitted)


def test_a_port_that_nobody_would_serve_is_refused() -> None:
    port = described(logging={"metrics_port": 0})
    for place, launcher in (
        (RunPlace(printed=True), "torchrun"),
        (RunPlace(target=target_named("slurm")), "slurm"),
        (RunPlace(started_as=Started(0, 2, 2, launcher="Open MPI")), "Open MPI"),
    ):
        with pytest.raises(SpecError, match=f"metrics_port: is served by `shardwise train`, and {launcher} starts"):
            job_for(port, place)


def test_the_address_of_ray_as_a_keyword_still_works() -> None:
    """Until version 1.0."""
    with (
        pytest.warns(DeprecationWarning, match='on="ray,address=10.0.0.1:6379"'),
        pytest.raises(SpecError, match="emulate"),
    ):
        api.train(**SMALL, on="ray", ray_address="10.0.0.1:6379", emulate="2x1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SpecError, match="'adress' is not an option of ray; did you mean address"):
            api.train(**SMALL, on="ray,adress=10.0.0.1:6379")
        with pytest.raises(SpecError, match="slurm writes a file and starts nothing"):
            api.train(**SMALL, on="slurm,time=4:00:00")
