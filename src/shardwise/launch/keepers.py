"""The keepers of a run: one process for each node; a lost one is replaced by an empty one."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from shardwise.launch import keeper
from shardwise.launch.emulate import namespace
from shardwise.launch.emulate.network import Network
from shardwise.spec.errors import SpecError

_POLL_SECONDS = 0.1
_START_SECONDS = 20.0
_LOOPBACK = "127.0.0.1"


class Keepers:
    """``file`` says where they are, and the secret that a rank has to know; it is only readable by its owner."""

    nodes = 1  # without a network

    def __init__(self, file: Path, network: Network | None) -> None:
        self.file, self._network = file, network
        self._secret = secrets.token_hex(16)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._ports: list[int] = []
        self._used: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        try:
            for node in range(self.nodes if network is None else network.emulation.nodes):
                self.processes.append(self._started(node))
                self._ports.append(_port_of(self.processes[node]))
            self.use(range(len(self.processes)))
        except BaseException:
            self.close()
            raise
        self._watch = threading.Thread(target=self._replace_lost, name="keepers", daemon=True)
        self._watch.start()

    def _host(self, node: int) -> str:
        return _LOOPBACK if self._network is None else namespace.address(node)

    def _started(self, node: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", keeper.__file__, self._host(node)]
        if self._network is not None:
            command = self._network.command(node, command)
        return subprocess.Popen(
            command, env={**os.environ, keeper._SECRET: self._secret},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def use(self, nodes: Sequence[int]) -> None:
        """The nodes that ranks are on now, in the order of the ranks; what others keep is lost."""
        with self._lock:
            self._used = tuple(nodes)
            for node in set(range(len(self.processes))) - set(nodes):
                self.processes[node].kill()  # an empty one replaces it
            self._write()

    def _write(self) -> None:
        """In one piece: ranks may read it at any time."""
        part = self.file.with_suffix(".part")
        part.unlink(missing_ok=True)
        addresses = [f"{self._host(node)}:{self._ports[node]}" for node in self._used]
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            json.dump({"secret": self._secret, "keepers": addresses}, file)
        part.replace(self.file)

    def _replace_lost(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            for node, process in enumerate(self.processes):
                if process.poll() is not None and not self._closed.is_set():
                    with self._lock:
                        self.processes[node] = self._started(node)
                        self._ports[node] = _port_of(self.processes[node])
                        self._write()

    def close(self) -> None:
        self._closed.set()
        if self._ports and hasattr(self, "_watch"):
            self._watch.join()
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self.file.unlink(missing_ok=True)


@contextmanager
def keepers(file: Path, network: Network | None) -> Iterator[Keepers]:
    """A keeper on every virtual node of the network; without one, on this machine."""
    found = Keepers(file, network)
    try:
        yield found
    finally:
        found.close()


def _port_of(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    ready = wait([process.stdout], _START_SECONDS)  # type: ignore[list-item]
    line = process.stdout.readline() if ready else b""
    if not line.strip().isdigit():
        raise SpecError("run.checkpoints.memory", "a process that keeps copies in memory did not start", "try again")
    return int(line)
