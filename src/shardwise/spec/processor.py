"""Which formats this machine's CPU multiplies at a sensible speed, read from Linux without loading PyTorch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shardwise.spec.job import Job
from shardwise.spec.training import RECIPES

CPUINFO = Path("/proc/cpuinfo")
# Any one of these sets. oneDNN multiplies bf16 on AVX-512 (converted in registers), with AVX-NE-CONVERT, or on Arm with
# its own instructions; without them PyTorch falls back to loops over single numbers (ATen/native/mkldnn/Utils.h).
_NEEDS = {
    "bf16": ({"avx512f", "avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"}),
    "fp16": ({"avx512_fp16"}, {"amx_fp16"}),
}


def slow_formats(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """The formats whose matmuls are many times slower than fp32's here; none if unknown."""
    features = _features(cpuinfo)
    return tuple(name for name, sets in _NEEDS.items() if features and not any(one <= features for one in sets))


def slow_precision_notes(precision: str, cpuinfo: Path = CPUINFO) -> list[str]:
    """A line for a job of this precision that runs on this machine's processor, where it lacks the instructions."""
    compute = RECIPES[precision].compute
    if compute not in slow_formats(cpuinfo):
        return []
    return [f"this CPU has no {compute} instructions: a step takes many times as long as with --precision fp32"]


def planned_precision_notes(job: Job) -> list[str]:
    """The same for a job that is planned for processors, which need not be this one."""
    compute = RECIPES[job.training.precision].compute
    if job.run_device != "cpu" or compute not in _NEEDS:
        return []
    return [f"a CPU without instructions for {compute} takes many times as long as with --precision fp32"]


@cache
def _features(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    told = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(told, "").split())
