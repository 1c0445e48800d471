"""One kind of communication in a step: which collective, how often, what it costs, what it hides under."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.collectives import CollectiveCost, CollectiveKind, Topology, collective_cost
from shardwise.cost.network import level_names
from shardwise.spec.errors import SpecError

Window = Literal["none", "forward", "backward", "attention forward", "attention backward"]


@dataclass(frozen=True)
class Traffic:
    """``count`` equal collectives of one step on the busiest device.

    ``window`` is the computation it may run under, ``window_share`` the part of that computation that is
    there when the data is (gradients are complete only in the last microbatch), and ``unhideable`` the share
    of the communication that nothing can hide (the first gather, the last bucket). A traffic whose exposed
    time follows from its schedule (pipeline messages) carries it as ``fixed_exposed_seconds``.
    """

    dimension: str
    what: str
    kind: CollectiveKind
    size_bytes: float
    count: float
    cost: CollectiveCost
    network: str
    window: Window = "none"
    window_share: float = 1.0
    unhideable: float = 0.0
    fixed_exposed_seconds: float | None = None
    exposed_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.count * float(self.cost.seconds)

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)

    @property
    def in_pass(self) -> Window:
        """The pass it belongs to: that of its window, else the one its name ends with."""
        return "forward" if self.window.endswith("forward") or self.what.endswith("forward") else "backward"

    @property
    def level_seconds(self) -> dict[str, float]:
        """Seconds in the step that it keeps each network level's links busy."""
        seconds: dict[str, float] = {}
        for level in self.cost.levels:
            seconds[level.level_name] = seconds.get(level.level_name, 0.0) + self.count * float(level.bandwidth_seconds)
        return seconds

    @property
    def bytes_sent(self) -> float:
        """Bytes the busiest device sends in the whole step."""
        return self.count * float(self.cost.sent_bytes)


def priced(
    dimension: str,
    what: str,
    kind: CollectiveKind,
    size_bytes: float,
    count: float,
    topology: Topology,
    algorithm: str,
    **overlap: object,
) -> Traffic:
    """A traffic with its collective priced on the network that its group spans."""
    cost = _cost(kind, size_bytes, topology, algorithm)
    return Traffic(dimension, what, kind, size_bytes, count, cost, level_names(topology), **overlap)  # type: ignore[arg-type]


def _cost(kind: CollectiveKind, size_bytes: float, topology: Topology, algorithm: str) -> CollectiveCost:
    """By the algorithm asked for; where this collective or network has no such algorithm, by the cheapest."""
    if algorithm not in ("auto", "textbook"):
        try:
            return collective_cost(kind, size_bytes, topology, algorithm)
        except SpecError:
            algorithm = "auto"
    return collective_cost(kind, size_bytes, topology, algorithm)


@dataclass(frozen=True)
class ComputeWindows:
    """Seconds of computation of one step on the busiest device, at its peak (the floor) or as predicted."""

    forward: float
    backward: float
    attention_forward: float
    attention_backward: float

    def seconds(self, window: Window) -> float:
        return {
            "none": 0.0,
            "forward": self.forward,
            "backward": self.backward,
            "attention forward": self.attention_forward,
            "attention backward": self.attention_backward,
        }[window]


IN_LAYER = ("tp", "cp", "ep")


def with_exposed_seconds(traffics: list[Traffic], windows: ComputeWindows) -> list[Traffic]:
    """The same traffics with what of each stays exposed.

    What belongs to a layer hides under that pass's computation, one after the other. What spans layers (gradients,
    gathered parameters, offload) hides under the whole pass, exposed transfers of the layers included, except while
    these keep the same link busy.
    """
    result = list(traffics)
    inside = [index for index, traffic in enumerate(traffics) if traffic.dimension in IN_LAYER]
    used: dict[str, float] = {}
    for index in inside:
        traffic = traffics[index]
        left = windows.seconds(traffic.in_pass) - used.get(traffic.in_pass, 0.0)
        hidden = _hidden(traffic, min(left, windows.seconds(traffic.window)))
        used[traffic.in_pass] = used.get(traffic.in_pass, 0.0) + hidden
        result[index] = replace(traffic, exposed_seconds=traffic.seconds - hidden)
    layers = [result[index] for index in inside]
    taken: dict[tuple[str, str], tuple[float, float]] = {}
    for index in sorted(set(range(len(traffics))) - set(inside), key=lambda i: traffics[i].window_share < 1):
        result[index] = _across_layers(traffics[index], layers, windows, taken)
    return _side_by_side(result)


def _side_by_side(traffics: list[Traffic]) -> list[Traffic]:
    """Leftovers of what spans layers are waited for together: as long as the longest, or as the busiest link takes."""

    def overlapped(traffic: Traffic) -> bool:
        spans_layers = traffic.dimension not in IN_LAYER and traffic.fixed_exposed_seconds is None
        return spans_layers and traffic.window != "none" and traffic.exposed_seconds > 0

    shares: dict[str, float] = {}
    for which in ("forward", "backward"):
        waiting = [traffic for traffic in traffics if overlapped(traffic) and traffic.in_pass == which]
        links: dict[str, float] = {}
        for traffic in waiting:
            for name, seconds in traffic.level_seconds.items():
                links[name] = links.get(name, 0.0) + min(traffic.exposed_seconds, seconds)
        alone = [traffic.exposed_seconds for traffic in waiting]
        shares[which] = max([*alone, *links.values()], default=0.0) / (sum(alone) or 1.0)
    return [
        replace(traffic, exposed_seconds=traffic.exposed_seconds * min(1.0, shares[traffic.in_pass]))
        if overlapped(traffic)
        else traffic
        for traffic in traffics
    ]


def _hidden(traffic: Traffic, available: float) -> float:
    return max(0.0, min(traffic.seconds * (1 - traffic.unhideable), available))


def _across_layers(
    traffic: Traffic,
    layers: list[Traffic],
    windows: ComputeWindows,
    taken: dict[tuple[str, str], tuple[float, float]],
) -> Traffic:
    """A traffic that spans layers; ``taken`` is what others used of each link: of all microbatches, and of the last."""
    if traffic.fixed_exposed_seconds is not None:
        return replace(traffic, exposed_seconds=traffic.fixed_exposed_seconds)
    if traffic.window == "none" or not traffic.seconds:
        return replace(traffic, exposed_seconds=traffic.seconds)
    own_pass = [layer for layer in layers if layer.in_pass == traffic.in_pass]
    lasting = windows.seconds(traffic.in_pass) + sum(layer.exposed_seconds for layer in own_pass)
    share = traffic.window_share
    hidden = min(traffic.seconds * (1 - traffic.unhideable), share * lasting)
    elsewhere = {name: traffic.seconds - needed for name, needed in traffic.level_seconds.items()}
    for name, other in elsewhere.items():
        busy = sum(layer.level_seconds.get(name, 0.0) for layer in own_pass)
        spread, last = taken.get((traffic.in_pass, name), (0.0, 0.0))
        # A busy link holds up only what goes over it; the rest of the transfer can still hide.
        hidden = min(hidden, max(0.0, share * max(0.0, lasting - busy - spread) - last) + other)
    for name, other in elsewhere.items():
        spread, last = taken.get((traffic.in_pass, name), (0.0, 0.0))
        used = max(0.0, hidden - other)
        taken[traffic.in_pass, name] = (spread + used, last) if share == 1 else (spread, last + used)
    return replace(traffic, exposed_seconds=traffic.seconds - hidden)
