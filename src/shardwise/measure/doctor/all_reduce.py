"""A small all-reduce on the processes of this host: whether they meet, whether sums are right, how long it takes."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from shardwise.engine.world import joined
from shardwise.launch.local import supervise
from shardwise.launch.owned import OwnedFolder
from shardwise.measure.doctor.finding import Examination, Finding
from shardwise.spec.timeouts import Timeouts
from shardwise.spec.units import readable_bytes, readable_seconds
from shardwise.training.attempt import Reporter, WorldPlace

_BYTES, _REPEATS = 4 * 2**20, 5
_MOST_CPU_PROCESSES = 8  # more would tell nothing new about a machine, and take minutes to start
_TIMEOUTS = Timeouts(start=120, step=30, checkpoint=30)
_RESULT = "result.json"


def check_all_reduce(asked: Examination) -> Finding:
    world = asked.processes if asked.device == "cuda" else min(asked.processes, _MOST_CPU_PROCESSES)
    with OwnedFolder("doctor") as folder:
        command = [sys.executable, "-m", __name__, asked.device]
        found = supervise(command, world, folder, timeouts=_TIMEOUTS, restarts=0, grace_seconds=1)
        if found.status != 0 or found.stopped:
            return Finding("all-reduce", "fail", str(found.failure or "stopped"), "a run would fail the same way")
        result = json.loads((found.attempts[0].folder / _RESULT).read_text(encoding="utf-8"))
    size, seconds = readable_bytes(_BYTES), readable_seconds(result["seconds"])
    figure = f"{size} over {world} {asked.device} processes in {seconds}"
    if not result["right"]:
        return Finding("all-reduce", "fail", f"{figure}, and the sum is wrong", "look for a broken device or driver")
    return Finding("all-reduce", "pass", f"{figure}; the sum is right")


def main() -> None:
    """One rank of it."""
    place, device = WorldPlace.from_environment(), sys.argv[1]
    reporter = Reporter(place)
    try:
        with joined(place.rank, place.world, str(place.meeting), device=device, seconds=_TIMEOUTS.start):
            _reduce(place, device, reporter)
    except Exception as error:
        reporter.failed(error)
        raise


def _reduce(place: WorldPlace, device: str, reporter: Reporter) -> None:
    right, seconds = True, float("inf")
    for step in range(_REPEATS):
        reporter.phase("step", step)
        values = torch.full((_BYTES // 4,), place.rank + 1.0, device=device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        right &= bool((values == place.world * (place.world + 1) / 2).all())  # waits for the device, too
        seconds = min(seconds, time.perf_counter() - began)
    if place.rank == 0 and place.folder is not None:
        (place.folder / _RESULT).write_text(json.dumps({"right": right, "seconds": seconds}), encoding="utf-8")


if __name__ == "__main__":
    main()
