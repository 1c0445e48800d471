"""Checks that need torch: versions, the memory of devices, and a small all-reduce."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.engine.mesh import process_group
from shardwise.launch.local import supervise
from shardwise.launch.owned import OwnedFolder
from shardwise.measure.doctor.findings import Checked, Examination
from shardwise.measure.verify import available_bytes
from shardwise.models import flash_attention_4
from shardwise.run.attempt import Reporter, WorldPlace
from shardwise.spec.installation import TESTED_TORCH, is_installed, slow_formats
from shardwise.spec.run import Timeouts
from shardwise.spec.units import readable_bytes, readable_seconds

_PROCESS_BYTES = 2**30  # that a CPU process takes with PyTorch and a small model
_FREE_SHARE = 0.9


def visible_devices() -> int:
    """GPUs that PyTorch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_versions(request: Examination) -> Iterator[Checked]:
    yield Checked("Python", "pass", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    lowest, highest = TESTED_TORCH
    if lowest <= version <= highest:
        yield Checked("PyTorch", "pass", torch.__version__)
    else:
        known = " to ".join(".".join(map(str, tested)) for tested in TESTED_TORCH)
        yield Checked("PyTorch", "fail" if version < lowest else "warn", torch.__version__, f"tested with {known}")
    if not is_installed("safetensors"):
        yield Checked("safetensors", "fail", "is not installed", "pip install 'shardwise[train]'")
    if request.device == "cpu":
        yield _processor()
    if not (dist.is_available() and dist.is_gloo_available()):
        yield Checked("gloo", "fail", "is not in this build of PyTorch", "install one of pytorch.org's")
    if request.device == "cuda":
        yield _nccl()
        if visible_devices():
            yield _attention()


def _processor() -> Checked:
    slow = slow_formats()
    if not slow:
        return Checked("CPU", "pass", "multiplies fp32, bf16 and fp16")
    what = f"no instructions for {' and '.join(slow)}, which take many times as long as fp32"
    return Checked("CPU", "warn", what, "--precision fp32")


def _nccl() -> Checked:
    if not dist.is_nccl_available():
        return Checked("NCCL", "fail", "is not in this build of PyTorch", "install one of pytorch.org's for CUDA")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Checked("NCCL", "pass", f"{nccl}, CUDA {torch.version.cuda}, driver {driver() or 'unknown'}")


def _attention() -> Checked:
    """Imports FlashAttention-4 if it is installed, as training would."""
    against = flash_attention_4.obstacle(torch.device("cuda", 0))
    if not against:
        return Checked("attention", "pass", f"FlashAttention-4 {flash_attention_4.version()}")
    installed = flash_attention_4.version() is not None
    return Checked("attention", "warn" if installed else "pass", f"PyTorch's, not FlashAttention-4: {against}")


def driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else ""


def check_devices(request: Examination) -> Checked:
    """Checks that every process has a device with free memory."""
    if request.device == "cpu":
        return _host_memory(request.processes)
    count = visible_devices()
    if count < request.processes:
        figure = f"{count} GPUs for {request.processes} processes of this host"
        return Checked("device memory", "fail", figure, "use a strategy of fewer ranks, or --run-device cpu")
    memory = [torch.cuda.mem_get_info(index) for index in range(request.processes)]
    free, total = min(memory)
    name = torch.cuda.get_device_name(0)
    figure = f"{request.processes} × {name}, at least {readable_bytes(free)} free of {readable_bytes(total)}"
    if free < _FREE_SHARE * total:
        return Checked("device memory", "warn", figure, "another process holds some: see nvidia-smi")
    return Checked("device memory", "pass", figure)


def _host_memory(processes: int) -> Checked:
    free = available_bytes()
    if free is None:
        return Checked("device memory", "pass", f"{processes} CPU processes; this system does not say what is free")
    figure = f"{readable_bytes(free)} free for {processes} CPU processes"
    if free < processes * _PROCESS_BYTES:
        return Checked("device memory", "warn", figure, "close other programs, or use fewer processes")
    return Checked("device memory", "pass", figure)


# -- a small all-reduce on the processes of this host ------------------------------------------------

_BYTES, _REPEATS = 4 * 2**20, 5
_MOST_CPU_PROCESSES = 8  # more show nothing new about a machine, and take minutes to start
_TIMEOUTS = Timeouts(start=120, step=30, checkpoint=30)
_RESULT = "result.json"


def check_all_reduce(request: Examination) -> Checked:
    world = request.processes if request.device == "cuda" else min(request.processes, _MOST_CPU_PROCESSES)
    with OwnedFolder("doctor") as folder:
        command = [sys.executable, "-m", __name__, request.device]
        outcome = supervise(command, world, folder, timeouts=_TIMEOUTS, restarts=0, grace_seconds=1)
        if outcome.status != 0 or outcome.stopped:
            return Checked("all-reduce", "fail", str(outcome.failure or "stopped"), "a run would fail the same way")
        result = json.loads((outcome.attempts[0].folder / _RESULT).read_text(encoding="utf-8"))
    return all_reduce_finding(world, request.device, result["right"], result["seconds"])


def all_reduce_finding(world: int, device: str, right: bool, seconds: float) -> Checked:
    figure = f"{readable_bytes(_BYTES)} over {world} {device} processes in {readable_seconds(seconds)}"
    if not right:
        return Checked("all-reduce", "fail", f"{figure}, and the sum is wrong", "look for a broken device or driver")
    return Checked("all-reduce", "pass", f"{figure}; the sum is right")


def main() -> None:
    """One rank of the all-reduce."""
    place, device = WorldPlace.from_environment(), sys.argv[1]
    reporter = Reporter(place)
    try:
        with process_group(place.rank, place.world, str(place.rendezvous), device=device, seconds=_TIMEOUTS.start):
            right, seconds = timed_all_reduce(place.rank, place.world, device, reporter)
            if place.rank == 0 and place.folder is not None:
                (place.folder / _RESULT).write_text(json.dumps({"right": right, "seconds": seconds}), encoding="utf-8")
    except Exception as error:
        reporter.failed(error)
        raise


def timed_all_reduce(rank: int, world: int, device: str, reporter: Reporter | None = None) -> tuple[bool, float]:
    """Whether the sum over all ranks was right every time, and the seconds of the fastest."""
    right, seconds = True, float("inf")
    for step in range(_REPEATS):
        if reporter is not None:
            reporter.phase("step", step)
        values = torch.full((_BYTES // 4,), rank + 1.0, device=device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        right &= bool((values == world * (world + 1) / 2).all())  # waits for the device, too
        seconds = min(seconds, time.perf_counter() - began)
    return right, seconds


if __name__ == "__main__":
    main()
