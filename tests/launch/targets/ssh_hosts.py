"""Two hosts on this machine: network namespaces, each with a real sshd; for root, where the programs are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from required import require

PORT = 22022
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass(frozen=True)
class SshHosts:
    """``addresses`` of the hosts, the file that names them, and the value of SHARDWISE_SSH that reaches them."""

    addresses: tuple[str, ...]
    file: Path
    ssh: str
    bridge: str
    interfaces: tuple[str, ...]
    namespaces: tuple[str, ...]

    def cut(self, host: int) -> None:
        """As if its cable were pulled."""
        subprocess.run(["ip", "link", "set", self.interfaces[host], "down"], check=True)

    def mend(self, host: int) -> None:
        subprocess.run(["ip", "link", "set", self.interfaces[host], "up"], check=True)

    def lose(self, host: int) -> None:
        """All that was started there ends at once; its sshd, a child of this process, stays."""
        for pid in _inside(self.namespaces[host]):
            with contextlib.suppress(OSError):
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) != os.getpid():
                    os.kill(pid, signal.SIGKILL)

    def commands(self) -> list[str]:
        """Of all that runs there."""
        found = []
        for pid in (pid for name in self.namespaces for pid in _inside(name)):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        return found


def _inside(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(one) for one in found.stdout.split()]


def missing() -> str | None:
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not Path(SSHD).exists():
        return "sshd is not installed (openssh-server)"
    return namespaces_missing()


def namespaces_missing() -> str | None:
    """Why this process cannot make network namespaces, if so."""
    if os.getuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip is not installed"
    done = subprocess.run(["ip", "netns", "add", f"probe{os.getpid()}"], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"probe{os.getpid()}"], check=True)
    return None


@contextlib.contextmanager
def ssh_hosts(folder: Path, count: int = 2) -> Iterator[SshHosts]:
    require("sshd", missing())
    own = os.getpid()
    net, bridge = f"10.{64 + own % 64}.{own // 64 % 256}", f"swb{own}"
    names = [f"sw{own}h{number}" for number in range(count)]
    interfaces = [f"sw{own}v{number}" for number in range(count)]
    addresses = [f"{net}.{number + 1}" for number in range(count)]
    config = _keys(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _ip(f"link add {bridge} type bridge", f"addr add {net}.254/24 dev {bridge}", f"link set {bridge} up")
        for name, interface, address in zip(names, interfaces, addresses):
            _ip(
                f"netns add {name}", f"link add {interface} type veth peer name eth0 netns {name}",
                f"link set {interface} master {bridge} up", f"-n {name} addr add {address}/24 dev eth0",
                f"-n {name} link set eth0 up", f"-n {name} link set lo up",
            )  # fmt: skip
            command = ["ip", "netns", "exec", name, SSHD, "-f", str(folder / "sshd.conf"), "-D", "-e"]
            with (folder / f"{name}.log").open("wb") as log:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
        for address in addresses:
            _wait_for(address)
        file = folder / "hosts.txt"
        file.write_text("# two namespaces\n" + "".join(f"{address} slots=1\n" for address in addresses))
        yield SshHosts(tuple(addresses), file, f"ssh -F {config}", bridge, tuple(interfaces), tuple(names))
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        for name in names:
            for session in _inside(name):  # of sshd, whose other end is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(session, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _keys(folder: Path) -> Path:
    for key in ("client", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start without it
    (folder / "sshd.conf").write_text(
        f"Port {PORT}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/client.pub\nStrictModes no\nPidFile none\n"
        "ClientAliveInterval 2\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    config = folder / "ssh.conf"
    config.write_text(
        f"Host *\n  Port {PORT}\n  IdentityFile {folder}/client\n  IdentitiesOnly yes\n  LogLevel ERROR\n"
        f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n"
    )
    return config


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection((address, PORT), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"sshd at {address} does not answer"
            time.sleep(0.05)
