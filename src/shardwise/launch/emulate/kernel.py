"""Nodes joined and shaped by the kernel: a bridge in its own namespace, netem and tbf on the sending side.

Cheaper and faster than our own switch, but few kernels have netem. Without it only a rate can be enforced, by tbf.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

from shardwise.launch.emulate import namespace
from shardwise.launch.emulate.namespace import INTERFACE, MTU
from shardwise.launch.emulate.switch import ACKNOWLEDGED_SECONDS, QUEUE_BYTES
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError

_UNUSED_MAC = "02:00:00:00:00:ff"  # a hardware address that no interface has
_SMALL_PACKET = 256  # bytes: netem counts packets, most of which are larger
_SEGMENT_BYTES = 65536  # what TCP hands over at once


class KernelSwitch:
    """The interface of `switch.PacketSwitch`, with the kernel doing the work: this only holds the namespaces."""

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
        """One of reshape, partition and heal, with its values."""
        if "reshape" in request:
            given = {name: value for name, value in request["reshape"].items() if value is not None}
            if "pair" in given:
                raise SpecError("emulate", "the kernel shapes all links alike", "choose shaping='switch'")
            self._shape(self._emulation.unchecked(**given))
        if "partition" in request:
            first, other = request["partition"]
            for here, there in ((first, other), (other, first)):
                _inside(self.namespaces[here], partial(_black_hole, there))
        if "heal" in request:
            for inside in self.namespaces:
                for node in range(self._emulation.nodes):
                    _inside(inside, partial(_restore_route, node))

    def forward(self, control: int, controlled: Callable[[int], bool]) -> None:
        """Waits until ``controlled`` returns False; it is called when ``control`` is readable."""
        while select.select([control], [], []) and controlled(control):
            pass

    def _add_node(self, node: int) -> int:
        """A namespace with an interface whose other end is a port of the hub, in whose namespace this thread is."""
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
            # What a node receives shares its port, too.
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
    """Tried in this thread's namespace, which must be a new one."""
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


def _black_hole(node: int) -> None:
    _ip("neighbour", "replace", namespace.address(node), "lladdr", _UNUSED_MAC, "dev", INTERFACE, "nud", "permanent")


def _restore_route(node: int) -> None:
    _ip("neighbour", "flush", "to", namespace.address(node), "dev", INTERFACE, "nud", "permanent")


def _tc(interface: str, *arguments: str) -> None:
    _run("tc", "qdisc", "replace", "dev", interface, "root", *arguments)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
