"""One job on several networks, side by side: a table of their steps, and one for each dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.cost.step.topologies import DimensionOnNetwork, PricedTopology
from shardwise.report.console import bar, spoken, table
from shardwise.report.part_names import DIMENSIONS
from shardwise.report.tables import Cell, FittedTable
from shardwise.spec.units import readable_bytes, readable_seconds, readable_share

_FITS = {"fits": "yes", "tight": "tight", "does not fit": "no"}


def topology_tables(found: Sequence[PricedTopology]) -> Iterator[FittedTable]:
    longest = max(one.predicted_seconds for one in found)
    title = "The same job on other networks: all devices by the outermost link, or the cluster's hierarchy"
    columns = ("topology", "network", "", "step", "exposed", "fits")
    yield table(title, columns, [_row(one, longest) for one in found], numbers_from=3)
    for name in dict.fromkeys(name for one in found for name in one.dimensions):
        rows = [_dimension_row(one, one.dimensions[name]) for one in found if name in one.dimensions]
        columns = ("topology", "algorithm", "bytes sent", "seconds", "exposed", "memory")
        yield table(f"{DIMENSIONS[name].capitalize()} on each", columns, rows, numbers_from=2, optional=("algorithm",))


def _row(one: PricedTopology, longest: float) -> tuple[Cell, ...]:
    step = readable_seconds(one.predicted_seconds)
    share = bar(one.predicted_seconds / longest, 20)
    return one.topology, one.network, share, step, readable_share(one.exposed_share), _FITS[one.fit]


def _dimension_row(one: PricedTopology, own: DimensionOnNetwork) -> tuple[str, ...]:
    times = map(readable_seconds, (own.seconds, own.exposed_seconds))
    algorithms = "; ".join(map(spoken, own.algorithms))
    return one.topology, algorithms, readable_bytes(own.bytes_sent), *times, readable_bytes(own.memory_bytes)


def topology_rows(found: Sequence[PricedTopology]) -> list[dict[str, Any]]:
    """A row for each dimension on each network, flat."""
    return [
        {
            "topology": one.topology,
            "dimension": name,
            **{figure: value for figure, value in vars(own).items() if figure != "algorithms"},
            "predicted_seconds": one.predicted_seconds,
        }
        for one in found
        for name, own in one.dimensions.items()
    ]
