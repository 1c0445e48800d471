"""A real Slurm on this machine with two virtual nodes, for root, where its programs are installed (Debian's can)."""

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
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=4000
NodeName={host}z NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    if os.getuid():
        return "a Slurm of its own needs root"
    gone = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"Slurm is not installed ({', '.join(gone)}): slurmctld slurmd slurm-client munge" if gone else None


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which its commands work; the first of its nodes has this host's name, which has an address."""
    require("slurm", missing())
    host, (port, first, second) = socket.gethostname().partition(".")[0], _free_ports(3)
    for name in ("state", f"spool/{host}", f"spool/{host}z"):
        (folder / name).mkdir(parents=True)
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(host=host, folder=folder, port=port, first=first, second=second))
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    own_munged = _start_munge()
    try:
        for command in (["slurmctld", "-c"], ["slurmd", "-N", host], ["slurmd", "-N", f"{host}z"]):
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60)
        _wait_for_nodes(environment)
        yield environment
    finally:
        subprocess.run(["scancel", "-f", "-p", "main", "--state=RUNNING"], env=environment, capture_output=True)
        subprocess.run(["scancel", "-f", "-p", "main"], env=environment, capture_output=True)
        time.sleep(1)
        for name in ("ctld", host, f"{host}z"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)
        if own_munged:
            os.kill(own_munged, signal.SIGTERM)


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


def _wait_for_nodes(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(["sinfo", "-N", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if done.stdout.split() == ["idle", "idle"]:
            return
        assert time.monotonic() < deadline, done
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
