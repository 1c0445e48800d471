"""A real Slurm on this machine with virtual nodes, for root, where its programs are installed (Debian's can)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from required import require

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "munge")
CONFIGURATION = """ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=30
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"


def missing() -> str | None:
    if os.getuid():
        return "a Slurm of its own needs root"
    gone = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"Slurm is not installed ({', '.join(gone)}): slurmctld slurmd slurm-client munge" if gone else None


@contextlib.contextmanager
def slurm_cluster(folder: Path, count: int = 2) -> Iterator[dict[str, str]]:
    """The environment in which its commands work; the first of its nodes has this host's name, which has an address."""
    require("slurm", missing())
    host, (port, *ports) = socket.gethostname().partition(".")[0], _free_ports(1 + count)
    names = node_names(count)
    for name in ("state", *(f"spool/{name}" for name in names)):
        (folder / name).mkdir(parents=True)
    configuration = folder / "slurm.conf"
    nodes = "\n".join(NODE.format(name=name, host=host, port=own) for name, own in zip(names, ports))
    configuration.write_text(CONFIGURATION.format(host=host, folder=folder, port=port, nodes=nodes))
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    own_munged = _start_munge()
    try:
        for command in (["slurmctld", "-c"], *(["slurmd", "-N", name] for name in names)):
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60)
        _wait_for_nodes(environment, count)
        yield environment
    finally:
        subprocess.run(["scancel", "-f", "-p", "main", "--state=RUNNING"], env=environment, capture_output=True)
        subprocess.run(["scancel", "-f", "-p", "main"], env=environment, capture_output=True)
        time.sleep(1)
        for name in ("ctld", *names):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)
        if own_munged:
            os.kill(own_munged, signal.SIGTERM)


def node_names(count: int) -> list[str]:
    """In Slurm's order."""
    host = socket.gethostname().partition(".")[0]
    return [f"{host}{'z' * number}" for number in range(count)]


def _start_munge() -> int | None:
    """The process of munged, if none was running."""
    if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
        return None
    run = Path("/run/munge")
    run.mkdir(exist_ok=True)
    shutil.chown(run, "munge", "munge")
    run.chmod(0o755)
    as_munge = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups"]
    subprocess.run([*as_munge, "munged"], check=True, capture_output=True)
    deadline = time.monotonic() + 20
    while subprocess.run(["munge", "-n"], capture_output=True).returncode:
        assert time.monotonic() < deadline, "munged does not answer"
        time.sleep(0.1)
    return int((run / "munged.pid").read_text())


def _wait_for_nodes(environment: dict[str, str], count: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(["sinfo", "-N", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if done.stdout.split() == ["idle"] * count:
            return
        assert time.monotonic() < deadline, done
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
