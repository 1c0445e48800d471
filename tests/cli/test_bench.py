"""`shardwise bench collectives` on real processes: right results, bandwidths as nccl-tests define them, files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardwise.cli.main import main
from shardwise.collectives import CollectiveKind
from shardwise.measure.collectives.request import (
    MeasuredCollective,
    MeasuredLevel,
    bus_factor,
    levels_of,
    sizes_between,
)
from shardwise.report.bench import collectives_picture
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of


@pytest.mark.slow
def test_every_collective_is_measured_and_right(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "bench.csv", tmp_path / "bench.svg"
    how = ["--max-bytes", "1KiB", "--repeats", "2", "--warmup", "1", "--out", str(out), "--picture", str(plot)]
    status = main(["bench", "collectives", "--processes", "3", *how, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == 0
    assert {one["collective"] for one in found} == {kind.value for kind in CollectiveKind}
    assert {"backend", "ring", "direct", "bruck", "recursive_doubling"} <= {one["algorithm"] for one in found}
    for one in found:
        assert one["right"] and 0 < one["least_seconds"] <= one["median_seconds"]
        assert one["algorithm_bandwidth"] == pytest.approx(one["size_bytes"] / one["median_seconds"])
        factor = bus_factor(CollectiveKind(one["collective"]), 3)
        assert one["bus_bandwidth"] == pytest.approx(factor * one["algorithm_bandwidth"])
    with out.open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(found)
    circles = ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) >= len(found)


def test_a_picture_has_two_times_to_read_by_and_no_two_algorithms_look_alike() -> None:
    names = ["backend", *(f"way_{number}" for number in range(10))]
    measured = [
        MeasuredCollective("world", "all_reduce", one, 4, 8 * 4**k, 3, 2.1e-3, 2e-3, True)
        for k in (0, 1)
        for one in names
    ]
    root = ElementTree.fromstring(collectives_picture(measured))
    texts = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "all-reduce over world: 4 ranks" in texts and "way 9" in texts
    assert sum(text.endswith(" ms") for text in texts) >= 2
    looks = [(one.get("fill"), one.get("stroke")) for one in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(set(looks)) == len(names)


def test_bus_bandwidth_by_the_definitions_of_nccl_tests() -> None:
    assert bus_factor(CollectiveKind.ALL_REDUCE, 4) == 1.5
    assert bus_factor(CollectiveKind.ALL_GATHER, 4) == bus_factor(CollectiveKind.ALL_TO_ALL, 4) == 0.75
    assert bus_factor(CollectiveKind.BROADCAST, 4) == bus_factor(CollectiveKind.REDUCE, 4) == 1.0


def test_the_levels_of_a_network_and_the_world() -> None:
    cluster = cluster_of(Emulation.parse("2x3,1Gbit,1ms"), cluster_from("laptop"))
    inside, between, world = levels_of(cluster)
    assert inside.groups(6) == ((0, 1, 2), (3, 4, 5))
    assert between.groups(6) == ((0, 3), (1, 4), (2, 5))
    assert (world.name, world.groups(6)) == ("world", ((0, 1, 2, 3, 4, 5),))
    assert [level.name for level in levels_of(cluster_from("laptop:4"))] == ["world"]
    assert isinstance(world, MeasuredLevel) and sizes_between(8, 100) == (8, 32, 100)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["collective"], "did you mean collectives"),
        (["collectives", "--kinds", "all_redcue"], "all_reduce"),
        (["collectives", "--processes", "1"], "--processes"),
        (["collectives", "--algorithms", "magic"], "--algorithms"),
        (["collectives", "--levels", "moon"], "--levels"),
        (["collectives", "--max-bytes", "4"], "--min-bytes"),
        (["collectives", "--cluster", "dgx-h100:2"], "--cluster"),
        (["collectives", "--time-limit", "nan"], "--time-limit: 'nan' is not a quantity"),
        (["collectives", "--out", "/no/where.csv"], "--out: /no/where.csv cannot be written"),
        (["collectives", "--picture", "/no/where.svg"], "--picture: /no/where.svg cannot be written"),
        (["collectives", "--max-bytes", "100TB"], "--max-bytes: 2 ranks need at least"),
        (["collectives", "--run-device", "cuda"], "--run-device: cuda is for ranks that a launcher starts"),
        (["collectives", "--processes", "100000"], "--processes: 100,000 processes on"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_one_line_before_a_process_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.launch.pool.Pool.run", lambda *started, **how: pytest.fail("processes start"))
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
