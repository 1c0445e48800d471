"""Host files as DeepSpeed, Open MPI and MPICH write them (`host slots=8`, `host:8`), and the ranks of each host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.units import counted

_LINE = re.compile(r"(?P<name>[^\s:=]+|\[[0-9a-fA-F:]+\])(?::(?P<short>\d+))?(?P<rest>(?:\s.*)?)")
_SETTING = re.compile(r"([\w-]+)\s*=\s*(\S+)")
_IGNORED = ("max_slots", "max-slots")  # Open MPI's: how far a host may be oversubscribed, which we never do
MOST_SLOTS = 4096


@dataclass(frozen=True)
class Host:
    """A line of a host file."""

    name: str
    slots: int | None = None  # how many ranks it may have; None: as many as a node of the cluster has devices

    @property
    def address(self) -> str:
        """Its name without a user (USER@)."""
        return self.name.rpartition("@")[2]


def read_hosts(text: str, field: str = "--on") -> list[Host]:
    """The hosts in their order; what follows a # is a comment."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        host = _host(line, f"{field}, line {number}")
        if host.name in hosts:
            raise SpecError(f"{field}, line {number}", f"{host.name} is there twice", "add its slots up in one line")
        hosts[host.name] = host
    if not hosts:
        raise SpecError(field, "names no host", "write one in a line: `host slots=8`")
    return list(hosts.values())


def _host(line: str, field: str) -> Host:
    match = _LINE.fullmatch(line)
    if match is None or match["name"].startswith("-"):  # ssh would take it for an option
        raise SpecError(field, f"{shown(line)} is not a host", "write it like `host slots=8`")
    settings = dict(_SETTING.findall(match["rest"]))
    if " ".join(_SETTING.sub("", match["rest"]).split()):
        raise SpecError(field, f"{shown(line)} is not a host and its slots", "write it like `host slots=8`")
    for name in settings:
        if name != "slots" and name not in _IGNORED:
            raise SpecError(field, f"{shown(name)} is not a setting of a host", "use slots")
    slots = settings.get("slots", match["short"])
    if slots is not None and not (slots.isdecimal() and len(slots) < 10 and 0 < int(slots) <= MOST_SLOTS):
        raise SpecError(field, f"{shown(slots)} slots", f"use 1 to {MOST_SLOTS:,}")
    return Host(match["name"], None if slots is None else int(slots))


def placed(hosts: Sequence[Host], world: int, node_devices: int) -> list[tuple[Host, range]]:
    """The ranks of each host that is needed: the first hosts, all with equally many ranks.

    That number is a node's devices, or the smallest number of slots if that is less; it must divide the world.
    """
    wanted = min(node_devices, world)
    room = min((wanted if host.slots is None else host.slots) for host in hosts)
    here = wanted if room >= wanted else room
    if world % here:
        problem = f"{counted(world, 'rank')} on hosts of {here} slots"
        raise SpecError("⟨on⟩", problem, f"give every host {wanted} slots, or another number that divides {world}")
    needed = world // here
    if needed > len(hosts):
        there = f"{counted(len(hosts), 'host')} with room for {here} ranks each"
        raise SpecError("⟨on⟩", f"{there}, {counted(world, 'rank')} need {needed}", "name more hosts or slots")
    return [(host, range(number * here, (number + 1) * here)) for number, host in enumerate(hosts[:needed])]
