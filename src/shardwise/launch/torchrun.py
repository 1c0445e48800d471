"""torchrun: the commands that start a job on several hosts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shardwise.run.environment import PORT
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

WORKER = "shardwise.training.worker"


def torchrun_commands(
    job: Job,
    job_path: Path | str,
    arguments: Sequence[str] = (),
    *,
    hosts: Sequence[str] = (),
    port: int = PORT,
) -> list[str]:
    """One command per host; the first host serves the rendezvous. ``arguments`` go to the worker after the job file.

    Without ``hosts`` there are placeholders host-0, host-1, ...; a single one is this machine. torchrun numbers hosts
    in the text order of their addresses, which should match how the cluster is wired.
    """
    world = job.strategy.world
    per_host = min(job.cluster.node_devices, world)
    count = world // per_host
    if world % per_host:
        raise SpecError("strategy", f"{world} ranks are not a whole number of hosts of {per_host} devices")
    digits = len(str(count - 1))
    placeholders = ["localhost"] if count == 1 else [f"host-{number:0{digits}d}" for number in range(count)]
    names = list(hosts) or placeholders
    if len(names) != count:
        raise SpecError("hosts", f"names {len(names)}", f"{world} ranks need {count} of {per_host} devices")
    if not 0 < port < 65536:
        raise SpecError("port", f"{port}", "use 1 to 65535")
    run = Path(job_path).stem
    return [
        shlex.join([
            "torchrun", f"--nnodes={count}", f"--nproc-per-node={per_host}", f"--max-restarts={job.run.restarts.most}",
            f"--rdzv-id={run}", "--rdzv-backend=c10d", f"--rdzv-endpoint={names[0]}:{port}", f"--local-addr={name}",
            "--module", WORKER, str(job_path), *arguments,
        ])
        for name in names
    ]  # fmt: skip
