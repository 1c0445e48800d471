"""The price of collectives against published measurements, one description per machine."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.collectives import CollectiveKind, collective_cost
from shardwise.cost.network import network
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster

SMALLEST_SCORED_BYTES = 2**20

# Which cluster of the catalogue each machine of the table is. Nothing else is said per row.
MACHINES = {
    "8x H100-SXM-80GB, 1 node NVSwitch": "dgx-h100",
    "8x H200, 1 node": "dgx-h200",
    "8x B200 (p6-b200), 1 node": "p6-b200",
    "P6-B200": "p6-b200",
}


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
    rows = []
    with Path(path).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["collective"] == "all_reduce" and float(row["size_bytes"]) >= smallest_bytes:
                rows.append(_scored(row, described))
    return rows


def _scored(row: dict[str, str], described: Callable[[str], Cluster]) -> ScoredRow:
    devices, nodes = int(row["gpus"]), int(row["nodes"])
    machine = _machine(row["hardware"])
    topology = network(described(machine).with_devices(devices))
    # A row that names its algorithm is scored with it, the others with what the library would choose.
    named = "ring" if row["algo"].startswith("Ring") else "nvls" if row["algo"] == "NVLS" else "auto"
    cost = collective_cost(CollectiveKind.ALL_REDUCE, float(row["size_bytes"]), topology, named)
    return ScoredRow(
        machine,
        devices,
        nodes,
        named,
        float(row["size_bytes"]),
        float(row["time_us"]) / 1e6,
        float(cost.seconds),
        cost.algorithm,
    )


def _machine(hardware: str) -> str:
    for prefix, cluster in MACHINES.items():
        if hardware.startswith(prefix):
            return cluster
    raise SpecError("hardware", f"{hardware!r} is no machine of the catalogue", "add it to MACHINES")
