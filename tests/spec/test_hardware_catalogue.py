"""The hardware catalogue: complete, consistent, and right where the values are well known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise import spec
from shardwise.spec import presets
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.network import Link
from tables import table

DEVICES = {name: presets.load("device", Device, name) for name in presets.names("device")}
LINKS = {name: presets.load("link", Link, name) for name in presets.names("link")}
CLUSTERS = {name: presets.load("cluster", Cluster, name) for name in presets.names("cluster")}
CLUSTER_FILES = Path(spec.__file__).parent / "catalogue" / "clusters"


@table("entry", [*DEVICES.items(), *LINKS.items(), *CLUSTERS.items()])
def test_every_entry_has_its_own_name_and_a_source(entry: tuple[str, Device | Link | Cluster]) -> None:
    name, noun = entry
    assert noun.name == name
    assert len(noun.source) > 10


@table("name", DEVICES)
def test_devices_are_plausible(name: str) -> None:
    device = DEVICES[name]
    # A narrower float format is never slower, fp64 apart (vector and tensor rates mix there), and those without
    # instructions.
    kinds = ("fp32", "tf32", "bf16", "fp8", "fp6", "fp4")
    floats = [device.peak[kind] for kind in kinds if kind in device.peak and not device.is_slow(kind)]
    assert floats == sorted(floats)
    assert device.peak.get("fp16", device.peak_flops("bf16")) == device.peak_flops("bf16")
    assert device.memory >= 2**30
    assert device.memory_bandwidth > 1e10
    assert 0 < device.cache < device.memory
    assert 0 <= device.units_taken.collectives < 0.5
    assert device.power


@table("name", LINKS)
def test_links_are_plausible(name: str) -> None:
    link = LINKS[name]
    assert link.kind in ("nvlink", "pcie", "infiniband", "ethernet", "ici", "storage", "memory")
    assert link.bandwidth > 1e7
    assert 1e-7 < link.latency < 1


@table("name", CLUSTERS)
def test_clusters_are_plausible(name: str) -> None:
    cluster = CLUSTERS[name]
    assert cluster.host_link is not None
    assert cluster.host_memory is not None
    assert cluster.host_memory > 1e9
    assert cluster.storage
    assert all(store.link.kind == "storage" for store in cluster.storage)
    # Bandwidth never grows on the way out: that would make an inner level pointless.
    reached = [level.bandwidth_per_direction * (level.width - 1 if level.topology == "fully-connected" else 1)
               for level in cluster.levels]  # fmt: skip
    assert reached == sorted(reached, reverse=True)


@table(
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
def test_known_link_bandwidths(link: str, gigabytes: float) -> None:
    assert LINKS[link].bandwidth == pytest.approx(gigabytes * 1e9, rel=1e-12)


@table(
    ("device", "bf16_teraflops", "memory_gib", "units"),
    [
        ("a100-80gb", 312, 80, 108),
        ("h100-sxm", 989.4, 80, 132),
        ("h200-sxm", 989.4, 141, 132),
        ("b200", 2250, 180, 148),
        ("rtx-3090", 71, 24, 82),  # fp32 accumulation, half of the advertised rate
        ("rtx-4090", 165.2, 24, 128),
        ("rtx-5090", 209.5, 32, 170),
        ("rtx-pro-6000", 503.8, 96, 188),  # not halved with fp32 accumulation
        ("h20", 148, 96, 78),
        ("gh200", 989.4, 96, 132),
        ("trainium2", 667, 96, 8),
        ("mi300x", 1307.4, 192, 304),
        ("tpu-v4", 275, 32, 2),
    ],
)
def test_known_devices(device: str, bf16_teraflops: float, memory_gib: int, units: int) -> None:
    entry = DEVICES[device]
    assert entry.peak["bf16"] == pytest.approx(bf16_teraflops * 1e12, rel=1e-12)
    assert entry.memory == memory_gib * 2**30
    assert entry.compute_units == units


@table(
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
def test_families_grow_and_usable_bandwidth_too(family: list[str]) -> None:
    bandwidths = [LINKS[link].bandwidth for link in family]
    usable = [LINKS[link].bandwidth * LINKS[link].efficiency for link in family]
    assert bandwidths == sorted(set(bandwidths))
    assert usable == sorted(usable)


def test_the_switch_carries_what_its_links_carry() -> None:
    pairs = {"nvlink-2": "v100", "nvlink-3": "a100", "nvlink-4": "h100", "nvlink-5": "b200"}
    assert all(LINKS[link].bandwidth == LINKS[f"nvswitch-{switch}"].bandwidth for link, switch in pairs.items())


def test_a_latency_is_what_its_source_computes_or_marked_as_assumed() -> None:
    """No figure of one link is another's: the measured times are in its source, `(34.8 - 25.0) / 2`."""
    measured: dict[str, float] = {}
    for name, link in LINKS.items():
        text = " ".join(link.source.split())
        shown = re.search(r"Latency: ([\d.]+) us, .*?\(([\d.]+) - ([\d.]+)\) / (\d)", text)
        if shown:
            value, longer, shorter, steps = map(float, shown.groups())
            assert "latency" not in link.assumed and link.latency == pytest.approx(value * 1e-6)
            assert value == pytest.approx((longer - shorter) / steps, abs=0.06), name
            measured[name] = link.latency
        else:
            assert "latency" in link.assumed or link.kind == "ici", name
        if re.search(r"[Ee]fficiency: priors?\b|and efficiency: priors?\b", text):
            assert "efficiency" in link.assumed, name
    assert len(set(measured.values())) == len(measured) >= 2


def test_a_host_has_a_source_or_is_marked_as_assumed() -> None:
    files = [one.read_text(encoding="utf-8") for one in sorted(CLUSTER_FILES.glob("*.yaml"))]
    lines = [re.search(r"(?:# (.*)\n)?host: \{[^}]*\}(?:  # (.*))?", text) for text in files]
    said = [one and (one[2] or one[1]) for one in lines]
    sourced = re.compile(r"assumed|placeholder|as the DGX|MLPerf|user guide|guide to DGX|system files")
    assert [one for one in said if not one or not sourced.search(one) or "recalled" in one] == []
