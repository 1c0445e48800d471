"""How long `shardwise analyze` takes to answer: against `import numpy`, and as the cluster grows.

Exits with 1 where a ratio of medians is beyond its target.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 11
NUMPY_TARGET = 5.0
SIZE_TARGET = 1.2
HEADLINE = (
    "analyze --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --dp 16 --zero 1 --global-batch 1024 --seq 8192"
)
SIZED = "analyze --model llama3-8b --cluster dgx-h100:{nodes} --tp 8 --zero 1 --global-batch 16384 --seq 8192"


def shardwise(arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardwise", *arguments.split()]


def seconds(command: list[str]) -> float:
    """Wall time of one run of ``command``, which must succeed."""
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


def ratio(command: list[str], reference: list[str]) -> tuple[float, float, float]:
    """Median times of both, measured in turn so that a busy machine slows them alike, and their ratio."""
    seconds(command), seconds(reference)  # once without counting: caches of the file system
    pairs = [(seconds(command), seconds(reference)) for _ in range(RUNS)]
    first, second = (statistics.median(times) for times in zip(*pairs, strict=True))
    return first, second, first / second


def report(what: str, reference: str, measured: tuple[float, float, float], target: float) -> bool:
    first, second, found = measured
    verdict = "ok" if found <= target else "BEYOND"
    print(f"{what}: {first * 1e3:.0f} ms, {reference}: {second * 1e3:.0f} ms; ratio {found:.2f}, "
          f"target {target:g}: {verdict}")  # fmt: skip
    return found <= target


def main() -> int:
    numpy = [sys.executable, "-c", "import numpy"]
    large, small = (shardwise(SIZED.format(nodes=nodes)) for nodes in (2048, 1))
    good = [
        report("shardwise analyze", "import numpy", ratio(shardwise(HEADLINE), numpy), NUMPY_TARGET),
        report("analyze 16,384 GPUs", "8 GPUs", ratio(large, small), SIZE_TARGET),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
