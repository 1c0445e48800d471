"""Checks that need torch: versions, device memory, a small all-reduce; and what nodes report, to be compared."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.engine.mesh import process_group
from shardwise.interop.fabric import PATHS, DeviceTopology, InfinibandPort, read_nvlinks, read_ports, read_topology
from shardwise.launch.local import supervise
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.targets.agent import installed
from shardwise.measure.doctor.findings import Checked, Examination
from shardwise.measure.verify import available_bytes
from shardwise.models import flash_attention_4
from shardwise.planner.placement import device_order, spread
from shardwise.run.attempt import Reporter, WorldPlace
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import TESTED_TORCH, is_installed, slow_formats
from shardwise.spec.run import Timeouts
from shardwise.spec.units import counted, readable_bytes, readable_seconds

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


# -- what a node reports of itself: versions, GPUs, NVLinks, InfiniBand, file system -----------------


_SMI_SECONDS = 120  # with the driver not loaded it takes its time


@dataclass(frozen=True)
class NodeFacts:
    """What a node reports of itself; None for what is unknown."""

    versions: Mapping[str, str]
    nvlinks: Mapping[int, Sequence[str]] | None  # the states of each GPU's links
    ports: tuple[InfinibandPort, ...]
    topology: DeviceTopology | None = None  # how GPUs and network cards are connected


def node_facts() -> NodeFacts:
    versions = installed(Path.cwd())
    if count := visible_devices():
        versions |= {"the GPUs": f"{count} × {torch.cuda.get_device_name(0)}", "the driver": driver() or "unknown"}
        versions["CUDA"] = str(torch.version.cuda)
    if dist.is_nccl_available() and count:
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    status = nvidia_smi("nvlink", "-s")
    nvlinks = None if status is None else read_nvlinks(status)
    return NodeFacts(versions, nvlinks, tuple(read_ports()), _topology() if count > 1 else None)


def _topology() -> DeviceTopology | None:
    try:
        return read_topology(nvidia_smi("topo", "-m") or "")
    except SpecError:  # a driver that prints something else
        return None


def nvidia_smi(*arguments: str) -> str | None:
    """The output of nvidia-smi; None if it is not installed or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def file_system_of(folder: Path) -> str:
    """Kind and size of a folder's file system, without the device, whose name differs from host to host."""
    path, deepest = folder.resolve(), ("", "unknown")
    with Path("/proc/mounts").open(encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, where, kind, *_ = line.split(" ")
            if path.is_relative_to(where) and len(where) >= len(deepest[0]):
                deepest = where, kind
    blocks = os.statvfs(path)
    return f"{deepest[1]}, {readable_bytes(blocks.f_frsize * blocks.f_blocks)}"


# -- what differs --------------------------------------------------------------------------------------


def odd_ones(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """What most hosts say (in a tie, the first), and the hosts that say something else."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {host: value for host, value in values.items() if value != usual}


def told(what: str, values: Mapping[str, str]) -> str | None:
    """A sentence on the hosts that differ from most; None if none does."""
    usual, odd = odd_ones(values)
    if not odd:
        return None
    others = len(values) - len(odd)
    named = ", ".join(f"{value} on {host}" for host, value in odd.items())
    return f"{what} is {named}; {usual} on {'the other' if others == 1 else f'the {others} others'}"


def gpu_findings(facts: Mapping[str, NodeFacts], tp: int) -> Iterator[Checked]:
    """Checks that tensor-parallel groups are on GPUs near each other, and that every GPU has a network card near it."""
    for host, topology in ((host, node.topology) for host, node in facts.items()):
        if topology is None:
            continue
        count = len(topology.gpus)
        if 1 < tp < count and count % tp == 0:
            yield _gpu_order(host, topology, tp)
        paths = [
            min((PATHS.index(topology.paths[gpu, nic]) for nic in topology.nics), default=0) for gpu in topology.gpus
        ]
        far = [number for number, path in enumerate(paths) if path > min(paths)]
        if far:
            named = ", ".join(f"GPU {number} ({PATHS[paths[number]]})" for number in far)
            figure = f"{host}: no network card is near {named}; others have one at {PATHS[min(paths)]}"
            yield Checked("cards", "warn", figure, "see `nvidia-smi topo -m`")


def _gpu_order(host: str, topology: DeviceTopology, tp: int) -> Checked:
    count = len(topology.gpus)
    distances = [[topology.distance(gpu, other) for other in range(count)] for gpu in range(count)]
    best = device_order(distances, tp)

    def worst(order: Sequence[int]) -> tuple[int, int]:
        return max(spread(distances, order[first : first + tp]) for first in range(0, count, tp))

    as_is = range(count)
    if worst(as_is)[0] <= worst(best)[0]:
        return Checked("GPU order", "pass", f"{host}: groups of tp {tp} are on the nearest GPUs")
    first = next(at for at in range(0, count, tp) if spread(distances, as_is[at : at + tp]) == worst(as_is))
    far = max(combinations(range(first, first + tp), 2), key=lambda pair: distances[pair[0]][pair[1]])
    path = topology.paths[topology.gpus[far[0]], topology.gpus[far[1]]]
    figure = f"{host}: GPUs {far[0]} and {far[1]} of one tp group are joined by {path}"
    return Checked("GPU order", "warn", figure, f"CUDA_VISIBLE_DEVICES={','.join(map(str, best))} joins nearer ones")


def compared(facts: Mapping[str, NodeFacts]) -> Iterator[Checked]:
    """Compares several hosts, and names the odd one where something differs."""
    yield _versions(facts)
    yield _nvlinks(facts)
    yield _infiniband(facts)


def _versions(facts: Mapping[str, NodeFacts]) -> Checked:
    names = dict.fromkeys(name for node in facts.values() for name in node.versions)
    different = [
        words
        for name in names
        if (words := told(name, {host: node.versions.get(name, "missing") for host, node in facts.items()}))
    ]
    if different:
        return Checked("same software", "fail", "; ".join(different), "make it the same on all hosts")
    first = next(iter(facts.values())).versions
    shown = ", ".join(f"{name} {first[name]}" for name in ("Python", "torch", "NCCL", "the driver") if name in first)
    return Checked("same software", "pass", f"{shown} and the code of shardwise are the same on {len(facts)} hosts")


def _nvlinks(facts: Mapping[str, NodeFacts]) -> Checked:
    known = {host: node.nvlinks for host, node in facts.items() if node.nvlinks}
    if not known:
        return Checked("NVLink", "pass", "there is none, or no nvidia-smi to ask")
    lacking = [host for host in facts if host not in known]
    down = [
        f"link {number} of GPU {gpu} on {host}"
        for host, gpus in known.items()
        for gpu, links in gpus.items()
        for number, state in enumerate(links)
        if "inactive" in state
    ]
    counts = {
        host: " + ".join(str(sum("inactive" not in state for state in links)) for links in gpus.values())
        for host, gpus in known.items()
    }
    usual, odd = odd_ones(counts)
    if lacking or odd:
        named = [f"{host} shows none" for host in lacking]
        named += [f"{host} has {count} links up, others {usual}" for host, count in odd.items()]
        named += down[:4]
        return Checked("NVLink", "fail", "; ".join(named), "reset the GPUs, or leave that host out")
    if down:  # everywhere alike: boards without bridges on all links
        return Checked("NVLink", "pass", f"{usual} links up on the GPUs of every host; the same ones are not used")
    return Checked("NVLink", "pass", f"all links up: {usual} on the GPUs of every host")


def _infiniband(facts: Mapping[str, NodeFacts]) -> Checked:
    if not any(node.ports for node in facts.values()):
        return Checked("InfiniBand", "pass", "no host has such cards")
    names = dict.fromkeys(port.name for node in facts.values() for port in node.ports)
    by_host = {host: {port.name: port for port in node.ports} for host, node in facts.items()}
    different, idle = [], 0
    for name in names:
        states = {host: _state(ports.get(name)) for host, ports in by_host.items()}
        words = told(f"port {name}", states)
        up = [port.is_up for ports in by_host.values() if (port := ports.get(name))]
        if words:
            different.append(words)
        elif not any(up):
            idle += 1
    if different:
        return Checked("InfiniBand", "fail", "; ".join(different), "check its cable and `ibstat` there")
    if idle == len(names):
        return Checked("InfiniBand", "warn", f"{counted(idle, 'port')} on every host, all down", "see `ibstat`")
    unused = f"; {idle} down on every host" if idle else ""
    rates = ", ".join(dict.fromkeys(port.rate for node in facts.values() for port in node.ports if port.is_up))
    return Checked("InfiniBand", "pass", f"{counted(len(names) - idle, 'port')} up on every host, {rates}{unused}")


def _state(port: InfinibandPort | None) -> str:
    if port is None:
        return "missing"
    return f"up at {port.rate}" if port.is_up else f"{port.state.lower()} ({port.physical})"


if __name__ == "__main__":
    main()
