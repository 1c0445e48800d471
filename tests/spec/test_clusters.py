"""Clusters as people name them: sized, shaped, cut to part of a node, or joined over data centres."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec import Cluster, Job, SpecError, presets
from shardwise.spec.clusters import cluster_from, cluster_short, parse_shape
from tables import table


def widths(cluster: Cluster) -> list[int]:
    return [level.width for level in cluster.levels]


@table(
    ("name", "expected", "devices"),
    [
        ("dgx-h100", [8, 1], 8),
        ("dgx-h100:1", [8, 1], 8),
        ("dgx-h100:64", [8, 64], 512),
        (" DGX-H100:2 ", [8, 2], 16),
        ("gb200-nvl72:4", [72, 4], 288),
        ("tpu-v5p", [64, 1], 64),
        ("tpu-v5p:8x8x16", [1024, 1], 1024),
        ("two-datacenters", [8, 16, 2], 256),
        ("two-datacenters:8", [8, 4, 2], 64),
    ],
)
def test_a_sized_name(name: str, expected: list[int], devices: int) -> None:
    cluster = cluster_from(name)
    assert widths(cluster) == expected
    assert cluster.devices == devices


def test_a_shape_keeps_its_axes() -> None:
    assert cluster_from("tpu-v5p:8x8x16").levels[0].shape == (8, 8, 16)


@table(
    ("name", "said"),
    [
        ("dgx-h100:0", "0 nodes; use 1 or more"),
        ("dgx-h100:x", "has the size 'x'; write it like dgx-h100:4"),
        ("dgx-h100:-1", "has the size '-1'"),
        ("dgx-h100:", "has the size ''"),
        ("dgx-h100:8x8", "is not a torus or mesh; give a number of nodes: dgx-h100:4"),
        ("dgx-h100:9999999999", "use fewer than a billion"),
        ("dgx-h100:999999999", "use at most 10,000,000"),
        ("tpu-v5p:8x8", "has 2 axes; tpu-v5p has 3, such as 4x4x4"),
        ("tpu-v5p:0x4x4", "'0x4x4' has an axis of 0"),
        ("two-datacenters:7", "7 nodes do not divide over 2 wan members; use 6 or 8"),
        ("two-datacenters:1", "use 2"),
        ("dgx-h10:4", "did you mean dgx-h100"),
        ("", "is not a cluster"),
    ],
)
def test_a_size_that_cannot_be(name: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        cluster_from(name)
    assert said in str(caught.value)


@table("value", [7, None, ["dgx-h100"], True])
def test_what_is_no_cluster(value: Any) -> None:
    with pytest.raises(SpecError, match="is not a cluster; give a preset name, a file or a mapping"):
        cluster_from(value)


@table(
    ("name", "devices", "expected"),
    [
        ("dgx-h100", 4, [4, 1]),
        ("dgx-h100:4", 32, [8, 4]),
        ("dgx-h100", 512, [8, 64]),
        ("gb200-nvl72", 36, [36, 1]),
        ("gb200-nvl72", 144, [72, 2]),
        ("two-datacenters", 4, [4, 1, 1]),
    ],
)
def test_a_number_of_devices_is_part_of_a_node_or_whole_nodes(name: str, devices: int, expected: list[int]) -> None:
    assert widths(cluster_from(name).with_devices(devices)) == expected


def test_devices_that_are_no_whole_nodes_name_the_neighbours() -> None:
    with pytest.raises(
        SpecError, match="12 is not a whole number of dgx-h100 nodes of 8; use 8 or 16, or set gpus_per_n"
    ):
        cluster_from("dgx-h100").with_devices(12)
    with pytest.raises(SpecError, match="32 gives no shape; give one: tpu-v5p:4x4x4"):
        cluster_from("tpu-v5p").with_devices(32)


def test_fewer_devices_of_every_node() -> None:
    cluster = cluster_from("gb200-nvl72:2").with_node_devices(64)
    assert widths(cluster) == [64, 2]
    assert cluster.with_devices(192).devices == 192
    with pytest.raises(SpecError, match="9 does not fit dgx-h100; use at most 8"):
        cluster_from("dgx-h100").with_node_devices(9)


def test_hosts_of_a_pod_are_smaller_than_its_innermost_level() -> None:
    cluster = cluster_from("tpu-v5p:4x4x8")
    assert (cluster.node_devices, cluster.nodes) == (4, 32)
    assert (cluster_from("dgx-h100:4").node_devices, cluster_from("dgx-h100:4").nodes) == (8, 4)


def test_an_axis_wraps_only_at_whole_multiples() -> None:
    torus = cluster_from("tpu-v5p").levels[0]
    assert torus.wraps(8)
    assert not torus.wraps(2)


@given(st.integers(1, 10**6))
def test_any_number_of_nodes_keeps_its_short_name(nodes: int) -> None:
    cluster = cluster_from(f"dgx-h100:{nodes}")
    assert cluster.devices == 8 * nodes
    assert cluster_from(cluster_short(cluster)) == cluster


@given(st.lists(st.integers(1, 999), min_size=1, max_size=4))
def test_shapes_are_read_as_written(axes: list[int]) -> None:
    assert parse_shape("x".join(map(str, axes)), "--shape") == tuple(axes)


@table("text", ["", "x", "8xx8", "8x", "x8", "8*8", "8x-1", "٨x٨x", "8x" * 3, "1e3x2", "9" * 10])
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(SpecError, match="is not a shape; write it like 8x8"):
        parse_shape(text, "--shape")


@table("name", presets.names("cluster"))
def test_every_cluster_of_the_catalogue_takes_a_job(name: str) -> None:
    job = Job(model="llama3-8b", cluster=name, training={"global_batch": "1M-tokens"})  # type: ignore[arg-type]
    assert job.strategy.dp == job.cluster.devices
    assert Job.from_yaml(job.to_yaml()) == job


@table("kind", presets.KINDS)
def test_every_preset_loads_by_its_name_in_any_case(kind: str) -> None:
    from shardwise.spec import Device, Link, Model
    from shardwise.spec.stack import Stack

    noun: Any = {"model": Model, "device": Device, "link": Link, "cluster": Cluster, "stack": Stack}[kind]
    assert presets.names(kind)
    for name in presets.names(kind):
        assert presets.load(kind, noun, name).name == name
        assert presets.load(kind, noun, name.upper()) == presets.load(kind, noun, name)


@table(("wrong", "right"), [("llama3-70", "llama3-70b"), ("lama3-8b", "llama3-8b"), ("GPT2_XXL", "gpt2-xl")])
def test_an_unknown_preset_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(SpecError, match=rf"unknown model '{wrong}'; did you mean .*{re.escape(right)}"):
        Job(model=wrong, cluster="laptop")  # type: ignore[arg-type]


def test_a_name_unlike_any_points_to_the_list() -> None:
    with pytest.raises(SpecError, match="`shardwise list models` shows all"):
        Job(model="zzzzzz", cluster="laptop")  # type: ignore[arg-type]


@table("name", ["..", "...", ".hidden", "a b", "é" * 300, "x\x00y", "a*"])
def test_a_name_that_is_no_name_is_unknown(name: str) -> None:
    with pytest.raises(SpecError, match="unknown model"):
        Job(model=name, cluster="laptop")  # type: ignore[arg-type]
