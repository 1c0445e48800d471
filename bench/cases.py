"""Large published trainings: predicted as their authors laid them out, beside the best layout that the search finds.

    python bench/cases.py

Every case is a job in examples/. "as published" prices it; "completed" lets the planner choose what the source leaves
open (schedule, interleaving, microbatch, recompute) at the published degrees; "best" searches all layouts, for the same
software. A ratio is a predicted step over the published one, or over the best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import shardwise
from shardwise.cost.analysis import Analysis, analyze
from shardwise.interop.jobs import read_job
from shardwise.planner.candidate import Candidate, strategy_words
from shardwise.spec.job import Job

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEGREES = ("tp", "cp", "pp", "dp", "ep")
GIB = 2**30


def of_gpu_hours(hours_per_trillion_tokens: float) -> Callable[[Analysis], float]:
    """The step of a run that took so many GPU hours for 10^12 tokens."""

    def seconds(priced: Analysis) -> float:
        tokens_per_second = 1e12 / (hours_per_trillion_tokens * 3600) * priced.job.cluster.devices
        return priced.job.tokens_per_step / tokens_per_second

    return seconds


def of_teraflops(each: float) -> Callable[[Analysis], float]:
    """The step of a run with so many TFLOP/s on every device, causal attention counted once."""
    return lambda priced: priced.flops_per_step() / (priced.job.cluster.devices * each * 1e12)


@dataclass(frozen=True)
class PublishedCase:
    """A training that its authors describe; ``seconds`` is its step as they report it."""

    name: str
    file: str
    report: str
    seconds: Callable[[Analysis], float]

    @cached_property
    def job(self) -> Job:
        return read_job(EXAMPLES / self.file)

    def priced(self) -> Analysis:
        return analyze(self.job)

    def found(self, **fixed: Any) -> Candidate:
        """The fastest layout with ``fixed`` fields, of all that can be priced for the same software."""
        result = shardwise.plan(self.job, any_priced=True, **fixed)
        return min(result.candidates, key=lambda one: one.seconds_per_token)

    def completed(self) -> Candidate:
        """The fastest layout with the published degrees, in all of a device's memory as its authors may use it."""
        strategy = self.job.strategy
        return self.found(max_memory="100%", **{name: strategy.degree(name) for name in DEGREES})


CASES = (
    PublishedCase(
        "DeepSeek-V3, 2,048 H800",
        "deepseek-v3-hgx-h800.yaml",
        "180,000 GPU hours for 10^12 tokens (arXiv 2412.19437, section 1)",
        of_gpu_hours(180_000),
    ),
    *(
        PublishedCase(f"Llama-3 405B, {name}", f"llama3-405b-{file}.yaml",
                      f"{teraflops} TFLOP/s a GPU (arXiv 2407.21783, Table 4)", of_teraflops(teraflops))
        for name, file, teraflops in (
            ("8,192 H100", "8192-h100", 430),
            ("16,384 H100", "16384-h100", 400),
            ("16,384 H100, sequences of 131,072", "16384-h100-128k", 380),
        )
    ),
)  # fmt: skip


def bf16_mfu(job: Job, seconds: float, flops: float) -> float:
    """Model FLOPs utilisation of the bf16 peak, which both reports use."""
    return flops / seconds / (job.cluster.devices * job.cluster.device.peak_flops("bf16"))


def show(case: PublishedCase) -> None:
    priced, completed, best = case.priced(), case.completed(), case.found()
    published, flops = case.seconds(priced), priced.flops_per_step()
    print(f"{case.name}: {case.report}")
    lines = [("published", published, None, ""), ("as published", priced.predicted_seconds, priced.memory.total, "")]
    lines += [
        (name, one.step_seconds, one.memory.total, strategy_words(one.job.strategy))
        for name, one in (("completed", completed), ("best", best))
    ]
    for name, seconds, memory, layout in lines:
        held = (
            "" if memory is None else f"  {memory / GIB:5.1f} of {case.job.cluster.device.usable_memory / GIB:.1f} GiB"
        )
        ratios = f"  {seconds / published:4.2f} of published  {seconds / best.step_seconds:4.2f} of best"
        mfu = f"  MFU {bf16_mfu(case.job, seconds, flops):5.1%}"
        print(f"  {name:12}  {seconds:5.2f} s{mfu}{ratios}{held}" + (f"\n{'':16}{layout}" if layout else ""))
    print(flush=True)


def main() -> None:
    for case in CASES:
        show(case)


if __name__ == "__main__":
    main()
