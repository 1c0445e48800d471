"""All checks in order, and those without torch: loopback, ports, shared memory, open files, clocks, and the disk."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shardwise.measure.doctor.findings import Checked as Checked
from shardwise.measure.doctor.findings import Examination as Examination
from shardwise.run.environment import PORT, loopback_interface
from shardwise.spec.installation import SHARED_BYTES
from shardwise.spec.units import readable_bytes, readable_rate, readable_seconds

# -- all checks --------------------------------------------------------------------------------------

_Check = Callable[[Examination], Checked | Iterable[Checked]]


def examine(request: Examination, *, beside_others: bool = False) -> Iterator[Checked]:
    """Yields findings as they come, the slowest check last; a check that fails does not stop the rest.

    ``beside_others``: ranks on all hosts run this, and check together what one host cannot.
    """
    host: dict[str, _Check] = {
        "loopback": check_loopback,
        "ports": check_ports,
        "shared memory": check_shared_memory,
        "open files": check_open_files,
        "clock": check_clocks,
        "disk": check_disk,
    }
    if beside_others:
        del host["ports"]
    yield from _run(host, request)
    if importlib.util.find_spec("torch") is None:
        yield Checked("PyTorch", "fail", "is not installed", "pip install 'shardwise[train]'")
        return
    from shardwise.measure.doctor.software import check_all_reduce, check_devices, check_versions

    software = list(_run({"versions": check_versions, "device memory": check_devices}, request))
    yield from software
    if beside_others or any(finding.status == "fail" for finding in software):  # it would fail for the same reason
        return
    yield from _run({"all-reduce": check_all_reduce}, request)


def _run(checks: dict[str, _Check], request: Examination) -> Iterator[Checked]:
    for name, check in checks.items():
        try:
            findings = check(request)
            yield from [findings] if isinstance(findings, Checked) else findings
        except (OSError, RuntimeError) as error:
            yield Checked(name, "fail", " ".join(str(error).split()))


# -- the host ----------------------------------------------------------------------------------------

SHARED_MEMORY = Path("/dev/shm")
_FEW_FILES, _FILES, _FILES_PER_PROCESS = 256, 1024, 64  # a process has a socket for every other rank of every group
_SKEW_SECONDS, _LARGE_SKEW_SECONDS = 1.0, 60.0
_SSH_SECONDS = 10


def check_loopback(request: Examination) -> Checked:
    """Binds a loopback port, connects to it and sends a byte each way, as processes of one machine do."""
    if not loopback_interface():
        return Checked("loopback", "fail", "there is no loopback interface", "bring `lo` up")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        began = time.perf_counter()
        with socket.create_connection(server.getsockname(), timeout=5) as client:
            answering, _ = server.accept()
            with answering:
                client.sendall(b"?")
                answering.sendall(answering.recv(1))
                client.recv(1)
        seconds = time.perf_counter() - began
    return Checked("loopback", "pass", f"bound, connected and answered in {readable_seconds(seconds)}")


def check_ports(request: Examination) -> Checked:
    """Checks what several hosts need: a rendezvous port on the first, and names that resolve."""
    if request.host_count == 1:
        return Checked("ports", "pass", "none is needed: processes of one machine rendezvous in a file")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Checked("ports", "fail", f"this host's name {name} has no address", "add it to DNS or /etc/hosts")
    if address.startswith("127."):
        remedy = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the other hosts"
        return Checked("ports", "warn", f"this host's name {name} is {address}, which others cannot reach", remedy)
    try:
        socket.create_server(("", PORT)).close()
    except OSError as error:
        return Checked("ports", "fail", f"port {PORT}: {error.strerror}", "give torchrun another in --rdzv-endpoint")
    return Checked("ports", "pass", f"{name} is {address}, port {PORT} is free")


def check_shared_memory(request: Examination) -> Checked:
    if not SHARED_MEMORY.is_dir():
        return Checked("shared memory", "pass", f"this system has no {SHARED_MEMORY}, and needs none")
    usage = shutil.disk_usage(SHARED_MEMORY)
    needed = SHARED_BYTES[request.device]
    figure = f"{readable_bytes(usage.free)} free of {readable_bytes(usage.total)}"
    if usage.free < needed:
        remedy = f"{readable_bytes(needed)} are safe: in a container --shm-size=1g"
        return Checked("shared memory", "warn", figure, remedy)
    return Checked("shared memory", "pass", figure)


def check_open_files(request: Examination) -> Checked:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Checked("open files", "pass", "no limit")
    wanted = max(_FILES, _FILES_PER_PROCESS * request.processes)
    figure = f"{soft:,} in a process" + ("" if hard == resource.RLIM_INFINITY else f", at most {hard:,}")
    if soft >= wanted:
        return Checked("open files", "pass", figure)
    return Checked("open files", "fail" if soft < _FEW_FILES else "warn", figure, f"ulimit -n {wanted}")


def check_clocks(request: Examination) -> Iterator[Checked]:
    """Compares this clock with that of the folder's file system and those of other hosts."""
    path = request.folder / f".shardwise-clock-{os.getpid()}"
    before = time.time()
    try:
        path.write_bytes(b".")
        written = path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)
    after = time.time()
    ahead = max(0.0, written - after, before - written)
    # The kernel stamps files with the time of its last tick, up to 10 ms ago.
    yield skew_finding("clock", "the file system's clock", 0.0 if ahead < 0.01 else ahead)
    for host in request.others:
        yield _host_skew(host)


def _host_skew(host: str) -> Checked:
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS}", "--", host, "date", "+%s"]
    before = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3 * _SSH_SECONDS, check=True)
        theirs = float(done.stdout) + 0.5  # whole seconds: half of one is the best guess
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        return Checked(f"clock of {host}", "fail", " ".join(last), f"`ssh {host} date` must answer without a password")
    distance = abs(theirs - (before + time.time()) / 2)
    return skew_finding(f"clock of {host}", "this host's clock", max(0.0, distance - 0.5))


def skew_finding(check: str, other: str, seconds: float) -> Checked:
    figure = f"{readable_seconds(seconds)} from {other}"
    if seconds <= _SKEW_SECONDS:
        return Checked(check, "pass", figure)
    return Checked(check, "fail" if seconds > _LARGE_SKEW_SECONDS else "warn", figure, "synchronise clocks by NTP")


# -- the disk of a run's folder ----------------------------------------------------------------------

MOST_BYTES, _MOST_SECONDS, _PIECE_BYTES = 128 * 2**20, 5.0, 8 * 2**20
_LITTLE_BYTES = 2**30
_SLOW_RATE = 50e6  # bytes/s: what a single hard disk gives
_KEPT = 3  # checkpoints at a time: the last good one, one more, and the one being written


def check_disk(request: Examination) -> Iterator[Checked]:
    """Checks space and speed; the file written for that is bounded in size and time, and removed."""
    usage = shutil.disk_usage(request.folder)
    yield _space(request, usage.free)
    room = min(MOST_BYTES, usage.free // 10)
    if room < _PIECE_BYTES:
        return
    path = request.folder / f".shardwise-disk-{os.getpid()}"
    try:
        size, write_seconds = timed_write(path, room)
        read_seconds = timed_read(path)
    finally:
        path.unlink(missing_ok=True)
    yield _speed(request, size, write_seconds, read_seconds)


def _space(request: Examination, free: int) -> Checked:
    wanted = _KEPT * request.checkpoint_bytes if request.checkpoint_bytes else _LITTLE_BYTES
    figure = f"{readable_bytes(free)} free in {request.folder}"
    if request.checkpoint_bytes:
        figure += f"; a checkpoint takes {readable_bytes(request.checkpoint_bytes)}"
    if free >= wanted:
        return Checked("disk space", "pass", figure)
    remedy = f"{readable_bytes(wanted)} hold {_KEPT} checkpoints" if request.checkpoint_bytes else "use another folder"
    too_little = request.checkpoint_bytes is not None and free < request.checkpoint_bytes
    return Checked("disk space", "fail" if too_little else "warn", figure, remedy)


def _speed(request: Examination, size: int, write_seconds: float, read_seconds: float | None) -> Checked:
    rate = size / write_seconds
    figure = f"{readable_rate(rate)} written and synced"
    if read_seconds is not None:
        figure += f", {readable_rate(size / read_seconds)} read"
    if request.checkpoint_bytes is not None:
        seconds = request.checkpoint_bytes / request.host_count / rate
        figure += f"; this host's part of a checkpoint in {readable_seconds(seconds)}"
        if seconds > request.checkpoint_limit_seconds:
            return Checked(
                "disk speed", "warn", figure, f"timeouts.checkpoint is {request.checkpoint_limit_seconds:g} s"
            )
    if rate < _SLOW_RATE:
        return Checked("disk speed", "warn", figure, "checkpoints would be faster in another folder")
    return Checked("disk speed", "pass", figure)


def timed_write(path: Path, room: int) -> tuple[int, float]:
    """Writes and syncs up to ``room`` bytes, within a time limit; the bytes written, and the seconds taken."""
    piece, size = os.urandom(_PIECE_BYTES), 0  # not zeros: some file systems do not store those
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while size + len(piece) <= room and time.perf_counter() - began < _MOST_SECONDS:
            size += file.write(piece)
            os.fsync(file.fileno())
    return size, time.perf_counter() - began


def timed_read(path: Path) -> float | None:
    """Seconds to read the file; None if the system cannot drop it from the page cache first."""
    if not hasattr(os, "posix_fadvise"):
        return None
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.read(_PIECE_BYTES):
            pass
        return time.perf_counter() - began
