"""Versions of stacks: what each changes, how it is named, and what it costs a job."""

from __future__ import annotations

import pytest

from shardwise.cost.step.prediction import predict
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.stack import Stack, stack_from

VERSIONED = [name for name in presets.names("stack") if presets.versions("stack", name)]
NAMES = [f"{name}@{version.name}" for name in VERSIONED for version in presets.versions("stack", name)]


def job(stack: str, precision: str = "mxfp8", model: str = "qwen3-30b-a3b") -> Job:
    named = {"model": model, "cluster": "dgx-b200", "stack": stack, "strategy": {"ep": 8 if "a3b" in model else 1}}
    return Job.from_dict({**named, "training": {"precision": precision, "global_batch": 64, "seq": 4096}})


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
    assert newest.mixtures and newest.mixtures.cuda_graphs == "full"
    assert older.mixtures and older.mixtures.cuda_graphs == "partial"
    assert (oldest.mixtures, oldest.dispatch) == (None, "all-to-all")


def test_what_a_release_brings_to_mixtures_in_one_format_is_theirs_alone() -> None:
    def seconds(version: str, precision: str, model: str) -> float:
        return predict(job(f"megatron-bridge@{version}", precision, model)).step_seconds

    assert seconds("26.06", "mxfp8", "qwen3-30b-a3b") < 0.85 * seconds("26.04", "mxfp8", "qwen3-30b-a3b")
    assert seconds("26.06", "bf16", "qwen3-30b-a3b") == seconds("26.04", "bf16", "qwen3-30b-a3b")
    assert seconds("26.06", "mxfp8", "llama3-8b") == seconds("26.04", "mxfp8", "llama3-8b")


@pytest.mark.parametrize(
    ("release", "named"),
    [("26.06.01", "@26.06"), ("26.08", "@26.08"), ("27.02", "@26.08"), ("25.09", "@25.11"), ("", "")],
)
def test_the_version_of_a_release(release: str, named: str) -> None:
    assert presets.at_release("stack", "megatron-bridge", release) == f"megatron-bridge{named}"
    assert presets.at_release("stack", "torchtitan", release) == "torchtitan"


@pytest.mark.parametrize(
    ("name", "said"),
    [("megatron-bridge@26.05", "has no version '26.05'; the nearest is megatron-bridge@26.04; known are 26.08"),
     ("megatron-bridge@", "has no version ''"), ("torchtitan@25.1", "torchtitan has no versions; write torchtitan"),
     ("megatron-bidge@26.04", "unknown stack 'megatron-bidge@26.04'; did you mean megatron-bridge")],
)  # fmt: skip
def test_an_unknown_version_names_the_nearest(name: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        presets.load("stack", Stack, name)
