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
    """Seconds of computation of one step on the busiest device, at the device's peak."""

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


def with_exposed_seconds(traffics: list[Traffic], windows: ComputeWindows) -> list[Traffic]:
    """The same traffics with what of each stays exposed; those that share a window share its seconds.

    What spreads over the step claims first and takes an even part of every microbatch; what has only the window
    of one microbatch (``window_share`` below 1) finds there what the others leave. Both in the order given.
    """
    spread: dict[str, float] = {}
    single: dict[str, float] = {}
    result = list(traffics)
    for index in sorted(range(len(traffics)), key=lambda i: traffics[i].window_share < 1):
        traffic = traffics[index]
        if traffic.fixed_exposed_seconds is not None:
            result[index] = replace(traffic, exposed_seconds=traffic.fixed_exposed_seconds)
            continue
        # Attention is part of the forward and backward passes: one pool of seconds per pass.
        pool = traffic.window.removeprefix("attention ")
        share = traffic.window_share
        left = share * (windows.seconds(pool) - spread.get(pool, 0.0)) - single.get(pool, 0.0)  # type: ignore[arg-type]
        available = max(0.0, min(left, windows.seconds(traffic.window) * share))
        hidden = min(traffic.seconds * (1 - traffic.unhideable), available)
        used = spread if share == 1 else single
        used[pool] = used.get(pool, 0.0) + hidden
        result[index] = replace(traffic, exposed_seconds=traffic.seconds - hidden)
    return result
