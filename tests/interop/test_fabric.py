"""How machines are wired, read from what other tools print; the files and their sources are in `fabric/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.interop.fabric import (
    of_hosts,
    read_kubernetes,
    read_nvlinks,
    read_ports,
    read_slurm,
    read_switches,
    read_topology,
)
from shardwise.spec import SpecError

FILES = Path(__file__).with_name("fabric")


def text(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def test_a_machine_with_nvswitch_and_a_card_beside_every_gpu() -> None:
    found = read_topology(text("topo_h100.txt"))
    assert (len(found.gpus), len(found.nics)) == (8, 10)
    assert {found.nvlinks(a, b) for a in range(8) for b in range(8) if a != b} == {18}
    near = min((found.paths["GPU3", nic], nic) for nic in found.nics if found.paths["GPU3", nic] == "PIX")
    assert near == ("PIX", "NIC5")


def test_one_gpu_and_an_underlined_header() -> None:
    found = read_topology(text("topo_one_gpu.txt"))
    assert (found.gpus, found.nics) == (("GPU0",), ())


def test_nvlinks_are_nearer_than_any_way_over_pcie() -> None:
    found = read_topology(text("topo_bridges.txt"))
    assert [found.nvlinks(0, other) for other in (1, 2, 3)] == [0, 4, 0]
    near, host, far = (found.distance(0, other) for other in (2, 1, 3))
    assert near < host < far and found.distance(1, 1) == 0


@pytest.mark.parametrize(
    "wrong", ["", "No devices were found", "\tGPU0\tGPU1\nGPU0\t X \tNV4\n", "\tGPU0\nGPU0\tWAT\n"]
)
def test_what_is_not_a_matrix(wrong: str) -> None:
    with pytest.raises(SpecError) as error:
        read_topology(wrong)
    assert str(error.value).count("\n") == 0


def test_links_that_are_down() -> None:
    found = read_nvlinks(text("nvlink_v100.txt"))
    assert [[one == "<inactive>" for one in links].count(True) for links in found.values()] == [0, 2]
    assert found[1][3] == "<inactive>" and read_nvlinks("") == {}


def test_ports_as_linux_shows_them(tmp_path: Path) -> None:
    for card, state, physical in (("mlx5_0", "4: ACTIVE", "5: LinkUp"), ("mlx5_1", "1: DOWN", "3: Disabled")):
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        values = {"state": state, "phys_state": physical, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
        for name, value in values.items():
            (port / name).write_text(f"{value}\n")
    up, down = read_ports(tmp_path)
    assert (up.name, up.is_up, up.rate) == ("mlx5_0/1", True, "400 Gb/sec (4X NDR)")
    assert (down.state, down.physical, down.is_up) == ("DOWN", "Disabled", False)
    assert read_ports(tmp_path / "none") == []


def test_slurms_trees_and_blocks() -> None:
    tree = read_slurm(text("topology_tree.conf"))
    assert len(tree) == 18 and tree["dev7"] == ("s1", "s3")
    shown = read_slurm(text("scontrol_tree.txt"))
    assert (shown["cn01"], shown["cn05"]) == (("leaf1", "spine1", "core"), ("leaf3", "spine2", "core"))
    blocks = read_slurm(text("topology_block.conf"))
    assert len(blocks) == 64 and blocks["node17"] == ("block2",)
    together = read_slurm(text("scontrol_block.txt"))
    assert together["node05"] == ("b2", "b[1-2]") and together["node09"] == ("b3",)


def test_what_is_not_slurms() -> None:
    for wrong in (
        "",
        "SwitchName=s0 Switches=s1",
        "SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=b Nodes=n1",
    ):
        with pytest.raises(SpecError):
            read_slurm(wrong)


def test_labels_of_kubernetes() -> None:
    found = read_kubernetes(text("nodes_nvidia.json"))
    assert len(found) == 4 and len(found["gpu-0"]) == 6
    assert [a == b for a, b in zip(found["gpu-0"], found["gpu-2"])] == [False, True, True, True, True, True]
    assert [a == b for a, b in zip(found["gpu-0"], found["gpu-3"])] == [False, False, True, True, True, True]
    tiers = read_kubernetes(text("nodes_tiers.json"))
    assert len(tiers["a0"]) == 3 and tiers["a0"][:2] == tiers["a1"][:2] and tiers["a0"][0] != tiers["a2"][0]
    assert [a == b for a, b in zip(tiers["other"], tiers["a0"])] == [False, False, True]
    for wrong in ("{}", '{"items": [{"metadata": {"name": "a"}}]}', "x"):
        with pytest.raises(SpecError):
            read_kubernetes(wrong)


def test_a_file_is_told_apart_and_a_domain_left_out(tmp_path: Path) -> None:
    slurm, nodes = (read_switches(FILES / name, "--switches") for name in ("topology_tree.conf", "nodes_nvidia.json"))
    assert of_hosts(slurm, ["dev3.example.org", "unknown"]) == {"dev3.example.org": ("s0", "s3")}
    assert set(of_hosts(nodes, ["gpu-1"])) == {"gpu-1"}
    with pytest.raises(SpecError, match=r"--switches: .* is not there"):
        read_switches(tmp_path / "none", "--switches")
