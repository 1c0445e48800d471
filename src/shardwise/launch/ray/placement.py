"""Which bundle of a placement group gets which ranks, and what is missing for one.

A bundle is never split over nodes (`elastic/splits.py` knows its sizes). Ray spreads the bundles over its nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.planner.placement import place_nodes
from shardwise.spec.job import Job
from shardwise.spec.units import counted


@dataclass(frozen=True)
class RayNode:
    """A node as Ray reports it; ``room`` is how many ranks its resources are for, busy or not."""

    number: str
    address: str
    room: int


def ranks_of_bundles(
    nodes_of_bundles: Sequence[str], size: int, addresses: Mapping[str, str], wanted: Sequence[str] = ()
) -> list[range]:
    """For every bundle its ranks, given the node that Ray put it on: bundles of one node get neighbouring ranks.

    Nodes are taken in the order of their addresses, so a restart on the same nodes has the same ranks there; before
    that those that are ``wanted``, by their addresses, in that order.
    """
    first = {address: place for place, address in enumerate(wanted)}

    def key(bundle: int) -> tuple[object, ...]:
        node = nodes_of_bundles[bundle]
        return first.get(addresses[node], len(first)), _address_order(addresses[node]), node, bundle

    order = sorted(range(len(nodes_of_bundles)), key=key)
    places = {bundle: place for place, bundle in enumerate(order)}
    return [range(places[bundle] * size, (places[bundle] + 1) * size) for bundle in range(len(order))]


def wanted_order(job: Job, addresses: Sequence[str]) -> Sequence[str]:
    """The best order of the nodes that Ray chose, where the job's wiring knows them by their addresses."""
    placement = place_nodes(job, sorted(set(addresses), key=_address_order)) if job.run.reorder else None
    return () if placement is None else placement.hosts


def _address_order(address: str) -> tuple[tuple[int, str], ...]:
    """10.0.0.9 before 10.0.0.10."""
    return tuple((int(part), "") if part.isdecimal() else (0, part) for part in address.split("."))


def missing_words(world: int, device: str, sizes: Sequence[int], nodes: Sequence[RayNode], free: float) -> str:
    """What was asked for, what there is and where."""
    asked = f"asked for {counted(world, device)}"
    if sizes[-1] > 1:
        asked += f", {sizes[-1]} or more of them on one node (whole tensor-parallel groups)"
    total = sum(node.room for node in nodes)
    there = ", ".join(f"{node.room} on {node.address}" for node in nodes) or "no node"
    return f"{asked}; present: {total} on {counted(len(nodes), 'node')} ({there}), of which {free:g} are free"
