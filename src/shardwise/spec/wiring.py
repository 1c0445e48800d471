"""The nodes of a cluster as they are: which switches join them, and what was measured between each two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.spec.codec import Spec, quantity
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_yaml


@dataclass(frozen=True, kw_only=True)
class PairLink(Spec):
    """What one device of a node reaches towards one of another node while all devices of both send."""

    between: tuple[str, ...]
    """Names of the two hosts."""
    bandwidth: float = quantity("bytes/s")
    """Bytes/s."""
    latency: float = quantity("seconds", minimum=0)
    """Seconds per message."""

    def check(self) -> None:
        if len(set(self.between)) != 2:
            raise SpecError("between", f"{shown(list(self.between))} are not two hosts", "write it like [a, b]")


@dataclass(frozen=True, kw_only=True)
class Wiring(Spec):
    """The nodes of a cluster one by one. Two hosts without a measured link have that of the cluster's level that joins
    them: by their switches, if these are known."""

    hosts: tuple[str, ...]
    """Nodes, in the order of the ranks."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Switches above each host, the nearest first."""
    links: tuple[PairLink, ...] = ()
    """Measured links between two hosts."""
    source: str = ""
    """Where they come from."""

    def check(self) -> None:
        if not self.hosts or len(set(self.hosts)) != len(self.hosts):
            raise SpecError("hosts", f"{shown(list(self.hosts))}", "name every host once")
        named = [("switches", name) for name in self.switches]
        named += [(f"links[{index}]", name) for index, link in enumerate(self.links) for name in link.between]
        for path, name in named:
            if name not in self.hosts:
                raise SpecError(path, f"{shown(name)} is not one of the hosts", "name it in hosts")

    @cached_property
    def _pairs(self) -> dict[frozenset[str], PairLink]:
        return {frozenset(link.between): link for link in self.links}

    def link(self, first: int, second: int) -> PairLink | None:
        """What was measured between two nodes, by their numbers."""
        if max(first, second) >= len(self.hosts):
            return None
        return self._pairs.get(frozenset((self.hosts[first], self.hosts[second])))

    def tier(self, first: int, second: int) -> int | None:
        """How many switches up two nodes meet: 1 under the same one; None if that is not known."""
        if max(first, second) >= len(self.hosts) or first == second:
            return None
        above, beside = (self.switches.get(self.hosts[node], ()) for node in (first, second))
        if not above or not beside:
            return None
        shared = (place for place, (mine, theirs) in enumerate(zip(above, beside), 1) if mine == theirs)
        return next(shared, max(len(above), len(beside)) + 1)

    def ordered(self, order: Sequence[int]) -> Wiring:
        """The same nodes in another order: first the ``order[0]``-th of them, and so on; the rest as they were."""
        rest = [node for node in range(len(self.hosts)) if node not in order]
        return replace(self, hosts=tuple(self.hosts[node] for node in (*order, *rest)))

    def of(self, hosts: Sequence[str]) -> Wiring | None:
        """What is known of some hosts, in their order; None if one of them is not known."""
        if not set(hosts) <= set(self.hosts):
            return None
        links = tuple(link for link in self.links if set(link.between) <= set(hosts))
        switches = {name: above for name, above in self.switches.items() if name in hosts}
        return Wiring(hosts=tuple(hosts), switches=switches, links=links, source=self.source)


def wiring_from(value: Any) -> Wiring:
    """A mapping of its fields, or a file of them."""
    if isinstance(value, Mapping):
        return Wiring.from_dict(value)
    if not isinstance(value, str) or not value.strip():
        raise SpecError("", f"{shown(value)} is not a wiring", "name the file that `shardwise doctor --wiring` wrote")
    return Wiring.from_dict(read_yaml(value, "file"), Path(value).name)
