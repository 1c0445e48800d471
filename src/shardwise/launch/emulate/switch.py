"""Our own switch between virtual nodes: computes when each packet arrives, and delivers it then."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import heapq
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from shardwise.launch.emulate import tap
from shardwise.launch.emulate.namespace import (
    configure,
    disable_ipv6,
    enter_open,
    new_namespace,
    returning,
    tune_tcp,
)
from shardwise.spec.emulation import Emulation

ACKNOWLEDGED_SECONDS = 1e-3  # on top of the delay, until a sender knows that a packet has arrived
QUEUE_BYTES = 32 * 2**20  # in one node's port before it drops packets: more than TCP has in flight
_EARLY_SECONDS = 30e-6  # a packet may arrive early by less than it takes to sleep and wake
_PR_SET_TIMERSLACK = 29


@dataclass
class EmulatedWire:
    """From one node to another: bytes/s, seconds one way, the share of packets lost; a cut wire loses all."""

    rate: float
    delay: float
    loss: float
    cut: bool = False
    free_at: float = 0.0  # when the last packet so far has passed


class Wires:
    """Every node has one port; all its wires share the port's rate in each direction."""

    def __init__(self, nodes: int, rate: float, delay: float, loss: float) -> None:
        self.port_rate = rate
        self._from = [[EmulatedWire(rate, delay, loss) for _ in range(nodes)] for _ in range(nodes)]
        self._sent_at = [0.0] * nodes  # when a node's port will have sent all that it was given
        self._received_at = [0.0] * nodes
        self._queued = [0] * nodes
        self._random = Random(0)

    def arrival(self, source: int, destination: int, size: int, now: float) -> float | None:
        """When a packet of ``size`` bytes arrives; None if it is lost. Call `arrived` once it has."""
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
    def most_in_flight(self) -> float:
        """The largest bandwidth-delay product of a wire, in bytes."""
        return max(wire.rate * 2 * wire.delay for wire in self._both_ways(None))

    def _both_ways(self, pair: tuple[int, int] | None) -> Iterator[EmulatedWire]:
        for source, wires in enumerate(self._from):
            for destination, wire in enumerate(wires):
                if source != destination and (pair is None or {source, destination} == set(pair)):
                    yield wire


class PacketSwitch:
    """The nodes' interfaces and the wires between them."""

    def __init__(self, emulation: Emulation) -> None:
        self.wires = Wires(emulation.nodes, emulation.rate, emulation.delay, emulation.loss)
        self.namespaces: list[int] = []
        self._taps: list[int] = []
        self._in_flight: list[tuple[float, int, int, int, int, bytes]] = []  # by arrival, then in the order received
        self._received = 0
        with returning():
            for node in range(emulation.nodes):
                self.namespaces.append(new_namespace())
                disable_ipv6()
                self._taps.append(tap.open_tap())
                configure(node)
        self._adapt()

    def change(self, request: dict[str, Any]) -> None:
        """One of reshape, partition and heal, with its values."""
        if "reshape" in request:
            self.wires.reshape(**request["reshape"])
            self._adapt()
        if "partition" in request:
            self.wires.partition(request["partition"])
        if "heal" in request:
            self.wires.heal()

    def forward(self, control: int, controlled: Callable[[int], bool]) -> None:
        """Forwards packets until ``controlled`` returns False; it is called when ``control`` is readable."""
        _raise_priority()
        node_of = {handle: node for node, handle in enumerate(self._taps)}
        watched = [control, *self._taps]
        while True:
            for handle in select.select(watched, (), (), self._deliver())[0]:
                if handle != control:
                    self._receive(node_of[handle], handle)
                elif not controlled(control):
                    return

    def _receive(self, source: int, handle: int) -> None:
        """Accepts one packet: one at a time, so that a busy node cannot starve the others."""
        packet = os.read(handle, tap.MOST_BYTES)
        destination, size = tap.destination(packet), tap.wire_bytes(packet)
        if 0 <= destination < len(self._taps) and destination != source:
            at = self.wires.arrival(source, destination, size, time.monotonic())
            if at is not None:
                self._received += 1
                heapq.heappush(self._in_flight, (at, self._received, source, destination, size, packet))

    def _deliver(self) -> float | None:
        """Delivers what has arrived by now; returns the seconds until the next packet, None if nothing is in flight."""
        in_flight = self._in_flight
        soon = time.monotonic() + _EARLY_SECONDS
        while in_flight and in_flight[0][0] <= soon:
            _, _, source, destination, size, packet = heapq.heappop(in_flight)
            self.wires.arrived(source, size)
            try:
                os.write(self._taps[destination], packet)
            except OSError:  # its interface is down: lost, as on any wire
                continue
        return max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else None

    def _adapt(self) -> None:
        """Makes the nodes fit their wires: packets are lost one by one; a full pipe needs its buffers."""
        with returning():
            for namespace, handle in zip(self.namespaces, self._taps):
                enter_open(namespace)
                tune_tcp(self.wires.most_in_flight + self.wires.port_rate * ACKNOWLEDGED_SECONDS)
                tap.set_segmentation_offload(handle, not self.wires.lossy)


def _raise_priority() -> None:
    """On busy cores a switch that waits for its turn would be a slower link."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds: wake up on time, not soon after
    gc.disable()
