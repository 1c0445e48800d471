"""Every noun converts and checks its fields alike, from Python, from plain data and from text with units."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwise.spec import Cluster, Device, Job, Link, Model, NetworkLevel, SpecError, Strategy, Training
from tables import table

DEVICE: dict[str, Any] = {"peak": {"bf16": "100TFLOPS"}, "memory": "24GiB", "memory_bandwidth": "1TB/s"}
LEVEL: dict[str, Any] = {"size": 8, "bandwidth": "50GB/s", "latency": "2us"}
CLUSTER: dict[str, Any] = {"device": DEVICE, "levels": [LEVEL]}
MODEL: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 1000}
JOB: dict[str, Any] = {"model": MODEL, "cluster": CLUSTER, "training": {"global_batch": 8}}


def error_of(build: Any, *arguments: Any, **fields: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        build(*arguments, **fields)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of ``data`` with the field at a dotted path set."""
    name, _, rest = path.partition(".")
    if not rest:
        return {**data, name: value}
    if name == "levels":
        return {**data, "levels": [changed(data["levels"][0], rest, value)]}
    return {**data, name: changed(data.get(name, {}), rest, value)}


def test_text_with_units_becomes_numbers() -> None:
    device = Device(**DEVICE)
    assert device.memory == 24 * 2**30
    assert device.memory_bandwidth == 10**12
    assert device.peak == {"bf16": 100 * 10**12}
    assert NetworkLevel(**LEVEL).latency == 2e-6
    assert Model(**{**MODEL, "vocab": "32k"}).vocab == 32_000


def test_python_plain_data_and_nouns_build_the_same() -> None:
    built = Cluster(device=Device(**DEVICE), levels=(NetworkLevel(**LEVEL),))
    assert Cluster.from_dict(CLUSTER) == built
    assert Cluster(**CLUSTER) == built
    assert hash(Cluster(**CLUSTER)) == hash(built)


def test_nouns_are_immutable() -> None:
    device = Device(**DEVICE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.memory = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        device.peak["bf16"] = 1  # type: ignore[index]


def test_defaults_are_left_out_of_plain_data() -> None:
    assert Strategy().to_dict() == {}
    assert Strategy(tp=2).to_dict() == {"tp": 2}
    assert Link(bandwidth="1GB/s", latency=0).to_dict() == {"bandwidth": "1GB/s", "latency": 0}


@table(
    ("wrong", "right"),
    [("strategy.tpp", "tp"), ("strategy.recompte", "recompute"), ("training.optimiser", "optimizer"),
     ("clustr", "cluster"), ("model.hiden", "hidden"), ("cluster.device.memroy", "memory"),
     ("cluster.levels.latncy", "latency"), ("strategy.overlap.dpp", "dp"), ("strategy.offload.optimiser", "optimizer")],
)  # fmt: skip
def test_an_unknown_field_is_named_with_its_path_and_the_nearest_name(wrong: str, right: str) -> None:
    error = error_of(Job.from_dict, changed(JOB, wrong, 1))
    assert error.field == wrong.replace("levels", "levels[0]")
    assert error.problem == "unknown field"
    assert right in error.remedy.removeprefix("did you mean ").rstrip("?").split(" or ")


@table("missing", ["model", "cluster", "model.layers", "cluster.device", "cluster.device.memory"])
def test_a_missing_field_is_named_with_its_path(missing: str) -> None:
    parent, _, name = missing.rpartition(".")
    inner = JOB
    for step in parent.split(".") if parent else []:
        inner = inner[step]
    without = {key: value for key, value in inner.items() if key != name}
    error = error_of(Job.from_dict, changed(JOB, parent, without) if parent else without)
    assert (error.field, error.problem) == (missing, "is missing")


@table(
    ("path", "value", "said"),
    [
        ("strategy.tp", "two", "'two' is not a quantity"),
        ("strategy.tp", 1.5, "1.5 is not a whole number"),
        ("strategy.tp", True, "true is not a whole number"),
        ("strategy.tp", None, "null is not a whole number"),
        ("strategy.tp", [2], "[2] is not a whole number"),
        ("strategy.tp", 10**19, "is out of range"),
        ("strategy.tp", 10**400, "is out of range"),
        ("cluster.device.memory", 10**400, "is out of range"),
        ("strategy.tp", 0, "0 is below 1"),
        ("strategy.tp", -3, "-3 is below 1"),
        ("strategy.zero", 4, "4 is not a choice"),
        ("strategy.zero", True, "true is not a choice"),
        ("strategy.schedule", "1f2b", "'1f2b' is not a pipeline schedule"),
        ("strategy.sequence_parallel", "yes", "'yes' is neither true nor false"),
        ("strategy.order", "tp", "'tp' should be a list"),
        ("strategy.order", ["tp", "cp", "dp", "ep"], "'ep' is not a choice"),
        ("strategy.order", ["tp", "cp", "dp", "dp"], "does not name tp, cp, dp and pp once each"),
        ("strategy.overlap", True, "true should be a mapping of fields"),
        ("strategy.offload.optimizer", 1.5, "1.5 is above 1"),
        ("strategy.offload.optimizer", -0.1, "-0.1 is below 0"),
        ("strategy.stage_layers", [1, "x"], "'x' is not a quantity"),
        ("training.seq", 0, "0 is below 1"),
        ("training.global_batch", 0, "0 is not a positive whole number"),
        ("training.global_batch", "many", "'many' is not a quantity"),
        ("training.precision", "fp64", "'fp64' is not a choice"),
        ("training.checkpoint_interval", 0, "0 is not positive"),
        ("model.layers", 100_001, "100001 is above 2048"),
        ("model.name", 7, "7 should be text"),
        ("model.moe", {"experts": 4, "top_k": 5, "ffn": 8}, "5 is more than 4 experts"),
        ("cluster.device.memory", "-80GiB", "is not positive"),
        ("cluster.device.memory", "80 bananas", "unknown unit 'bananas'"),
        ("cluster.device.peak", {}, "names no data type"),
        ("cluster.device.peak", {"fp5": 1}, "unknown name"),
        ("cluster.device.peak", "100TFLOPS", "should be a mapping"),
        ("cluster.device.units_taken.collectives", 2, "2.0 is above 1"),
        ("cluster.levels", [], "is empty"),
        ("cluster.levels", LEVEL, "should be a list"),
        ("cluster.levels.bandwidth", -1, "-1 is not positive"),
        ("cluster.levels.latency", "-1us", "is below 0"),
        ("cluster.levels.topology", "star", "'star' is not a choice"),
        ("cluster.levels.size", 10**9, "make 1,000,000,000 devices"),
        ("cluster.levels.efficiency", 0, "0.0 is not positive"),
        ("cluster.host_link", "nvlnk-4", "unknown link 'nvlnk-4'"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(path: str, value: Any, said: str) -> None:
    error = error_of(Job.from_dict, changed(JOB, path, value))
    where = path.replace("levels.", "levels[0].")
    where = "cluster.levels" if "make" in said else where
    assert error.field.startswith(where)
    assert said in error.problem
    assert error.remedy


def test_choices_may_be_written_as_text() -> None:
    assert Strategy(zero="3").zero == 3  # type: ignore[arg-type]


@table(
    ("fields", "field"),
    [
        ({"topology": "torus"}, "shape"),
        ({"shape": [2, 4]}, "shape"),
        ({"topology": "mesh", "shape": [2, 3], "size": 8}, "shape"),
        ({"size": None}, "size"),
        ({"latency": None}, "link"),
    ],
)
def test_a_network_level_says_what_it_lacks(fields: dict[str, Any], field: str) -> None:
    assert error_of(NetworkLevel, **{**LEVEL, **fields}).field == field


@table(
    ("fields", "field"),
    [({"kv_heads": 3}, "kv_heads"), ({"heads": 6}, "heads"),
     ({"moe": {"experts": 4, "top_k": 1, "ffn": 8, "dense_layers": 5}}, "moe.dense_layers"),
     ({"moe": {"experts": 4, "top_k": 1, "ffn": 8, "groups": 3}}, "moe.groups"),
     ({"moe": {"experts": 4, "top_k": 1, "ffn": 8, "groups": 2, "groups_used": 3}}, "moe.groups_used")],
)  # fmt: skip
def test_a_model_says_which_sizes_disagree(fields: dict[str, Any], field: str) -> None:
    assert error_of(Model, **{**MODEL, **fields}).field == field


@table(
    ("fields", "field"),
    [
        ({"interleave": 2}, "interleave"),
        ({"schedule": "interleaved", "pp": 2}, "interleave"),
        ({"stage_layers": [1, 2], "pp": 3}, "stage_layers"),
    ],
)
def test_a_strategy_says_which_choices_disagree(fields: dict[str, Any], field: str) -> None:
    assert error_of(Strategy, **fields).field == field


@table("data", [None, 3, "text", [1, 2]])
def test_a_document_that_is_no_mapping_is_refused(data: object) -> None:
    assert "should be a mapping of fields" in error_of(Training.from_dict, data).problem


def test_a_long_value_is_cut_and_stays_on_one_line() -> None:
    error = error_of(Training, precision="x\ny" * 100)
    assert len(str(error)) < 250


def test_the_public_names_are_the_nouns() -> None:
    import shardwise

    assert shardwise.Job is Job
    assert set(shardwise.__all__) <= set(dir(shardwise))
    for name in shardwise.__all__:
        assert getattr(shardwise, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Jobb'"):
        _ = shardwise.Jobb
