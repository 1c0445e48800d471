"""Which cluster of the catalogue a device or machine is, however a table writes its name."""

from __future__ import annotations

import re

from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster

# The first name that occurs decides, so the particular stands before the general.
_MACHINES = (
    ("gb300", "gb300-nvl72"),
    ("gb200", "gb200-nvl72"),
    ("b300", "dgx-b300"),
    ("p6-b200", "p6-b200"),
    ("b200", "dgx-b200"),
    ("h200", "dgx-h200"),
    ("h800", "hgx-h800"),
    (r"h100.*?(500 ?w|hbm2e|96 ?gb)", "grand-teton-h100"),
    (r"h100.*?pcie", "h100-pcie-server"),
    ("p5", "p5-h100"),
    ("h100", "dgx-h100"),
    ("a800", "hgx-a800"),
    (r"a100.*?40 ?gb", "dgx-a100-40gb"),
    ("a100", "dgx-a100"),
    ("v100", "dgx-v100"),
    ("mi300x", "mi300x-node"),
    ("ascend.?910b", "ascend-910b-node"),
    (r"gaudi.?3", "gaudi3-node"),
    ("l40s", "ethernet-cluster"),
)
KNOWN = (
    "A100-SXM-80GB, A100-SXM-40GB, A800, H100-SXM-80GB, H100-PCIe, H100-96GB-HBM2e-500W, H200, H800, B200-SXM, B300, "
    "GB200-NVL72, GB300-NVL72, V100, MI300X, Ascend-910B, Gaudi3, L40S"
)


def machine_name(text: str, column: str) -> str:
    """The name in the catalogue of the cluster that ``text`` speaks of."""
    for pattern, name in _MACHINES:
        if re.search(rf"(?<![a-z]){pattern}", text, re.IGNORECASE):
            return name
    raise SpecError(column, f"{shown(text)} is unknown", f"known are {KNOWN}")


def machine(name: str, devices: int, node_devices: int | None = None) -> Cluster:
    """``devices`` of a cluster of the catalogue, ``node_devices`` of them in use on each node."""
    return cut(cluster_from(name), devices, node_devices)


def cut(cluster: Cluster, devices: int, node_devices: int | None = None) -> Cluster:
    width = cluster.levels[0].width
    # A rack of 72 is one NVLink domain, whatever number of its trays of 4 a table calls a node. Jobs that are no
    # multiple of 72 take the same share of every rack (NVIDIA's recipes: 64 of 72).
    if width > 8 and devices > width:
        node_devices = max(size for size in range(1, width + 1) if devices % size == 0)
    elif width > 8:
        node_devices = None
    if node_devices is not None and node_devices < width:
        cluster = cluster.with_node_devices(node_devices)
    return cluster.with_devices(devices)
