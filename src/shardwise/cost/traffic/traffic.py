"""One kind of communication in a step: its payload, its collective, how often it runs, its cost and its overlap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardwise.collectives import CollectiveCost, CollectiveKind, Topology, collective_cost
from shardwise.cost.traffic.overlap import (
    ComputeWindows,
    OverlappedTransfer,
    Window,
    hidden_across_layers,
    hidden_in_layers,
    layer_windows,
    waiting,
)
from shardwise.layout.network import level_names
from shardwise.layout.payloads import PASSES, Pass, Payload
from shardwise.spec.errors import SpecError

IN_LAYER = ("tp", "cp", "ep")


@dataclass(frozen=True)
class Traffic:
    """Equal collectives of one step on the busiest device. Fields without a line are those of `OverlappedTransfer`."""

    dimension: str
    payload: Payload
    kind: CollectiveKind
    size_bytes: float
    """Of one collective."""
    count: float
    """Collectives in a step."""
    cost: CollectiveCost
    """Of one collective."""
    network: str
    """The network levels that its group spans, in words."""
    window: Window = "none"
    window_share: float = 1.0
    last_only: bool = False
    delay_seconds: float = 0.0
    unhideable: float = 0.0
    """The share that cannot be overlapped."""
    units_taken: float = 0.0
    repeated: float = 0.0
    once: bool = False
    """It is sent after the last microbatch, and not overlapped."""
    fixed_exposed_seconds: float | None = None
    """Exposed seconds where the pipeline's schedule determines them, as of messages between stages."""
    exposed_seconds: float = 0.0
    """What the step waits for."""
    under_compute_seconds: float = 0.0
    """Hidden by computation; the rest of what is not exposed overlaps with other transfers."""

    @property
    def seconds(self) -> float:
        return self.count * float(self.cost.seconds)

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)

    @property
    def slowed_seconds(self) -> float:
        """How much it slows the computation it overlaps with, by the compute units that it occupies."""
        return self.units_taken * self.under_compute_seconds

    @property
    def added_seconds(self) -> float:
        """How much it lengthens the step: what is exposed, and how much computation slows down."""
        return self.exposed_seconds + self.slowed_seconds

    @property
    def what(self) -> str:
        """In words; decisions depend on the payload."""
        return self.payload.words

    @property
    def in_pass(self) -> Pass:
        return self.payload.in_pass

    @property
    def level_seconds(self) -> dict[str, float]:
        """Seconds in the step that it keeps each network level's links busy."""
        seconds: dict[str, float] = {}
        for level in self.cost.levels:
            seconds[level.level_name] = seconds.get(level.level_name, 0.0) + self.count * float(level.busy_seconds)
        return seconds

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to a layer of a microbatch."""
        return self.dimension in IN_LAYER and not self.once

    @property
    def transfer(self) -> OverlappedTransfer:
        """The same as an input of `overlap`."""
        return OverlappedTransfer(
            self.in_pass,
            self.seconds,
            self.level_seconds,
            self.window,
            self.window_share,
            self.last_only,
            1 - self.unhideable,
            self.units_taken,
            self.repeated,
            self.delay_seconds,
        )

    @property
    def bytes_sent(self) -> float:
        """Bytes the busiest device sends in the whole step."""
        return self.count * float(self.cost.sent_bytes)


def priced(
    dimension: str,
    payload: Payload,
    kind: CollectiveKind,
    size_bytes: float,
    count: float,
    topology: Topology,
    algorithm: str,
    again: float = 0,
    **overlap: object,
) -> Traffic:
    """A traffic with its collective priced on the network that its group spans.

    Recompute repeats the share ``again`` of the ``count`` collectives.
    """
    cost, repeated = collective_price(kind, size_bytes, topology, algorithm), again / (1 + again)
    count, network = count * (1 + again), level_names(topology)
    return Traffic(dimension, payload, kind, size_bytes, count, cost, network, repeated=repeated, **overlap)  # type: ignore[arg-type]


def collective_price(kind: CollectiveKind, size_bytes: Any, topology: Topology, algorithm: str) -> CollectiveCost:
    """By the given algorithm; if there is none by that name for this collective or network, by the cheapest."""
    price = _price_of_one if isinstance(size_bytes, float) else _price  # many layouts need the price of one size
    return price(kind, size_bytes, topology, algorithm)


def _price(kind: CollectiveKind, size_bytes: Any, topology: Topology, algorithm: str) -> CollectiveCost:
    if algorithm not in ("auto", "textbook"):
        try:
            return collective_cost(kind, size_bytes, topology, algorithm)
        except SpecError:
            algorithm = "auto"
    return collective_cost(kind, size_bytes, topology, algorithm)


_price_of_one = lru_cache(maxsize=4096)(_price)


def with_exposed_seconds(traffics: list[Traffic], windows: ComputeWindows) -> list[Traffic]:
    """The same traffics with their exposed seconds."""
    result = list(traffics)
    inside = [index for index, traffic in enumerate(traffics) if traffic.in_layer]
    layers = [traffics[index].transfer for index in inside]
    hidden = hidden_in_layers(layers, windows)
    for index, transfer, under in zip(inside, layers, hidden):
        left_over = transfer.seconds - under
        result[index] = replace(traffics[index], exposed_seconds=left_over, under_compute_seconds=under)
    lasting, busy = layer_windows(layers, hidden, windows)
    across = [i for i, t in enumerate(traffics) if not t.in_layer and t.fixed_exposed_seconds is None and t.seconds]
    transfers = [traffics[index].transfer for index in across]
    hidden, on_links = hidden_across_layers(transfers, lasting, busy)
    left = {which: waiting(transfers, hidden, on_links, which) for which in PASSES}
    for index, transfer, under in zip(across, transfers, hidden):
        together = left[transfer.in_pass]
        # Transfers that are waited for at the same time share that time in proportion.
        share = together.longest / together.alone if transfer.window != "none" and together.alone else 1.0
        exposed = (transfer.seconds - under) * share
        result[index] = replace(traffics[index], exposed_seconds=exposed, under_compute_seconds=under)
    scheduled = ((traffic, traffic.fixed_exposed_seconds) for traffic in result)
    return [traffic if fixed is None else replace(traffic, exposed_seconds=fixed) for traffic, fixed in scheduled]
