"""What other hardware would gain: the same search on a changed cluster, or on fewer devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from shardwise.cost.step.prediction import predict
from shardwise.planner.advice.frameworks import searched_for
from shardwise.planner.candidate import Candidate
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search
from shardwise.planner.search.space import plain_strategy
from shardwise.spec import presets, units
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Cluster, Device, UnitsTaken
from shardwise.spec.job import Job

_ALIASES = {"ib": "infiniband", "network": "infiniband"}


@dataclass(frozen=True)
class WhatIf:
    """A change, and the plan with it."""

    change: str
    request: Request
    result: Plan | Search


def what_if(request: Request, change: str) -> WhatIf:
    """``change``: "ib=800Gb/s", "memory=192GB", "nvlink-size=72", "device=b200", "sm-free"; several with commas."""
    other = request.on(changed(request.job.cluster, change))
    return WhatIf(change, other, plan(other))


def changed(cluster: Cluster, change: str) -> Cluster:
    """The cluster with all that ``change`` names, separated by commas."""
    for part in change.split(","):
        cluster = changed_cluster(cluster, part.strip())
    return cluster


def changed_cluster(cluster: Cluster, change: str) -> Cluster:
    """The cluster with one thing changed; raises SpecError for what cannot be changed."""
    name, equals, value = change.partition("=")
    name = name.strip().lower()
    if name == "sm-free" and not equals:
        return replace(cluster, device=replace(cluster.device, units_taken=UnitsTaken()))
    if not equals or not value.strip():
        raise SpecError("⟨what_if⟩", f"{shown(change)} is not NAME=VALUE", "write ib=800Gb/s, memory=192GB or sm-free")
    if name == "memory":
        return replace(cluster, device=replace(cluster.device, memory=units.parse(value, "bytes", "⟨what_if⟩ memory")))
    if name == "device":
        return replace(cluster, device=presets.resolve("device", Device, value.strip()))
    if name == "host-memory":
        return replace(cluster, host_memory=units.parse(value, "bytes", "⟨what_if⟩ host-memory"))
    level, _, what = name.partition("-")
    index = _level(cluster, level)
    if what == "size":
        return _with_domain(cluster, index, value)
    if what not in ("", "latency"):
        raise SpecError("⟨what_if⟩", f"{shown(name)} cannot be changed", f"{level}, {level}-latency or {level}-size")
    old = cluster.levels[index]
    if what == "latency":
        new = old.with_speed(old.bandwidth_per_direction, units.parse(value, "seconds", f"⟨what_if⟩ {name}"))
    else:
        new = old.with_speed(units.parse(value, "bytes/s", f"⟨what_if⟩ {name}"), old.wire_latency)
    return cluster.with_level(index, new)


def _level(cluster: Cluster, name: str) -> int:
    names = [level.name for level in cluster.levels]
    wanted = _ALIASES.get(name, name)
    if wanted not in names and wanted == "infiniband":
        wanted = names[-1]
    if wanted not in names:
        known = [*names, "memory", "device", "host-memory", "sm-free"]
        raise SpecError("⟨what_if⟩", f"{cluster.name} has no {shown(name)}", nearest_name(name, known) or known[0])
    return names.index(wanted)


def _with_domain(cluster: Cluster, index: int, value: str) -> Cluster:
    """A level with ``value`` members; the next level out gets as many as keep the number of devices."""
    if index + 1 >= len(cluster.levels):
        raise SpecError("⟨what_if⟩", f"{cluster.levels[index].name} is the outermost level", "give ⟨cluster⟩ a size")
    level, above = cluster.levels[index], cluster.levels[index + 1]
    size = int(units.parse(value, "count", "⟨what_if⟩ size"))
    if level.shape or above.shape:
        raise SpecError("⟨what_if⟩", "a torus has a shape, not a size", "give ⟨cluster⟩ another shape")
    members = level.width * above.width
    if size < 1 or members % size:
        raise SpecError("⟨what_if⟩", f"{size} does not divide {members:,} devices", "choose a divisor")
    wider = cluster.with_level(index, replace(level, size=size))
    return wider.with_level(index + 1, replace(above, size=members // size))


_MOST_SIZES = 5


@dataclass(frozen=True)
class Size:
    """The fastest strategy on some of the devices."""

    devices: int
    best: Candidate

    @property
    def device_seconds_per_token(self) -> float:
        """Proportional to the cost of a token."""
        return self.devices * self.best.seconds_per_token

    def cost_against(self, other: Size) -> float:
        """The cost of a token as a share of another size's."""
        return self.device_seconds_per_token / other.device_seconds_per_token


def sizes(base: Plan, framework: str | None = None) -> tuple[Size, ...]:
    """The plan on all devices, half of them, a quarter, ... while something fits; only sizes that get cheaper."""
    front = [Size(base.request.job.cluster.devices, base.fastest)]
    for cluster in islice(_parts(base.request.job.cluster), _MOST_SIZES - 1):
        best = _fastest_on(cluster, base, framework)
        if best is None:
            break
        size = Size(cluster.devices, best)
        if size.device_seconds_per_token < front[-1].device_seconds_per_token:
            front.append(size)
    return tuple(front)


def faster_part(base: Plan, framework: str | None = None) -> Size | None:
    """The fastest part of the cluster, if it beats the whole by more than noise; else None.

    At a fixed batch a slow network may cost more than the devices behind it gain.
    """
    whole = best = base.fastest
    device_seconds, limit = _least_device_seconds(whole.job), 1 + base.noise.share
    for cluster in islice(_parts(whole.job.cluster), _MOST_SIZES):
        if device_seconds / cluster.devices * limit >= best.seconds_per_token:
            break
        other = _fastest_on(cluster, base, framework)
        if other is None:
            break
        best = min(best, other, key=lambda candidate: candidate.seconds_per_token)
    return Size(best.job.cluster.devices, best) if whole.loss_to(best) > base.noise.share else None


def _fastest_on(cluster: Cluster, base: Plan, framework: str | None) -> Candidate | None:
    """The fastest strategy on ``cluster``; None if nothing fits, or no time is left."""
    if base.request.deadline.leaves_out():
        return None
    request = base.request.on(cluster)
    try:
        other = plan(request) if framework is None else searched_for(request, framework)[0]
    except SpecError:  # the framework can express nothing for it
        return None
    return other.fastest if isinstance(other, Plan) else None


def _parts(cluster: Cluster) -> Iterator[Cluster]:
    """Half of the cluster, a quarter, ...: cut at the outermost network level first."""
    for index in reversed(range(len(cluster.levels))):
        while (level := cluster.levels[index]).width > 1:
            if level.shape:  # half of a torus is another shape
                return
            cluster = cluster.with_level(index, replace(level, size=level.width // 2))
            yield cluster


def _least_device_seconds(job: Job) -> float:
    """A lower bound on the device time of a token, however it is split: whole matrices, all tokens at once."""
    alone = replace(plain_strategy(job), dp=1, microbatch=job.sequences)
    compute = predict(job.unchecked(strategy=alone)).slowest.compute
    return float(compute.forward + compute.backward) / job.tokens_per_step
