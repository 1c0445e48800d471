"""What a collective is, what it costs on a network, and a proof that its schedule is correct.

Prices are imported at once; schedules and what is done with them only when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.collectives.cost import (
    LatencyAndVolume,
    Volume,
    collective_cost,
    collective_latency_and_volume,
    crossovers,
    p2p_latency,
)
from shardwise.collectives.schedule import CollectiveKind, InvalidSchedule, Schedule, Transfer, verify
from shardwise.collectives.shapes import Axis, FullyConnected, Grid, Switch, Tree
from shardwise.collectives.topology import InNetwork, Level, Topology, place
from shardwise.collectives.work import CollectiveCost, LevelCost

if TYPE_CHECKING:
    from shardwise.collectives.build import build_schedule
    from shardwise.collectives.closed_form import Pair, draw_rounds, pairs
    from shardwise.collectives.pricing import price_schedule, simulated_seconds

_LATER = {
    "build": ("build_schedule",),
    "closed_form": ("Pair", "draw_rounds", "pairs"),
    "pricing": ("price_schedule", "simulated_seconds"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Axis", "CollectiveCost", "CollectiveKind", "FullyConnected", "Grid", "InNetwork", "InvalidSchedule",
    "LatencyAndVolume", "Level", "LevelCost", "Pair", "Schedule", "Switch", "Topology", "Transfer", "Tree", "Volume",
    "build_schedule", "collective_cost", "collective_latency_and_volume", "crossovers", "draw_rounds", "p2p_latency",
    "pairs", "place", "price_schedule", "simulated_seconds", "verify",
]  # fmt: skip
