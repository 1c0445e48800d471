"""Clusters as people name them: "dgx-h100:64", "tpu-v5p:8x8x16", a file, a mapping."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.spec import presets
from shardwise.spec.codec import Spec, reference
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_yaml
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import Link, NetworkLevel

_SIZED = re.compile(r"(.+?):(\d+(?:x\d+)*)")


def cluster_from(value: Any) -> Cluster:
    """The cluster that a name, a sized name, a file or a mapping describes."""
    if isinstance(value, str):
        match = _SIZED.fullmatch(value.strip())
        if match:
            cluster, size = presets.resolve("cluster", Cluster, match.group(1)), match.group(2)
            if "x" in size:
                return cluster.with_shape(parse_shape(size, "cluster"))
            if len(size) > 9:
                raise SpecError("", f"{size} nodes are out of range", "use fewer than a billion")
            return cluster.with_nodes(int(size))
        name, colon, size = value.strip().rpartition(":")
        if colon and not presets.looks_like_file(value):
            raise SpecError("", f"{shown(value)} has the size {shown(size)}", f"write it like {name or 'dgx-h100'}:4")
    return presets.resolve("cluster", Cluster, value)


def cpu_hosts(hosts: int, processes: int) -> Cluster:
    """``processes`` on the CPU of each of ``hosts``, which have one port each: placeholders to calibrate."""
    laptop = presets.resolve("cluster", Cluster, "laptop")
    if hosts == 1:
        return laptop.with_nodes(processes)
    inside = replace(laptop.levels[1], size=processes)
    between = NetworkLevel(name="ethernet", size=hosts, link=presets.resolve("link", Link, "ethernet-1g"), ports=1)
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
    """A preset name with its size where that describes the cluster, else all of its fields."""
    mixed = mixed_kinds(cluster)
    if mixed is not None:
        return mixed.to_dict()
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
    return [cluster.name, *(f"{cluster.name}:{size}" for size in (*shapes, cluster.devices // width))]


# -- Clusters of several kinds of nodes: "dgx-h100:4+dgx-a100:8", or a mapping {kinds: [...], link: ...}

MOST_KINDS = 3


def _kinds(values: Any) -> tuple[Cluster, ...]:
    if isinstance(values, str) or not isinstance(values, (list, tuple)):
        raise SpecError("", f"{shown(values)} should be a list of clusters", "write it like [dgx-h100:4, dgx-a100:8]")
    return tuple(cluster_from(value) for value in values)


@dataclass(frozen=True, kw_only=True)
class MixedCluster(Spec):
    """Kinds of nodes, each a cluster of equal devices, joined by ``link`` (one device's connection to another kind).

    Left out, it is the slower of the kinds' outermost links.
    """

    kinds: tuple[Cluster, ...] = reference(_kinds, lambda kinds: [cluster_short(kind) for kind in kinds])
    link: Link | None = presets.preset_field("link", Link, default=None)

    def check(self) -> None:
        if not 2 <= len(self.kinds) <= MOST_KINDS:
            raise SpecError("kinds", f"{len(self.kinds)} kinds of nodes", f"give 2 or {MOST_KINDS}")

    @property
    def devices(self) -> int:
        return sum(kind.devices for kind in self.kinds)

    @property
    def name(self) -> str:
        return " + ".join(sized_name(kind) for kind in self.kinds)

    @cached_property
    def between(self) -> NetworkLevel:
        """The network between two kinds, as a level that joins two members."""
        if self.link is not None:
            return NetworkLevel(name="between kinds", size=2, link=self.link)
        outermost = (port_of_device(kind, "between kinds") for kind in self.kinds)
        return min(outermost, key=lambda level: level.bandwidth_per_direction * level.reached_share)

    @cached_property
    def joined(self) -> tuple[Cluster, ...]:
        """Each kind with the network between kinds on top: the cluster as a stage of that kind sees it."""
        return tuple(replace(kind, levels=(*kind.levels, self.between)) for kind in self.kinds)

    @property
    def as_one(self) -> JoinedCluster:
        """All devices as one cluster, for what does not depend on a kind; each device is taken for the slowest."""
        device = min((kind.device for kind in self.kinds), key=lambda device: device.peak_flops("bf16"))
        return JoinedCluster(
            device=device,
            levels=(replace(self.between, size=self.devices),),
            name=self.name,
            devices_per_node=math.gcd(*(kind.node_devices for kind in self.kinds)),
            mixed=self,
        )


@dataclass(frozen=True, kw_only=True)
class JoinedCluster(Cluster):
    """The cluster of a job on several kinds of nodes; only what knows of kinds (`layout.views`) prices it."""

    mixed: MixedCluster | None = None

    __hash__ = Cluster.__hash__


def mixed_kinds(cluster: Cluster) -> MixedCluster | None:
    """The kinds of nodes of a cluster that has several."""
    mixed = cluster.mixed if isinstance(cluster, JoinedCluster) else None
    return mixed if mixed is not None and mixed.devices == cluster.devices else None


def device_words(cluster: Cluster) -> str:
    """How many of which devices: "8 × h100-sxm + 16 × a100-80gb"."""
    mixed = mixed_kinds(cluster)
    return " + ".join(f"{kind.devices} × {kind.device.name}" for kind in ((cluster,) if mixed is None else mixed.kinds))


def job_cluster_from(value: Any) -> Cluster:
    """The cluster of a job, which may be of several kinds."""
    mixed = None if isinstance(value, Cluster) else parse_mixed(value)
    return cluster_from(value) if mixed is None else mixed.as_one


def sized_name(kind: Cluster) -> str:
    """A kind as its user wrote it, or its devices."""
    short = cluster_short(kind)
    return short if isinstance(short, str) else f"{kind.name} ({kind.devices} × {kind.device.name})"


def squarest(devices: int) -> tuple[int, int]:
    """The two axes of a mesh or torus of so many devices that differ least."""
    rows = next(d for d in range(math.isqrt(devices), 0, -1) if devices % d == 0)
    return rows, devices // rows


def port_of_device(cluster: Cluster, name: str) -> NetworkLevel:
    """The outermost level with the bandwidth left to one device while all others send too; it joins two of them."""
    level = cluster.levels[-1]
    below = math.prod(inner.width for inner in cluster.levels[:-1])
    share = 1.0 if level.ports is None else min(1.0, level.ports / below)
    return NetworkLevel(
        name=name,
        size=2,
        bandwidth=level.bandwidth_per_direction * share,
        latency=level.latency_per_step,
        efficiency=level.reached_share,
        startup=level.startup,
        ramp=level.ramp,
    )


def parse_mixed(value: Any) -> MixedCluster | None:
    """The mixed cluster that a name like "dgx-h100:4+dgx-a100:8", a mapping with ``kinds`` or a file of one describes.

    None if it is something else; raises SpecError for one that is wrong.
    """
    if isinstance(value, MixedCluster):
        return value
    if isinstance(value, str) and "+" in value:
        return MixedCluster.from_dict({"kinds": [name.strip() for name in value.split("+")]})
    if isinstance(value, str) and value.endswith((".yaml", ".yml", ".json")):
        value = read_yaml(value, "file")
    return MixedCluster.from_dict(value) if isinstance(value, Mapping) and "kinds" in value else None
