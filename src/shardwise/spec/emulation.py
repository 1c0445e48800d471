"""A cluster that is emulated on one machine, as people write it: "2x2,1Gbit,1ms,loss=0.1%"."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from shardwise.spec.codec import Spec, count, quantity, setting
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import NetworkLevel
from shardwise.spec.units import parse, render

MOST_NODES = 64
EMULATED = "emulated"  # the name of the level between virtual nodes
_HOW = "write it like 2x2,1Gbit,1ms or 2x2,200Mbit,1ms,loss=0.1%"


@dataclass(frozen=True, kw_only=True)
class Emulation(Spec):
    """Virtual nodes: full speed inside a node, one port of each node towards the others."""

    nodes: int = count(minimum=2, maximum=MOST_NODES)
    """Virtual nodes."""
    ranks_per_node: int = count(1)
    """Ranks of each."""
    rate: float = quantity("bytes/s")
    """Bytes/s of a port in each direction."""
    delay: float = quantity("seconds", 0, minimum=0)
    """Seconds one way."""
    loss: float = setting(0.0, minimum=0, maximum=0.5)
    """Share of packets that do not arrive."""

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @classmethod
    def parse(cls, text: str, where: str = "") -> Emulation:
        """What ``text`` says; ``where`` is what the user calls it, for error messages."""
        if not isinstance(text, str):
            raise SpecError(where, f"{shown(text)} is not text", _HOW)
        shape, *rest = (part.strip() for part in text.split(","))
        sizes = re.fullmatch(r"(\d{1,6})x(\d{1,6})", shape)
        if sizes is None:
            raise SpecError(where, f"{shown(text)} does not begin with NODESxRANKS", _HOW)
        if not rest:
            raise SpecError(where, f"{shown(text)} gives no rate", _HOW)
        if len(rest) > 3:
            raise SpecError(where, f"{shown(text)} has {len(rest) + 1} parts", _HOW)
        try:
            given: dict[str, float] = {"rate": _rate(rest[0])}
            for part in rest[1:]:
                name, equals, value = part.partition("=")
                if not equals and "delay" not in given:
                    given["delay"] = parse(part, "seconds", "delay")
                elif name == "loss" and name not in given:
                    given["loss"] = parse(value, "share", "loss")
                else:
                    raise SpecError("", f"{shown(part)} is not understood", _HOW)
            return cls(nodes=int(sizes[1]), ranks_per_node=int(sizes[2]), **given)
        except SpecError as error:
            raise error.under(where) from None

    def __str__(self) -> str:
        """Text that `parse` reads back."""
        loss = f",loss={self.loss:.6g}" if self.loss else ""
        return f"{self.nodes}x{self.ranks_per_node},{_rate_text(self.rate)},{render(self.delay, 'seconds')}{loss}"


def emulation_from(value: Any, where: str = "") -> Emulation | None:
    """What a user's text or mapping describes."""
    if value is None or isinstance(value, Emulation):
        return value
    return Emulation.parse(value, where) if isinstance(value, str) else Emulation.from_dict(value, where)


def _rate(text: str) -> float:
    """Links are sold as "1Gbit" where "1Gbit/s" is meant."""
    return parse(f"{text}/s" if text.endswith("bit") else text, "bytes/s", "rate")


def _rate_text(rate: float) -> str:
    for unit, bytes_per_second in (("Gbit", 125e6), ("Mbit", 125e3), ("kbit", 125)):
        text = f"{rate / bytes_per_second:.6g}{unit}"
        if rate >= bytes_per_second and _rate(text) == rate:
            return text
    return f"{rate:.6g}B/s"


def cluster_of(emulation: Emulation, base: Cluster) -> Cluster:
    """The emulated nodes as a cluster for the planner: the devices and the innermost network of ``base`` inside a node.

    Between nodes there is one port per node, which all of its ranks share. How messages use such a link is as ``base``
    says where it has been calibrated on one, of whatever rate and delay.
    """
    inside = replace(
        base.levels[0], name="loopback", topology="switch", size=emulation.ranks_per_node, shape=(), wrap_multiple=1
    )
    outermost = base.levels[-1]
    between = replace(
        outermost if outermost.name == EMULATED else NetworkLevel(name=EMULATED, size=2, bandwidth=1.0, latency=0.0),
        size=emulation.nodes, bandwidth=emulation.rate, latency=emulation.delay, ports=1,
    )  # fmt: skip
    return replace(
        base,
        name=f"emulated-{base.name.removeprefix('emulated-')}",
        levels=(inside, between),
        devices_per_node=emulation.ranks_per_node,
        # Virtual nodes share what the machine has.
        host_memory=None if base.host_memory is None else base.host_memory * base.nodes / emulation.nodes,
        host=replace(base.host, memory_bandwidth=base.host.memory_bandwidth * base.nodes / emulation.nodes),
        source=f"{emulation} emulated on one machine",
    )
