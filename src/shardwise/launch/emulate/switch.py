"""The process that holds the virtual nodes, and the two switches that can join them: our own, or the kernel's.

It runs as a module; its arguments are an `Emulation` and the backend that shapes the links. It prints the handles of
the namespaces as one line of JSON, then reads lines with changes and answers each. It ends when its input closes, and
everything it created goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import heapq
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from shardwise.launch.emulate import namespace
from shardwise.launch.emulate.namespace import INTERFACE, MTU
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError

ACKNOWLEDGED_SECONDS = 1e-3  # beyond the delay, until a sender learns that a packet has arrived
QUEUE_BYTES = 32 * 2**20  # in one node's port before it drops packets: more than TCP has in flight
_EARLY_SECONDS = 30e-6  # a packet may arrive early by less than it takes to sleep and wake
_PR_SET_TIMERSLACK = 29

# -- the far end of a node's interface: a TUN device, whose packets this process reads and writes ----

DEVICE = "/dev/net/tun"
_MOST_BYTES = 65536 + 64
_HEADER = 10  # virtio header before each packet: how the kernel may segment it, and where its checksum goes
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TUN, _WITHOUT_PROTOCOL, _WITH_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x1, 0x2
_SEGMENT_HEADERS = 52  # IPv4 and TCP with time stamps


def _open_interface() -> int:
    """Creates the interface of this thread's namespace; it exists until the file descriptor is closed."""
    handle = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _TUN | _WITHOUT_PROTOCOL | _WITH_HEADER
    fcntl.ioctl(handle, _SET_INTERFACE, struct.pack("16sH22x", namespace.INTERFACE.encode(), flags))
    return handle


def _destination(packet: bytes) -> int:
    """The node that a packet goes to; -1 for a packet that is not IPv4."""
    if len(packet) < _HEADER + 20 or packet[_HEADER] >> 4 != 4:
        return -1
    return packet[_HEADER + 19] - 1


def _wire_bytes(packet: bytes) -> int:
    """Its size on the wire: every segment that the kernel splits it into has its own headers."""
    size = len(packet) - _HEADER
    segment = packet[4] | packet[5] << 8
    return size + (size // segment) * _SEGMENT_HEADERS if segment else size


# -- our own switch: computes when each packet arrives, and delivers it then -------------------------


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
        self._interfaces: list[int] = []
        self._in_flight: list[tuple[float, int, int, int, int, bytes]] = []  # by arrival, then in the order received
        self._received = 0
        with namespace.returning():
            for node in range(emulation.nodes):
                self.namespaces.append(namespace.new_namespace())
                namespace.disable_ipv6()
                self._interfaces.append(_open_interface())
                namespace.configure(node)
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
        node_of = {handle: node for node, handle in enumerate(self._interfaces)}
        watched = [control, *self._interfaces]
        while True:
            for handle in select.select(watched, (), (), self._deliver())[0]:
                if handle != control:
                    self._receive(node_of[handle], handle)
                elif not controlled(control):
                    return

    def _receive(self, source: int, handle: int) -> None:
        """Accepts one packet: one at a time, so that a busy node cannot starve the others."""
        packet = os.read(handle, _MOST_BYTES)
        destination, size = _destination(packet), _wire_bytes(packet)
        if 0 <= destination < len(self._interfaces) and destination != source:
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
                os.write(self._interfaces[destination], packet)
            except OSError:  # its interface is down: lost, as on any wire
                continue
        return max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else None

    def _adapt(self) -> None:
        """Adapts the nodes to their wires: lossy ones need single packets, fast ones large buffers."""
        # With _SEGMENTS TCP hands over up to 64 KiB at once, as to a network card; without, each packet by itself.
        offload = _CHECKSUMS if self.wires.lossy else _CHECKSUMS | _SEGMENTS
        with namespace.returning():
            for node, handle in zip(self.namespaces, self._interfaces):
                namespace.enter_open(node)
                namespace.tune_tcp(self.wires.most_in_flight + self.wires.port_rate * ACKNOWLEDGED_SECONDS)
                fcntl.ioctl(handle, _SET_OFFLOAD, offload)


def _raise_priority() -> None:
    """A switch that waits for a core would look like a slower link."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds: wake up on time, not soon after
    gc.disable()


# -- the kernel as the switch: a bridge in its own namespace, netem and tbf on the sending side ------
# Cheaper and faster than our own switch, but few kernels have netem; without it only a rate can be enforced, by tbf.


_UNUSED_MAC = "02:00:00:00:00:ff"  # a hardware address that no interface has
_SMALL_PACKET = 256  # bytes: netem counts packets, most of which are larger
_SEGMENT_BYTES = 65536  # what TCP hands over at once


class KernelSwitch:
    """The same interface as `PacketSwitch`; the kernel does the work, this object only holds the namespaces."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        with namespace.returning():
            self._hub = namespace.new_namespace()
            self._has_netem = _has_netem()
            _ip("link", "add", "hub", "mtu", str(MTU), "type", "bridge")
            _ip("link", "set", "hub", "up")
            self.namespaces = [self._add_node(node) for node in range(emulation.nodes)]
        self._shape(emulation)

    def change(self, request: dict[str, Any]) -> None:
        if "reshape" in request:
            given = {name: value for name, value in request["reshape"].items() if value is not None}
            if "pair" in given:
                raise SpecError("emulate", "the kernel shapes all links alike", "choose shaping='switch'")
            self._shape(self._emulation.unchecked(**given))
        if "partition" in request:
            first, other = request["partition"]
            for here, there in ((first, other), (other, first)):
                _inside(self.namespaces[here], partial(_neighbour, "replace", there, "lladdr", _UNUSED_MAC))
        if "heal" in request:
            for inside in self.namespaces:
                for node in range(self._emulation.nodes):
                    _inside(inside, partial(_neighbour, "flush", node))

    def forward(self, control: int, controlled: Callable[[int], bool]) -> None:
        while select.select([control], [], []) and controlled(control):
            pass

    def _add_node(self, node: int) -> int:
        """A new namespace whose interface is wired to a port of the hub; this thread is in the hub's namespace."""
        made = namespace.new_namespace()
        namespace.disable_ipv6()
        namespace.enter_open(self._hub)
        where = f"/proc/{os.getpid()}/fd/{made}"
        port = f"port{node}"
        _ip("link", "add", port, "mtu", str(MTU), "type", "veth", "peer", "name", INTERFACE, "netns", where)
        _ip("link", "set", port, "master", "hub", "up")
        namespace.enter_open(made)
        namespace.configure(node)
        namespace.enter_open(self._hub)
        return made

    def _shape(self, wanted: Emulation) -> None:
        if not self._has_netem and (wanted.delay or wanted.loss):
            raise SpecError("emulate", "this kernel has no netem, and so neither delay nor loss", "shaping='switch'")
        self._emulation = wanted
        for node, inside in enumerate(self.namespaces):
            _inside(inside, self._shape_sending)
            # What a node receives is limited by its port as well.
            _inside(self._hub, partial(_limit, f"port{node}", wanted.rate))

    def _shape_sending(self) -> None:
        wanted = self._emulation
        namespace.tune_tcp(wanted.rate * (2 * wanted.delay + ACKNOWLEDGED_SECONDS))
        # Packets are lost one by one: TCP must not hand over several as one.
        _ip("link", "set", INTERFACE, "gso_max_segs", "1" if wanted.loss else "65535")
        if not self._has_netem:
            _limit(INTERFACE, wanted.rate)
            return
        _tc(INTERFACE, "netem", "limit", str(QUEUE_BYTES // _SMALL_PACKET), "delay", f"{wanted.delay * 1e6:.0f}us",
            "loss", f"{wanted.loss:%}", "rate", f"{wanted.rate * 8:.0f}bit")  # fmt: skip


def kernel_has_netem() -> bool:
    """Whether this machine's kernel can enforce rate, delay and loss by itself."""
    with namespace.returning():
        probed = namespace.new_namespace()
        try:
            return _has_netem()
        finally:
            os.close(probed)


def _has_netem() -> bool:
    """Tries netem in this thread's namespace, which must be a new one."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    probe = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", "rate", "1gbit"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def _inside(handle: int, do: Callable[[], None]) -> None:
    with namespace.returning():
        namespace.enter_open(handle)
        do()


def _limit(interface: str, rate: float) -> None:
    burst = max(_SEGMENT_BYTES + MTU, int(rate / 1000))
    _tc(interface, "tbf", "rate", f"{rate * 8:.0f}bit", "burst", str(burst), "limit", str(QUEUE_BYTES))


def _neighbour(change: str, node: int, *how: str) -> None:
    to = ("to",) if change == "flush" else ()
    _ip("neighbour", change, *to, namespace.address(node), *how, "dev", INTERFACE, "nud", "permanent")


def _tc(interface: str, *arguments: str) -> None:
    _run("tc", "qdisc", "replace", "dev", interface, "root", *arguments)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")


# -- the process -------------------------------------------------------------------------------------


_POLL_SECONDS = 1.0


def main(text: str, shaping: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    emulation = Emulation.parse(text)
    try:
        nodes = _nodes(emulation, shaping)
    except SpecError as error:
        return _answer(error=error.problem, remedy=error.remedy)
    except OSError as error:
        remedy = "run as root, outside a container or in one that may create network namespaces"
        return _answer(error=f"no virtual nodes here ({error})", remedy=remedy)
    _answer(namespaces=nodes.namespaces)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    return nodes.forward(sys.stdin.fileno(), partial(_controlled, nodes))


def _exit_with(parent: int) -> None:
    """Ends this process with ``parent``: one forked from it may still hold our input open."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(0)


def _nodes(emulation: Emulation, shaping: str) -> PacketSwitch | KernelSwitch:
    if shaping == "kernel":
        return KernelSwitch(emulation)
    if shaping == "auto" and kernel_has_netem():
        with contextlib.suppress(OSError):  # the kernel has netem, but lacks something else
            return KernelSwitch(emulation)
    return PacketSwitch(emulation)


def _controlled(nodes: PacketSwitch | KernelSwitch, control: int) -> bool:
    """Applies pending changes; False once the input has closed."""
    read = os.read(control, 2**16)
    for line in read.splitlines():
        try:
            nodes.change(json.loads(line))
            _answer()
        except SpecError as error:
            _answer(error=error.problem, remedy=error.remedy)
        except OSError as error:
            _answer(error=str(error), remedy="")
    return bool(read)


def _answer(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
