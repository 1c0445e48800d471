"""How fast `plan` searches: strategies whose time and memory are computed per second of CPU, and how that grows.

Run `python bench/search.py`. Strategies cut earlier (degrees or batches that do not divide) are not counted.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace

from shardwise.planner.constraints import Constraints
from shardwise.planner.search import search
from shardwise.planner.space import Space
from shardwise.spec.job import Job


@dataclass(frozen=True)
class Case:
    title: str
    model: str
    cluster: str
    global_batch: int | str
    seq: int
    precision: str = "bf16"
    offload: bool = False


CASES = (
    Case("GPT-3 175B, 4,096 A100, offload", "gpt3-175b", "dgx-a100:512", 1536, 2048, "fp16", offload=True),
    Case("Llama-3 405B, 16,384 H100", "llama3-405b", "dgx-h100:2048", "16M-tokens", 8192),
)
GROWTH = (64, 512, 4096, 16_384)  # nodes of 8; the batch grows with them


def job_of(case: Case) -> Job:
    """The job without a strategy; its batch is checked for every strategy in the search."""
    training = {"seq": case.seq, "precision": case.precision}
    job = Job.from_dict({"model": case.model, "cluster": case.cluster, "training": training})
    return job.unchecked(training=replace(job.training, global_batch=case.global_batch))


def run(case: Case) -> tuple[int, float]:
    """Strategies and seconds of CPU."""
    started = time.perf_counter()
    result = search(Space(job_of(case), Constraints(), offload=case.offload))
    wall = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{case.title}: {result.priced:,} strategies in {result.seconds:.1f} s of CPU: "
        f"{result.priced / result.seconds:,.0f} strategies/s, {wall:.1f} s wall, {peak} MiB",
        flush=True,
    )
    return result.priced, result.seconds


def main() -> None:
    for case in CASES:
        run(case)
    print("growth, Llama-3 405B, 1M tokens of batch for every 1,024 devices:")
    first: tuple[int, float] | None = None
    for nodes in GROWTH:
        devices = 8 * nodes
        tokens = max(4, devices // 1024)
        found = run(Case(f"  {devices:,} H100", "llama3-405b", f"dgx-h100:{nodes}", f"{tokens}M-tokens", 8192))
        if first is not None:
            print(f"    × {found[0] / first[0]:.2f} strategies, × {found[1] / first[1]:.2f} time")
        first = first or found


if __name__ == "__main__":
    main()
