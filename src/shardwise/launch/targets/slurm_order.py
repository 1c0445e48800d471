"""Orders the nodes of a Slurm job for its ranks; the script asks before each start, when Slurm has chosen the nodes.

`python -m shardwise.launch.targets.slurm_order RUN FILE` prints nothing if the ranks follow Slurm's own order. If not,
it writes the node of every task to FILE, which `srun --distribution=arbitrary` reads from SLURM_HOSTFILE (srun(1)), and
prints the address of the first: rank 0 need not be on the first node of Slurm's list.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.interop.fabric import Switches, nodes_of, of_hosts, read_slurm
from shardwise.launch.job_file import on_nodes, write_job
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job
from shardwise.spec.wiring import Wiring

_NODES = "SLURM_JOB_NODELIST"


def in_order(
    job: Job, hosts: Sequence[str], switches: Callable[[], Switches]
) -> tuple[Job, tuple[str, ...], list[str]]:
    """The job, the hosts in the order of its ranks, and notes.

    The job's wiring decides if it knows all hosts; otherwise the ``switches`` above them, if Slurm knows these.
    """
    wiring, notes = job.cluster.wiring, list[str]()
    unknown = [] if wiring is None else [host for host in hosts if host not in wiring.hosts]
    if unknown:
        notes.append(f"cluster.wiring is not used: it does not know {unknown[0]}")
    if wiring is None or unknown:
        above = of_hosts(switches(), hosts)
        if len(above) < len(hosts):
            return job, tuple(hosts), notes
        wiring = Wiring(hosts=tuple(hosts), switches=above, source="scontrol show topology")
    placed, said = on_nodes(_wired(job, wiring), hosts, started=False)
    order = tuple(hosts) if placed.cluster.wiring is None else placed.cluster.wiring.hosts
    # A requeued job may get other nodes, so hosts that are not used now stay in the wiring.
    rest = tuple(host for host in wiring.hosts if host not in order)
    return _wired(job, replace(wiring, hosts=(*order, *rest))), order, notes + said


def _wired(job: Job, wiring: Wiring) -> Job:
    return replace(job, cluster=replace(job.cluster, wiring=wiring))


def _switches() -> Switches:
    """The switches that Slurm's controller knows; none if the site has not described any."""
    try:
        done = subprocess.run(["scontrol", "show", "topology"], capture_output=True, text=True, timeout=60)
        return read_slurm(done.stdout, "scontrol show topology")
    except (OSError, subprocess.TimeoutExpired, SpecError):
        return {}


def _address(host: str) -> str:
    """The node's name, or its address if only Slurm can resolve the name."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        done = subprocess.run(["scontrol", "show", "node", "--oneliner", host], capture_output=True, text=True)
        facts = dict(part.partition("=")[::2] for part in done.stdout.split() if "=" in part)
        return facts.get("NodeAddr", host)


def main(run: str, file: str) -> None:
    folder = RunFolder(Path(run))
    job = Job.from_dict(read_yaml(folder.job, "job file"))
    given = tuple(nodes_of(os.environ.get(_NODES, ""), _NODES))
    ordered, order, notes = in_order(job, given, _switches)
    for note in notes:
        print(f"shardwise: {note}", file=sys.stderr)
    if ordered != job:
        write_job(ordered, folder)  # what is predicted is for this order
    if order == given:
        return
    each = job.strategy.world // len(order)
    Path(file).write_text("".join(f"{host}\n" * each for host in order), encoding="utf-8")
    print(_address(order[0]))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except SpecError as error:
        print(f"shardwise: error: {error}", file=sys.stderr)
        sys.exit(error.status)
