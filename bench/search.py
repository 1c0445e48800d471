"""How fast the planner prices strategies: two large searches, and one of them as the cluster grows.

Counted are all strategies whose memory is priced; their time is, unless their pipeline alone is slower than what the
search keeps.
Exits with 1 where a search is slower than its target or the process needs too much memory.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

from shardwise.planner.request import Request
from shardwise.planner.search.search import search
from shardwise.spec.job import Job
from shardwise.spec.training import Training

TARGET = 1_500_000
LARGEST_TARGET = 1_000_000  # few strategies of each layout, whose layers and schedules are priced one by one
MOST_MEMORY = 2 * 2**30
SECONDS = 50  # of all cases together; a case that would not fit in is left out


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    cluster: str
    training: Training
    offload: bool = False
    target: int = 0  # strategies per second of processor time

    def request(self) -> Request:
        # The batch need not divide over the plain strategy that a job starts with.
        job = Job(model=self.model, cluster=self.cluster)  # type: ignore[arg-type]
        return Request(job.unchecked(training=self.training), offload=self.offload)


GPT3 = Training(global_batch=1536, seq=2048, precision="fp16")
LLAMA = Training(global_batch="16M-tokens", seq=8192)
CASES = (
    Case("GPT-3 175B, 4,096 A100, offload", "gpt3-175b", "dgx-a100:512", GPT3, True, TARGET),
    Case("Llama-3 405B, 16,384 H100", "llama3-405b", "dgx-h100:2048", LLAMA, False, TARGET),
    *(
        Case(f"Llama-3 405B, {8 * nodes:,} H100", "llama3-405b", f"dgx-h100:{nodes}", LLAMA, False, target)
        for nodes, target in ((128, TARGET), (1024, TARGET), (16384, LARGEST_TARGET))
    ),
)


def run(case: Case) -> bool:
    """Searches once, prints one line, and says whether it is as fast and small as it should be."""
    wall, processor = time.perf_counter(), time.process_time()
    request = case.request()
    space = request.space(offload=case.offload)
    found = search(space, memory_bytes=request.capacity_bytes)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    rate, memory = found.priced / processor, peak_memory_bytes()
    good = rate >= case.target and memory <= MOST_MEMORY
    print(f"{case.name}: {found.priced:,} strategies in {processor:.1f} s of CPU: {rate:,.0f} strategies/s, "
          f"{wall:.1f} s wall, {memory / 2**20:.0f} MiB" + ("" if good else ": BEYOND"), flush=True)  # fmt: skip
    for left_out in space.narrowing:
        print(f"  narrowed: {left_out}")
    return good


def peak_memory_bytes() -> float:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main() -> int:
    started, good, longest = time.perf_counter(), True, 0.0
    for case in CASES:
        if time.perf_counter() - started + longest > SECONDS:
            print(f"{case.name}: left out, {SECONDS} s would not be enough")
            continue
        before = time.perf_counter()
        good &= run(case)
        longest = max(longest, time.perf_counter() - before)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
