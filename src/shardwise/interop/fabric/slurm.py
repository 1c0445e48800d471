"""Switches above the nodes, as Slurm knows them: topology.conf, and what `scontrol show topology` prints.

Source: slurm.schedmd.com/topology.conf.html (plugins tree and block) and topology.html.
"""

from __future__ import annotations

import re

from shardwise.interop.fabric.node_list import MOST_NODES, nodes_of
from shardwise.spec.errors import SpecError, shown

_SETTING = re.compile(r"(\w+)=(\S+)")
_MOST_NAMED = 10 * MOST_NODES  # each node by the switches above it
Switches = dict[str, tuple[str, ...]]


def read_slurm(text: str, field: str = "topology.conf") -> Switches:
    """By node the switches above it, the nearest first. Blocks are switches; aggregated ones are above them."""
    above: dict[str, str] = {}  # a switch above a switch
    leaf: dict[str, str] = {}  # the nearest switch of a node
    named = 0
    for line in text.splitlines():
        given = {name.lower(): value for name, value in _SETTING.findall(line.partition("#")[0])}
        name = given.get("switchname") or given.get("blockname")
        if given.get("aggregatedblock"):
            names, lower, upper = given["aggregatedblock"], above, given["aggregatedblock"]
        elif name is not None and "switches" in given:  # scontrol lists all nodes below it, too
            names, lower, upper = given["switches"], above, name
        elif name is not None and "nodes" in given:
            names, lower, upper = given["nodes"], leaf, name
        else:
            continue
        below = nodes_of(names, field)
        named += len(below)
        if named > _MOST_NAMED:
            raise SpecError(field, f"names nodes and switches more than {_MOST_NAMED:,} times", "give fewer")
        for member in below:
            lower.setdefault(member, upper)
    if not leaf:
        remedy = "give Slurm's topology.conf, or what `scontrol show topology` prints"
        raise SpecError(field, f"{shown(text)} names no switch with nodes", remedy)
    return {node: _chain(switch, above, field) for node, switch in leaf.items()}


def _chain(switch: str, above: dict[str, str], field: str) -> tuple[str, ...]:
    path = [switch]
    while (switch := above.get(switch, "")) and switch not in path:
        path.append(switch)
    if switch:
        raise SpecError(field, f"{switch} is above itself", "switches are a tree")
    return tuple(path)
