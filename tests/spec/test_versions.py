"""Versions of stacks: what each changes, how it is named, and what it costs a job."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.api.given import JobArguments
from shardwise.api.inputs import job_from
from shardwise.cost.step.prediction import predict
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.stack import Stack, stack_from

VERSIONED = [name for name in presets.names("stack") if presets.versions("stack", name)]
NAMES = [f"{name}@{version.name}" for name in VERSIONED for version in presets.versions("stack", name)]


def job(stack: str, precision: str = "mxfp8", model: str = "qwen3-30b-a3b") -> Job:
    named = {"model": model, "cluster": "gb200-nvl72", "stack": stack, "strategy": {"ep": 8 if "a3b" in model else 1}}
    return Job.from_dict({**named, "training": {"precision": precision, "global_batch": 72, "seq": 4096}})


def test_the_bridge_is_versioned() -> None:
    assert "megatron-bridge" in VERSIONED


@pytest.mark.parametrize("name", VERSIONED)
def test_versions_are_listed_newest_first_each_with_its_source(name: str) -> None:
    listed = presets.versions("stack", name)
    assert [one.name for one in listed] == sorted({one.name for one in listed}, reverse=True)
    assert all(len(one.source) > 10 for one in listed)
    assert not listed[0].changed


@pytest.mark.parametrize("name", VERSIONED)
def test_the_plain_name_is_the_newest(name: str) -> None:
    newest = stack_from(f"{name}@{presets.versions('stack', name)[0].name}")
    plain = stack_from(name)
    assert {**vars(newest), "name": "", "source": ""} == {**vars(plain), "name": "", "source": ""}


@pytest.mark.parametrize("name", NAMES)
def test_a_version_is_brought_back_by_its_name(name: str) -> None:
    stack = stack_from(name.upper())
    assert (stack.name, presets.shorten(stack)) == (name, name)
    assert stack.base == name.partition("@")[0]
    assert stack.changed(deterministic=True).name == f"{name}-changed"
    assert stack.changed(deterministic=True).base == stack.base
    written = job(name)
    assert Job.from_yaml(written.to_yaml()) == written
    assert f"stack: {name}" in written.to_yaml()


def test_an_older_version_has_all_that_changed_since() -> None:
    newest, older, oldest = (stack_from(f"megatron-bridge@{name}") for name in ("26.08", "26.04", "25.11"))
    graphs = [stack.running("mxfp8", "b200", moe=True).cuda_graphs for stack in (newest, older, oldest)]
    assert graphs == ["full", "none", "none"]
    assert [stack.dispatch for stack in (newest, older, oldest)] == ["deduplicated", "deduplicated", "all-to-all"]


def test_mixtures_run_by_format_and_device() -> None:
    stack = stack_from("megatron-bridge@25.11")
    on_rack, on_node = (stack.running("bf16", device, moe=True) for device in ("gb200", "h100-sxm"))
    assert (on_rack.cuda_graphs, on_rack.dispatch, on_rack.overlap.ep) == ("partial", "deduplicated", False)
    assert (on_node.cuda_graphs, on_node.dispatch, on_node.overlap.ep) == ("none", "all-to-all", True)
    assert stack.running("bf16", "gb200", moe=False) is stack


def test_what_is_said_holds_for_mixtures_too() -> None:
    newest = stack_from("megatron-bridge")
    said = newest.stated(cuda_graphs="none", overlap=newest.overlap).running("mxfp8", "gb200", moe=True)
    assert (said.cuda_graphs, said.overlap.ep, said.fused_moe_mlp) == ("none", False, True)


@pytest.mark.parametrize(("former", "name"), presets.FORMER.items())
def test_a_former_name_means_a_version(former: str, name: str) -> None:
    assert stack_from(former) == stack_from(name)
    assert former not in presets.every_name("stack")
    assert presets.lineage("stack", name) == name


def test_errors_of_versions_are_those_of_the_stack() -> None:
    assert presets.lineage("stack", "megatron-bridge@26.04") == "megatron-bridge"
    assert presets.lineage("stack", "megatron-core@2024") == "megatron-core"


def test_a_flag_names_a_version_what_it_changes_and_a_dispatch() -> None:
    fields = {"model": "qwen3-30b-a3b", "cluster": "gb200-nvl72", "training": {"precision": "mxfp8"}}

    def made(**overrides: Any) -> tuple[Job, list[str]]:
        given = {"strategy.ep": 8, **{name.replace("__", "."): value for name, value in overrides.items()}}
        return job_from(JobArguments(source=fields, overrides=given))

    job, notes = made(stack="megatron-bridge")
    assert job.strategy.overlap.ep and job.strategy.dispatch == "deduplicated"
    assert any("version 26.08 is assumed" in note for note in notes)
    older, _ = made(stack="megatron-bridge@25.09", strategy__dispatch="hybridep", stack__cuda_graphs="none")
    assert (older.strategy.dispatch, older.running_stack.cuda_graphs) == ("deduplicated", "none")
    assert older.stack.name == "megatron-bridge@25.09-changed"
    _, notes = made(stack="megatron-2022")
    assert "stack megatron-2022 is a version of another now: megatron-core@2022" in notes
    with pytest.raises(SpecError, match=r"stack\.cuda_graphs.*'some' is not a choice"):
        made(stack="megatron-bridge", stack__cuda_graphs="some")


def test_what_a_release_brings_to_mixtures_in_one_format_is_theirs_alone() -> None:
    def seconds(version: str, precision: str, model: str) -> float:
        return predict(job(f"megatron-bridge@{version}", precision, model)).step_seconds

    assert seconds("26.06", "mxfp8", "qwen3-30b-a3b") < 0.85 * seconds("26.04", "mxfp8", "qwen3-30b-a3b")
    assert seconds("26.06", "bf16", "qwen3-30b-a3b") == seconds("26.04", "bf16", "qwen3-30b-a3b")
    assert seconds("26.06", "mxfp8", "llama3-8b") == seconds("26.04", "mxfp8", "llama3-8b")


@pytest.mark.parametrize(
    ("release", "named"),
    [
        ("26.06.01", "@26.06.01"),
        ("26.08", "@26.08"),
        ("27.02", "@26.08"),
        ("25.09", "@25.09"),
        ("25.02", "@25.09"),
        ("", ""),
    ],
)
def test_the_version_of_a_release(release: str, named: str) -> None:
    assert presets.at_release("stack", "megatron-bridge", release) == f"megatron-bridge{named}"
    assert presets.at_release("stack", "nanotron", release) == "nanotron"


@pytest.mark.parametrize(
    ("name", "said"),
    [("megatron-bridge@26.05", "has no version '26.05'; the nearest is megatron-bridge@26.04; known are 26.08"),
     ("megatron-bridge@", "has no version ''"), ("nanotron@25.1", "nanotron has no versions; write nanotron"),
     ("megatron-bidge@26.04", "unknown stack 'megatron-bidge@26.04'; did you mean megatron-bridge")],
)  # fmt: skip
def test_an_unknown_version_names_the_nearest(name: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        presets.load("stack", Stack, name)
