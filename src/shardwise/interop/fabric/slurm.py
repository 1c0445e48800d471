"""Switches above the nodes, as Slurm knows them: topology.conf, and what `scontrol show topology` prints.

Source: slurm.schedmd.com/topology.conf.html (plugins tree and block) and topology.html.
"""

from __future__ import annotations

import re

from shardwise.interop.fabric.node_list import nodes_of
from shardwise.spec.errors import SpecError, shown

_SETTING = re.compile(r"(\w+)=(\S+)")
Switches = dict[str, tuple[str, ...]]


def read_slurm(text: str, field: str = "topology.conf") -> Switches:
    """By node the switches above it, the nearest first. Blocks are switches; aggregated ones are above them."""
    above: dict[str, str] = {}  # a switch above a switch
    leaf: dict[str, str] = {}  # the nearest switch of a node
    for line in text.splitlines():
        given = {name.lower(): value for name, value in _SETTING.findall(line.partition("#")[0])}
        name = given.get("switchname") or given.get("blockname")
        if given.get("aggregatedblock"):
            for block in nodes_of(given["aggregatedblock"], field):
                above.setdefault(block, given["aggregatedblock"])
        elif name is not None and "switches" in given:  # scontrol lists all nodes below it, too
            for switch in nodes_of(given["switches"], field):
                above.setdefault(switch, name)
        elif name is not None and "nodes" in given:
            for node in nodes_of(given["nodes"], field):
                leaf.setdefault(node, name)
    if not leaf:
        remedy = "give Slurm's topology.conf, or what `scontrol show topology` prints"
        raise SpecError(field, f"{shown(text)} names no switch with nodes", remedy)
    return {node: _chain(switch, above, field) for node, switch in leaf.items()}


def _chain(switch: str, above: dict[str, str], field: str) -> tuple[str, ...]:
    found = [switch]
    while (switch := above.get(switch, "")) and switch not in found:
        found.append(switch)
    if switch:
        raise SpecError(field, f"{switch} is above itself", "switches are a tree")
    return tuple(found)
