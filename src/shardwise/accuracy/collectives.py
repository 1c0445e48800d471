"""The price of collectives against published measurements, one description per machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.accuracy.table import TableRow, read_table
from shardwise.accuracy.vocabulary import cut, machine_name
from shardwise.collectives import CollectiveKind, collective_cost
from shardwise.layout.network import network
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster

SMALLEST_SCORED_BYTES = 2**20
COLUMNS = ("hardware", "nodes", "gpus", "collective", "algo", "size_bytes", "time_us")


@dataclass(frozen=True)
class ScoredRow:
    """One measured collective and its prediction."""

    machine: str
    devices: int
    nodes: int
    algorithm: str
    size_bytes: float
    measured_seconds: float
    predicted_seconds: float
    predicted_algorithm: str

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1


def score_all_reduces(
    path: Path | str,
    smallest_bytes: float = SMALLEST_SCORED_BYTES,
    described: Callable[[str], Cluster] = cluster_from,
) -> list[ScoredRow]:
    """Every all-reduce row of the table from ``smallest_bytes`` up, with what the machine's cluster predicts.

    ``described`` gives the cluster of a machine; by default that of the catalogue.
    """
    scored = []
    for number, row in enumerate(read_table(path, COLUMNS, "collectives"), start=1):
        try:
            kind = re.sub(r"[^a-z]", "", row.text("collective").lower())
            if kind == "allreduce" and row.needed("size_bytes") >= smallest_bytes:
                scored.append(_scored(row, described))
        except SpecError as error:
            raise error.under(f"row {number}") from None
    return scored


def _scored(row: TableRow, described: Callable[[str], Cluster]) -> ScoredRow:
    devices, nodes, size = row.whole("gpus"), row.whole("nodes"), row.needed("size_bytes")
    name, microseconds = machine_name(row.text("hardware"), "hardware"), row.needed("time_us")
    if not microseconds or devices % nodes:
        column, problem = (
            ("time_us", "is 0") if not microseconds else ("nodes", f"{nodes} do not divide {devices} gpus")
        )
        raise SpecError(column, problem, "check the row")
    topology = network(cut(described(name), devices, devices // nodes))
    # A row that names its algorithm is scored with it, the others with what the library would choose.
    algo = row.text("algo").lower()
    named = "ring" if algo.startswith("ring") else "nvls" if algo == "nvls" else "auto"
    cost = collective_cost(CollectiveKind.ALL_REDUCE, size, topology, named)
    return ScoredRow(name, devices, nodes, named, size, microseconds / 1e6, float(cost.seconds), cost.algorithm)
