"""What checkpoints cost: the stall of a step by an asynchronous save, and the speed of writing.

    PYTHONPATH=src python bench/checkpoint.py --gib 1

One process saves a model's weights and moments. The time for which an asynchronous save keeps the loop is compared with
that of a synchronous one; the rate of a synchronous save, checksums and fsync included, with that of writing as many
bytes on end to the same disk. Each is done several times in turn, and medians are compared. Exits 1 where a target is
missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.spec.job import Job
from shardwise.training.checkpoint.save import Saver

MOST_STALL = 0.20  # of the time of a synchronous save
LEAST_RATE = 0.70  # of plain writing
BLOCK = memoryview(os.urandom(8 * 2**20))
BYTES_PER_PARAMETER = 12  # fp32 weights and two moments
HIDDEN, VOCAB = 1024, 8192


def job(gib: float) -> Job:
    """A model whose checkpoint has about that size."""
    per_layer, fixed = 12 * HIDDEN**2, 2 * VOCAB * HIDDEN
    layers = max(1, round((gib * 2**30 / BYTES_PER_PARAMETER - fixed) / per_layer))
    model = {"layers": layers, "hidden": HIDDEN, "heads": 8, "ffn": 4 * HIDDEN, "vocab": VOCAB, "max_seq": 128}
    training = {"global_batch": 1, "seq": 128, "precision": "fp32"}
    return Job.from_dict({"model": model, "cluster": "laptop:1", "training": training})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of a checkpoint (default 1)")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to try (default: that of temporary files)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name, process_group(0, 1, f"{name}/meeting"):
        engine, folder = Engine(job(asked.gib)), CheckpointFolder(Path(name) / "checkpoints")
        saver = Saver(engine, folder)
        seconds: dict[str, list[float]] = {"plain": [], "synchronous": [], "stall": []}
        size = int(asked.gib * 2**30)
        plain = Path(name) / "plain"
        for number in range(1 + asked.times):  # the first warms up
            found = {
                "plain": timed(partial(write_plainly, plain, size)),
                "synchronous": timed(partial(saver.save, 1, {}, wait=True)),
                "stall": timed(partial(saver.save, 2, {})),
            }
            saver.finish()
            size = sum(path.stat().st_size for path in Path(str(folder.of_step(1))).iterdir())
            plain.unlink()
            for one in (folder.of_step(1), folder.of_step(2)):
                shutil.rmtree(str(one))
            if number:
                for what, value in found.items():
                    seconds[what].append(value)
    return told({what: statistics.median(values) for what, values in seconds.items()}, size)


def told(seconds: dict[str, float], size: int) -> int:
    gib = size / 2**30
    stall, rate = seconds["stall"] / seconds["synchronous"], seconds["plain"] / seconds["synchronous"]
    verdicts = ["ok" if stall < MOST_STALL else "MISSED", "ok" if rate >= LEAST_RATE else "MISSED"]
    print(
        f"a checkpoint of {gib:.2f} GiB: {seconds['synchronous']:.2f} s, {gib / seconds['synchronous']:.2f} GiB/s;",
        end=" ",
    )
    print(
        f"plain writing {gib / seconds['plain']:.2f} GiB/s: {rate:.0%} of it (at least {LEAST_RATE:.0%}): {verdicts[1]}"
    )
    print(
        f"an asynchronous save holds the step for {seconds['stall']:.3f} s, "
        f"{stall:.1%} of a synchronous one (less than {MOST_STALL:.0%}): {verdicts[0]}"
    )
    return 0 if verdicts == ["ok", "ok"] else 1


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write_plainly(path: Path, size: int) -> None:
    """As many bytes on end, on disk at the end."""
    with path.open("wb", buffering=0) as file:
        left = size
        while left:
            left -= file.write(BLOCK[: min(left, len(BLOCK))])
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main())
