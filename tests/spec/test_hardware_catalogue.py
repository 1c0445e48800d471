"""The hardware catalogue as plain YAML: complete, consistent, and right where the values are well known."""

import csv
from math import prod, sqrt
from pathlib import Path

import pytest
import yaml

from shardwise.spec.units import parse

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = ROOT / "src" / "shardwise" / "spec" / "catalogue"


def _load(kind):
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CATALOGUE / kind).glob("*.yaml"))}


DEVICES, LINKS, CLUSTERS = _load("devices"), _load("links"), _load("clusters")
PRECISIONS = {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8"}
KINDS = {"nvlink", "pcie", "infiniband", "ethernet", "ici", "storage", "memory"}
TOPOLOGIES = {"line", "ring", "tree", "switch", "mesh", "torus", "fully-connected"}
DEVICE_KEYS = {
    "name",
    "source",
    "vendor",
    "peak",
    "memory",
    "memory_bandwidth",
    "cache",
    "compute_units",
    "communication_share",
    "power",
}
LINK_KEYS = {"name", "source", "kind", "bandwidth", "latency", "efficiency"}
CLUSTER_KEYS = {
    "name",
    "source",
    "device",
    "host_memory",
    "host_link",
    "levels",
    "pipelined_levels",
    "storage",
}
LEVEL_KEYS = {"name", "topology", "link"}
LEVEL_OPTIONS = {
    "size",
    "shape",
    "wrap_multiple",
    "ports",
    "in_network",
    "bandwidth",
    "latency",
    "efficiency",
    "startup",
    "ramp",
}
DIMENSION = {"bandwidth": "bytes/s", "latency": "seconds", "startup": "seconds", "ramp": "bytes"}


def _bandwidth(link):
    return parse(LINKS[link]["bandwidth"], "bytes/s")


def _check_constants(entry):
    """The optional quantities of a link or a level; efficiencies are shares."""
    for key, dimension in DIMENSION.items():
        assert parse(entry.get(key, 1), dimension) >= 0
    assert 0 < entry.get("efficiency", 1) <= 1


@pytest.mark.parametrize(("name", "entry"), [*DEVICES.items(), *LINKS.items(), *CLUSTERS.items()])
def test_entry_is_named_after_its_file_and_sourced(name, entry):
    assert entry["name"] == name
    assert len(entry["source"]) > 20


@pytest.mark.parametrize("name", DEVICES)
def test_device(name):
    device = DEVICES[name]
    assert set(device) == DEVICE_KEYS
    assert device["peak"] and set(device["peak"]) <= PRECISIONS
    peak = {precision: parse(text, "flops/s") for precision, text in device["peak"].items()}
    assert min(peak.values()) > 0
    # A narrower float format is never slower, fp64 apart (vector and tensor rates mix there).
    floats = [peak[p] for p in ("fp32", "tf32", "bf16", "fp8", "fp6", "fp4") if p in peak]
    assert floats == sorted(floats)
    assert peak.get("fp16", 0) in (0, peak.get("bf16", peak.get("fp16")))
    assert parse(device["memory"], "bytes") >= 2**30
    assert parse(device["memory_bandwidth"], "bytes/s") > 1e10
    assert parse(device["cache"], "bytes") < parse(device["memory"], "bytes")
    assert parse(device["power"], "watts") > 0
    assert device["compute_units"] >= 1
    assert 0 <= device["communication_share"] < 0.5


@pytest.mark.parametrize("name", LINKS)
def test_link(name):
    link = LINKS[name]
    assert set(link) == LINK_KEYS
    assert link["kind"] in KINDS
    _check_constants(link)
    assert parse(link["bandwidth"], "bytes/s") > 1e8
    assert 1e-7 < parse(link["latency"], "seconds") < 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster(name):
    cluster = CLUSTERS[name]
    assert set(cluster) == CLUSTER_KEYS
    assert cluster["device"] in DEVICES
    assert cluster["host_link"] in LINKS
    assert parse(cluster["host_memory"], "bytes") > 1e9
    assert isinstance(cluster["pipelined_levels"], bool)
    for level in cluster["levels"]:
        assert set(level) >= LEVEL_KEYS and set(level) <= LEVEL_KEYS | LEVEL_OPTIONS
        assert level["topology"] in TOPOLOGIES
        assert level["link"] in LINKS
        gridded = level["topology"] in ("torus", "mesh")
        assert ("shape" in level) == gridded and ("size" in level) != gridded
        assert prod(level.get("shape", [level.get("size")])) >= 1
        _check_constants(level)
        if "in_network" in level:
            assert level["in_network"]["kind"] in ("nvls", "sharp")
            _check_constants(level["in_network"])
    for store in cluster["storage"]:
        assert LINKS[store["link"]]["kind"] == "storage"
        assert store["count_per_node"] >= 1 and isinstance(store["shared"], bool)
        assert parse(store.get("total", 1), "bytes/s") > 0


@pytest.mark.parametrize(
    ("link", "gigabytes"),
    [  # one direction, after line coding; vendors print NVLink both ways
        ("nvlink-2", 150),
        ("nvlink-3", 300),
        ("nvlink-4", 450),
        ("nvlink-5", 900),
        ("nvlink-a800", 200),
        ("nvlink-h800", 200),
        ("pcie-3", 15.75),
        ("pcie-4", 31.5),
        ("pcie-5", 63),
        ("infiniband-qdr", 4),
        ("infiniband-fdr", 6.8),
        ("infiniband-edr", 12.5),
        ("infiniband-hdr", 25),
        ("infiniband-ndr", 50),
        ("ethernet-100g", 12.5),
        ("gaudi3-scaleup", 525),
        ("infinity-fabric-mi300x", 64),
    ],
)
def test_known_link_bandwidths(link, gigabytes):
    assert _bandwidth(link) == pytest.approx(gigabytes * 1e9, rel=1e-12)


@pytest.mark.parametrize(
    ("device", "bf16_teraflops", "memory_gib", "units"),
    [
        ("a100-80gb", 312, 80, 108),
        ("h100-sxm", 989.4, 80, 132),
        ("h200-sxm", 989.4, 141, 132),
        ("b200", 2250, 180, 148),
        ("rtx-3090", 71, 24, 82),  # fp32 accumulation, half of the advertised rate
        ("rtx-4090", 165.2, 24, 128),
        ("mi300x", 1307.4, 192, 304),
        ("tpu-v4", 275, 32, 2),
    ],
)
def test_known_devices(device, bf16_teraflops, memory_gib, units):
    entry = DEVICES[device]
    assert parse(entry["peak"]["bf16"], "flops/s") == pytest.approx(bf16_teraflops * 1e12, rel=1e-12)
    assert parse(entry["memory"], "bytes") == memory_gib * 2**30
    assert entry["compute_units"] == units


@pytest.mark.parametrize(
    "family",
    [
        ["nvlink-2", "nvlink-3", "nvlink-4", "nvlink-5"],
        ["pcie-3", "pcie-4", "pcie-5", "pcie-6"],
        [f"infiniband-{rate}" for rate in ("qdr", "fdr", "edr", "hdr", "ndr", "xdr")],
        [f"ethernet-{rate}g" for rate in (1, 10, 25, 40, 100, 200, 400, 800)],
        ["wan-1g", "wan-10g", "wan-100g"],
        ["hdd", "sata-ssd", "nvme-gen3", "nvme-gen4", "nvme-gen5"],
    ],
)
def test_families_grow_and_usable_bandwidth_too(family):
    assert [_bandwidth(link) for link in family] == sorted({_bandwidth(link) for link in family})
    usable = [_bandwidth(link) * LINKS[link]["efficiency"] for link in family]
    assert usable == sorted(usable)


def test_the_switch_carries_what_its_links_carry():
    pairs = {"nvlink-2": "v100", "nvlink-3": "a100", "nvlink-4": "h100", "nvlink-5": "b200"}
    assert all(_bandwidth(link) == _bandwidth(f"nvswitch-{switch}") for link, switch in pairs.items())


def _seconds(level, steps, volume, constants):
    """(fixed, bandwidth) seconds of one level: startup + steps*latency, (V + sqrt(ramp*V))/(B*e)."""
    link = LINKS[level["link"]]
    rate = parse(level.get("bandwidth", link["bandwidth"]), "bytes/s") * constants["efficiency"]
    ramp = parse(constants["ramp"], "bytes")
    fixed = parse(constants["startup"], "seconds") + steps * parse(link["latency"], "seconds")
    return fixed, (volume + sqrt(ramp * volume)) / rate


def _all_reduce(cluster, algorithm, size, gpus, nodes):
    inner, outer = cluster["levels"]
    group = gpus // nodes
    nvls = _seconds(inner, 2, size * (1 + 1 / group), inner["in_network"])
    ring = _seconds(inner, 2 * (group - 1), 2 * (group - 1) / group * size, inner)
    choice = {"Ring": [ring], "NVLS": [nvls]}.get(algorithm.split(" (")[0], [nvls, ring])
    if nodes == 1:
        return min(map(sum, choice))
    network = _seconds(outer, 2 * (nodes - 1), 2 * (nodes - 1) / nodes * size / group, outer)
    return min(own[0] + network[0] + max(own[1], network[1]) for own in choice)


@pytest.mark.parametrize(("cluster", "hardware"), [("dgx-h100", "H100"), ("dgx-h200", "H200"), ("p6-b200", "B200")])
def test_fitted_clusters_reproduce_the_published_all_reduces(cluster, hardware):
    with (ROOT / "validation" / "collectives.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["collective"] == "all_reduce"]
    rows = [row for row in rows if hardware in row["hardware"] and int(row["size_bytes"]) >= 2**20]
    assert len(rows) >= 6
    errors = [
        abs(
            _all_reduce(CLUSTERS[cluster], row["algo"], int(row["size_bytes"]), int(row["gpus"]), int(row["nodes"]))
            / (float(row["time_us"]) * 1e-6)
            - 1
        )
        for row in rows
    ]
    assert sum(errors) / len(errors) <= 0.08
    assert max(errors) <= 0.20
