"""What this machine has: optional packages, and the number formats its CPU multiplies at a sensible speed."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.training import RECIPES

TRAINING = ("torch", "safetensors")
# Of /dev/shm, for the ranks of a node. NCCL's documentation recommends --shm-size=1g in containers, whose default is
# 64 MiB; gloo needs none, loaders some.
SHARED_BYTES = {"cuda": 2**30, "cpu": 64 * 2**20}
TESTED_TORCH = ((2, 11), (2, 15))  # first and last, as in pyproject.toml
_EXTRAS = {
    "torch": "train",
    "safetensors": "train",
    "pyarrow": "data",
    "tokenizers": "data",
    "jinja2": "finetune",
    "fsspec": "remote",
    "s3fs": "remote",
    "ray": "ray",
    "pandas": "ray",
    "uvicorn": "ui",
    "starlette": "ui",
}
_TITLES = {"torch": "PyTorch"}


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that is imported and has no specification
        return False


def require_packages(what: str, *names: str) -> None:
    """Raises SpecError for the first package that ``what`` needs and that is not installed; imports none."""
    for name in names:
        if not is_installed(name):
            wanted = f"'shardwise[{_EXTRAS[name]}]'" if name in _EXTRAS else name
            title = _TITLES.get(name, f"the package {name}")
            raise SpecError(what, f"needs {title}, which is not installed", f"pip install {wanted}")


def torch_notes() -> list[str]:
    """A note where PyTorch is older or newer than the tested versions."""
    from importlib.metadata import PackageNotFoundError  # 20 ms that pricing need not take
    from importlib.metadata import version as installed

    try:
        version = installed("torch")
    except PackageNotFoundError:
        return []
    match = re.match(r"(\d+)\.(\d+)", version)
    first, last = TESTED_TORCH
    if match is None or first <= (int(match[1]), int(match[2])) <= last:
        return []
    tested = " to ".join(f"{major}.{minor}" for major, minor in TESTED_TORCH)
    return [f"PyTorch {version} is not tested here, {tested} are: pip install 'shardwise[train]'"]


CPUINFO = Path("/proc/cpuinfo")
# A CPU needs any one of these sets. oneDNN multiplies bf16 on AVX-512 (converted in registers), with AVX-NE-CONVERT, or
# on Arm with its own instructions; without them PyTorch falls back to scalar loops (ATen/native/mkldnn/Utils.h).
_NEEDS = {
    "bf16": ({"avx512f", "avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"}),
    "fp16": ({"avx512_fp16"}, {"amx_fp16"}),
}


def slow_formats(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """The formats whose matmuls are many times slower than fp32's here; none if unknown."""
    features = _features(cpuinfo)
    return tuple(name for name, sets in _NEEDS.items() if features and not any(needed <= features for needed in sets))


def slow_precision_notes(job: Job, cpuinfo: Path = CPUINFO) -> list[str]:
    """A note for a job that runs on this machine's CPU, which lacks instructions that its cluster's device has."""
    compute = RECIPES[job.training.precision].compute
    if compute not in slow_formats(cpuinfo) or job.cluster.device.is_slow(compute):
        return []
    return [f"this CPU has no {compute} instructions: a step takes many times as long as with --precision fp32"]


def precision_notes(job: Job, *, given: bool) -> list[str]:
    """A note for a job on devices that lack instructions: for the precision that is ``given``, or else for bf16."""
    device, compute = job.cluster.device, job.training.recipe.compute if given else "bf16"
    if compute not in _NEEDS or not device.is_slow(compute):
        return []
    faster = device.peak_flops("fp32") / device.peak_flops(compute)
    why = f"{device.name} has no {compute} instructions: fp32 is {faster:,.0f} times as fast (--precision)"
    return [why if given else f"precision fp32, since {why}"]


@cache
def _features(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").split())
