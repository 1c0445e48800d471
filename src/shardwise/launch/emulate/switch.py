"""Our own switch between virtual nodes: computes when a packet arrives, and delivers it then."""

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
    current_namespace,
    enter_open,
    forbid_ipv6,
    new_namespace,
    tune_tcp,
)
from shardwise.spec.emulation import Emulation

ACKNOWLEDGED_SECONDS = 1e-3  # beside the delay, until a sender knows that a packet has arrived
QUEUE_BYTES = 32 * 2**20  # that wait in one node's port before it drops: more than TCP has under way


@dataclass
class EmulatedWire:
    """From one node to another: bytes/s, seconds one way, the share of packets lost; nothing passes where it is cut."""

    rate: float
    delay: float
    loss: float
    cut: bool = False
    free_at: float = 0.0  # when the last packet so far has passed


class Wires:
    """Every node has one port, of which all of its wires share the rate in each direction."""

    def __init__(self, nodes: int, rate: float, delay: float, loss: float) -> None:
        self.port_rate = rate
        self._from = [[EmulatedWire(rate, delay, loss) for _ in range(nodes)] for _ in range(nodes)]
        self._sent_at = [0.0] * nodes  # when a node's port has sent all that it was given
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
    def most_under_way(self) -> float:
        """The most bytes that fit on a wire and back."""
        return max(wire.rate * 2 * wire.delay for wire in self._both_ways(None))

    def _both_ways(self, pair: tuple[int, int] | None) -> Iterator[EmulatedWire]:
        for source, wires in enumerate(self._from):
            for destination, wire in enumerate(wires):
                if source != destination and (pair is None or {source, destination} == set(pair)):
                    yield wire


# -- switch ----------------------------------------------------------------------------------------
#
# A switch of our own between the nodes: it takes their packets, and hands them on when they have arrived.


_EARLY_SECONDS = 30e-6  # a packet may arrive: less than it takes to sleep and wake
_PR_SET_TIMERSLACK = 29


class PacketSwitch:
    """The nodes' interfaces and the wires between them."""

    def __init__(self, emulation: Emulation) -> None:
        self.wires = Wires(emulation.nodes, emulation.rate, emulation.delay, emulation.loss)
        self.namespaces: list[int] = []
        self._taps: list[int] = []
        self._under_way: list[tuple[float, int, int, int, int, bytes]] = []  # by when it arrives, then as taken
        self._taken = 0
        home = current_namespace()
        for node in range(emulation.nodes):
            self.namespaces.append(new_namespace())
            forbid_ipv6()
            self._taps.append(tap.open_tap())
            configure(node)
        enter_open(home)
        os.close(home)
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
        _come_first()
        node_of = {handle: node for node, handle in enumerate(self._taps)}
        watched = [control, *self._taps]
        while True:
            for handle in select.select(watched, (), (), self._deliver())[0]:
                if handle != control:
                    self._take(node_of[handle], handle)
                elif not controlled(control):
                    return

    def _take(self, source: int, handle: int) -> None:
        """Accepts one packet: taking one at a time keeps a busy node from starving the others."""
        packet = os.read(handle, tap.MOST_BYTES)
        destination, size = tap.destination(packet), tap.wire_bytes(packet)
        if 0 <= destination < len(self._taps) and destination != source:
            at = self.wires.arrival(source, destination, size, time.monotonic())
            if at is not None:
                self._taken += 1
                heapq.heappush(self._under_way, (at, self._taken, source, destination, size, packet))

    def _deliver(self) -> float | None:
        """Delivers what has arrived by now; returns the seconds until the next packet, None if nothing is in flight."""
        under_way = self._under_way
        soon = time.monotonic() + _EARLY_SECONDS
        while under_way and under_way[0][0] <= soon:
            _, _, source, destination, size, packet = heapq.heappop(under_way)
            self.wires.arrived(source, size)
            try:
                os.write(self._taps[destination], packet)
            except OSError:  # its interface is down: as lost as on any wire
                continue
        return max(0.0, under_way[0][0] - time.monotonic()) if under_way else None

    def _adapt(self) -> None:
        """Makes the nodes fit their wires: losses are of single packets; a full pipe needs its buffers."""
        home = current_namespace()
        for namespace, handle in zip(self.namespaces, self._taps):
            enter_open(namespace)
            tune_tcp(self.wires.most_under_way + self.wires.port_rate * ACKNOWLEDGED_SECONDS)
            tap.take_whole(handle, not self.wires.lossy)
        enter_open(home)
        os.close(home)


def _come_first() -> None:
    """Raises the priority: on busy cores a switch that waits for its turn would be a slower link."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds: wake up when it is time, not soon after
    gc.disable()
