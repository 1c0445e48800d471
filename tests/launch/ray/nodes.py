"""A real Ray cluster on this machine, each node in its own network namespace; for root, where Ray is installed.

Ray listens on all interfaces: outside of namespaces it would be open to the network.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launch.targets.ssh_hosts import namespaces_missing
from required import require

PORT = 6399


def missing() -> str | None:
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed (pip install 'shardwise[ray]')"
    return namespaces_missing()


class RayNodes:
    """Nodes that are added and lost; the first is the head."""

    def __init__(self, folder: Path) -> None:
        own = os.getpid()
        self.folder, self._net, self._bridge = folder, f"10.{128 + own % 64}.{own // 64 % 256}", f"{folder.name}b"
        self.limits: dict[str, str] = {}  # Ray's variables for a cluster that a command starts itself
        self._names: list[str] = []
        self._starts: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1",
            "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "200",
            "RAY_raylet_start_wait_time_s": "100",  # on a machine that has other things to do
        }  # fmt: skip
        self.address = f"{self._net}.1:{PORT}"

    def add(self, processors: int) -> int:
        """A node; returns its number once it has joined."""
        number = len(self._names)
        name, link, address = f"{self.folder.name}n{number}", f"{self.folder.name}v{number}", self.address_of(number)
        if number == 0:
            _ip(f"link add {self._bridge} type bridge", f"link set {self._bridge} up")
        _ip(
            f"netns add {name}", f"link add {link} type veth peer name eth0 netns {name}",
            f"link set {link} master {self._bridge} up", f"-n {name} addr add {address}/24 dev eth0",
            f"-n {name} link set eth0 up", f"-n {name} link set lo up",
        )  # fmt: skip
        self._names.append(name)
        as_head = ["--head", "--port", str(PORT), "--temp-dir", str(self.folder), "--include-dashboard", "false"]
        where = ["--address", self.address] if number else as_head
        start = [
            sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", *where,
            "--node-ip-address", address, "--num-cpus", str(processors), "--object-store-memory", str(100 << 20),
            "--disable-usage-stats", "--block",
        ]  # fmt: skip
        with (self.folder / f"node-{number}.log").open("wb") as log:
            command = self._inside(number, start)
            self._starts.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        self._wait(number)
        return number

    def lose(self, number: int) -> None:
        """Its raylet is killed, and with it all that Ray has started there; at the head, what knows the cluster too."""
        for pid in self._pids(number):
            if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].endswith(("raylet/raylet", "gcs/gcs_server")):
                os.kill(pid, signal.SIGKILL)

    def address_of(self, number: int) -> str:
        return f"{self._net}.{number + 1}"

    def shardwise(self, *arguments: str, log: Path, home: Path | None = None, at: int = 0) -> subprocess.Popen[str]:
        """The command, at a node, on this cluster, or alone at ``home``; what it prints is in the log and .out."""
        command = [sys.executable, "-m", "shardwise", *arguments]
        environment = {**self.environment, "RAY_ADDRESS": self.address}
        if home is not None:
            own = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
            environment = {**own, **self.limits, "HOME": str(home)}
        with log.open("w") as said, log.with_suffix(".out").open("w") as out:
            return subprocess.Popen(self._inside(at, command), env=environment, stdout=out, stderr=said, text=True)

    def ask(self, program: str) -> str:
        """What a Python program prints that has joined as a driver."""
        start = f"import ray\nray.init(address={self.address!r}, logging_level='ERROR', log_to_driver=False)\n"
        command = self._inside(0, [sys.executable, "-c", start + program])
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout

    def close(self) -> None:
        for number in range(len(self._names)):
            for pid in self._pids(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for start in self._starts:
            start.kill()
            start.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def _inside(self, number: int, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self._names[number], *command]

    def _pids(self, number: int) -> list[int]:
        """Only those in a namespace that this object made."""
        found = subprocess.run(["ip", "netns", "pids", self._names[number]], capture_output=True, text=True)
        return [int(one) for one in found.stdout.split()]

    def _wait(self, number: int) -> None:
        log, deadline = self.folder / f"node-{number}.log", time.monotonic() + 120
        while "Ray runtime started." not in log.read_text(errors="replace"):
            assert time.monotonic() < deadline and self._starts[-1].poll() is None, log.read_text(errors="replace")
            time.sleep(0.1)


@contextlib.contextmanager
def ray_nodes(*processors: int) -> Iterator[RayNodes]:
    """A cluster of nodes with so many processors."""
    require("ray", missing())
    # Sockets and links have short names; a new one, since processes of the last cluster may still be ending.
    folder = Path(tempfile.mkdtemp(prefix="rw", dir="/tmp"))
    nodes = RayNodes(folder)
    try:
        for count in processors:
            nodes.add(count)
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
