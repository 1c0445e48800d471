"""Ours against gloo's own collectives on emulated clusters of 2 nodes x 2 ranks, as ratios of one run.

python bench/collectives.py [--cluster FILE] [2x2,200Mbit,1ms 2x2,1Gbit,1ms]

First hierarchical all-reduce against gloo's flat one at 16 MiB (at least 1.3 times as fast is asked for), then `auto`
against gloo's own from 1 KiB to 64 MiB (at most 1.1 times its time). Both ways take turns, so that what else the
machine does hits both. `auto` chooses by the cluster's description: a file of `shardwise calibrate`, whose wires are
replaced by the emulated ones, or what was found once on a machine of 2 cores.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

from shardwise.collectives import CollectiveKind
from shardwise.launch.emulate.network import EmulatedPool
from shardwise.launch.pool import WorkerPlace
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import Transport

LINKS = ("2x2,200Mbit,1ms", "2x2,1Gbit,1ms")
LARGE = 16 * 2**20
SIZES = tuple(2**power for power in range(10, 27, 2))
NAMES = ("hierarchical", "hierarchical_pipelined")
MOST_SECONDS = 8.0  # for one size


def main() -> None:
    arguments = sys.argv[1:]
    described = None
    if arguments[:1] == ["--cluster"]:
        described, arguments = cluster_from(arguments[1]), arguments[2:]
    for text in arguments or LINKS:
        emulation = Emulation.parse(text)
        cluster = on_wires(described, emulation) if described else assumed(emulation)
        with EmulatedPool(emulation, ("torch", "shardwise.engine.collectives.communicator")) as pool:
            large = pool.run(compared, emulation.world, cluster, (LARGE,), NAMES, timeout_seconds=600)[0]
            print(f"\n{text}: all-reduce of 16 MiB, times as fast as gloo's own (1.3 is asked for)")
            for name, median, least, own, own_least, _ in large:
                print(f"  {name:30} {own / median:5.2f} by medians, {own_least / least:5.2f} by minima", flush=True)
            print(f"{text}: auto, part of gloo's own time (at most 1.10)")
            for name, median, least, own, own_least, size in pool.run(
                compared, emulation.world, cluster, SIZES, ("auto",), timeout_seconds=600
            )[0]:
                ratios = f"{median / own:5.2f} by medians, {least / own_least:5.2f} by minima"
                print(f"  {size / 1024:9.0f} KiB {ratios}, {own * 1e3:9.2f} ms by gloo, {name}", flush=True)


def assumed(emulation: Emulation) -> Cluster:
    """gloo shakes hands before each message (a round trip and a half); ours says where messages go beforehand."""
    cluster = cluster_of(emulation, cluster_from("laptop"))
    inside, between = cluster.levels
    inside = replace(inside, overhead=4e-4, schedules=Transport(overhead=3e-4))
    between = replace(between, trips=2.2, overhead=3e-4, schedules=Transport(trips=1.1, overhead=3e-4))
    return replace(cluster, levels=(inside, between), library="gloo")


def on_wires(cluster: Cluster, emulation: Emulation) -> Cluster:
    between = replace(cluster.levels[-1], bandwidth=emulation.rate, latency=emulation.delay, link=None)
    return cluster.with_level(len(cluster.levels) - 1, between)


def compared(
    place: WorkerPlace, cluster: Cluster, sizes: tuple[int, ...], names: tuple[str, ...]
) -> list[tuple[str, float, float, float, float, int]]:
    """(algorithm, median, least, those of gloo's own, size), for every size and name."""
    import torch
    import torch.distributed as dist

    from shardwise.engine.collectives import Communicator
    from shardwise.engine.mesh import process_group
    from shardwise.layout.gradient_schedules import choose
    from shardwise.layout.groups import RankRun

    torch.set_num_threads(1)
    found = []
    with process_group(place.rank, place.world, place.rendezvous_file):
        group = dist.group.WORLD
        assert group is not None
        communicator = Communicator(group)

        def timed(schedule: object, tensor: torch.Tensor) -> float:
            tensor.fill_(place.rank)
            dist.barrier()
            begin = time.perf_counter()
            if schedule is None:
                dist.all_reduce(tensor)
            else:
                communicator.run(schedule, tensor)  # type: ignore[arg-type]
            seconds = torch.tensor(time.perf_counter() - begin)
            assert float(tensor[0]) == float(tensor[-1]) == sum(range(place.world))
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            return float(seconds)

        for size in sizes:
            tensor = torch.empty(size // 4)
            for name in names:
                runs = (RankRun(1, place.world),)
                schedule = choose(CollectiveKind.ALL_REDUCE, size, cluster, runs, name).schedule
                timed(schedule, tensor), timed(None, tensor)
                ours, own = [], []
                repeats = max(3, min(20, int(MOST_SECONDS / (2 * timed(None, tensor)))))
                for _ in range(repeats):
                    ours.append(timed(schedule, tensor))
                    own.append(timed(None, tensor))
                label = "gloo's own" if schedule is None else schedule.algorithm
                found.append((label, statistics.median(ours), min(ours), statistics.median(own), min(own), size))
    return found


if __name__ == "__main__":
    main()
