"""When a packet that leaves one node arrives at another: ports, delay, loss and cuts; knows of no socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

ACKNOWLEDGED_SECONDS = 1e-3  # beside the delay, until a sender knows that a packet has arrived
QUEUE_BYTES = 32 * 2**20  # that wait in one node's port before it drops: more than TCP has under way


@dataclass
class Wire:
    """From one node to another: bytes/s, seconds one way, the share of packets lost; nothing passes where it is cut."""

    rate: float
    delay: float
    loss: float
    cut: bool = False
    free_at: float = 0.0  # when the last packet so far is through


class Wires:
    """Every node has one port, of which all of its wires share the rate in each direction."""

    def __init__(self, nodes: int, rate: float, delay: float, loss: float) -> None:
        self.port_rate = rate
        self._from = [[Wire(rate, delay, loss) for _ in range(nodes)] for _ in range(nodes)]
        self._sent_at = [0.0] * nodes  # when a node's port has sent all that it was given
        self._received_at = [0.0] * nodes
        self._queued = [0] * nodes
        self._random = Random(0)

    def arrival(self, source: int, destination: int, size: int, now: float) -> float | None:
        """When a packet of ``size`` bytes is there; None where it is lost. Call `arrived` once it is."""
        wire = self._from[source][destination]
        if wire.cut or self._queued[source] > QUEUE_BYTES or (wire.loss and self._random.random() < wire.loss):
            return None
        on_port = size / self.port_rate
        begun = max(now, self._sent_at[source])
        self._sent_at[source] = begun + on_port
        through = max(begun, wire.free_at) + size / min(wire.rate, self.port_rate)
        wire.free_at = through
        received = max(through, self._received_at[destination] + on_port)
        self._received_at[destination] = received
        self._queued[source] += size
        return received + wire.delay

    def arrived(self, source: int, size: int) -> None:
        self._queued[source] -= size

    def reshape(
        self, rate: float | None, delay: float | None, loss: float | None, pair: tuple[int, int] | None
    ) -> None:
        """Other values from now on, for all wires, or for the two of one ``pair`` of nodes."""
        if rate is not None and pair is None:
            self.port_rate = rate
        for wire in self._both_ways(pair):
            wire.rate = wire.rate if rate is None else rate
            wire.delay = wire.delay if delay is None else delay
            wire.loss = wire.loss if loss is None else loss

    def partition(self, pair: tuple[int, int]) -> None:
        for wire in self._both_ways(pair):
            wire.cut = True

    def heal(self) -> None:
        for wire in self._both_ways(None):
            wire.cut = False

    @property
    def lossy(self) -> bool:
        return any(wire.loss for wire in self._both_ways(None))

    @property
    def most_under_way(self) -> float:
        """The most bytes that fit on a wire and back."""
        return max(wire.rate * 2 * wire.delay for wire in self._both_ways(None))

    def _both_ways(self, pair: tuple[int, int] | None) -> Iterator[Wire]:
        for source, wires in enumerate(self._from):
            for destination, wire in enumerate(wires):
                if source != destination and (pair is None or {source, destination} == set(pair)):
                    yield wire
