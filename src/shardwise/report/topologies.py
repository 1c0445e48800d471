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


def topology_tables(found: Sequence[PricedTopology]) -> Iterator[FittedTable | str]:
    longest = max((one.predicted_seconds or 0.0 for one in found), default=0.0) or 1.0
    title = "The same job on other networks: all devices by the outermost link, or the cluster's hierarchy"
    columns = ("topology", "network", "", "step", "exposed", "fits")
    yield table(title, columns, [_row(one, longest) for one in found if not one.why_not], numbers_from=3)
    for one in found:
        if one.why_not:
            yield f"{one.topology} is left out: {one.why_not}\n"
    priced = [one for one in found if one.dimensions is not None]
    for name in dict.fromkeys(name for one in priced for name in one.dimensions or {}):
        rows = [_dimension_row(one, (one.dimensions or {})[name]) for one in priced if name in (one.dimensions or {})]
        columns = ("topology", "algorithm", "bytes sent", "seconds", "exposed", "memory")
        yield table(f"{DIMENSIONS[name].capitalize()} on each", columns, rows, numbers_from=2, optional=("algorithm",))


def _row(one: PricedTopology, longest: float) -> tuple[Cell, ...]:
    assert one.predicted_seconds is not None and one.exposed_share is not None and one.fit is not None
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
        for name, own in (one.dimensions or {}).items()
    ]
