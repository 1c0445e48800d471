"""Clusters as people name them: "dgx-h100:64", "tpu-v5p:8x8x16", a file, a mapping."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from shardwise.spec import presets
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import NetworkLevel, link_of

_SIZED = re.compile(r"(.+?):(\d+(?:x\d+)*)")


def cluster_from(value: Any) -> Cluster:
    """The cluster that a name, a sized name, a file or a mapping describes."""
    if isinstance(value, str):
        match = _SIZED.fullmatch(value.strip())
        if match:
            return _sized(presets.resolve("cluster", Cluster, match.group(1)), match.group(2))
        name, colon, size = value.strip().rpartition(":")
        if colon and not presets.looks_like_file(value):
            raise SpecError("", f"{shown(value)} has the size {shown(size)}", f"write it like {name or 'dgx-h100'}:4")
    return presets.resolve("cluster", Cluster, value)


def _sized(cluster: Cluster, size: str) -> Cluster:
    if "x" in size:
        shape = parse_shape(size, "cluster")
        return cluster.with_shape(shape)
    if len(size) > 9:
        raise SpecError("", f"{size} nodes are out of range", "use fewer than a billion")
    return cluster.with_nodes(int(size))


def cpu_hosts(hosts: int, processes: int) -> Cluster:
    """``processes`` on the CPU of each of ``hosts``, which have one port each: placeholders to calibrate."""
    laptop = presets.resolve("cluster", Cluster, "laptop")
    if hosts == 1:
        return laptop.with_nodes(processes)
    inside = replace(laptop.levels[1], size=processes)
    between = NetworkLevel(name="ethernet", size=hosts, link=link_of("ethernet-1g"), ports=1)
    return replace(laptop, name="cpu-hosts", devices_per_node=processes, levels=(inside, between))


def parse_shape(text: str, field: str) -> tuple[int, ...]:
    """ "8x8x16" as (8, 8, 16)."""
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text.strip()):
        raise SpecError(field, f"{shown(text)} is not a shape", "write it like 8x8 or 4x4x8")
    axes = tuple(int(axis) for axis in text.strip().split("x"))
    if min(axes) < 1:
        raise SpecError(field, f"{shown(text)} has an axis of 0", "every axis has at least 1")
    return axes


def cluster_short(cluster: Cluster) -> Any:
    """A preset name with its size where that brings the cluster back, else all of its fields."""
    for sized in _candidate_names(cluster):
        try:
            if cluster_from(sized) == cluster:
                return sized
        except SpecError:
            continue
    return cluster.to_dict()


def _candidate_names(cluster: Cluster) -> list[str]:
    if cluster.name not in presets.names("cluster"):
        return []
    shapes = ["x".join(map(str, level.shape)) for level in cluster.levels if level.shape]
    width = cluster.levels[0].width
    return [
        cluster.name,
        *(f"{cluster.name}:{shape}" for shape in shapes),
        f"{cluster.name}:{cluster.devices // width}",
    ]
