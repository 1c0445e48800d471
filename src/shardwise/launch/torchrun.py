"""torchrun: the commands that start a job on several hosts, and this process as one rank started by it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.training.attempt import integer_variable

PORT = 29400  # torchrun's own default
WORKER = "shardwise.training.worker"
_HOW = "start all ranks by torchrun"


def torchrun_commands(
    job: Job,
    job_path: Path | str,
    arguments: Sequence[str] = (),
    *,
    hosts: Sequence[str] = (),
    port: int = PORT,
    restarts: int = 3,
) -> list[str]:
    """One command per host, the first of which hosts the rendezvous; ``arguments`` go to the worker after the job file.

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
            "torchrun", f"--nnodes={count}", f"--nproc-per-node={per_host}", f"--max-restarts={restarts}",
            f"--rdzv-id={run}", "--rdzv-backend=c10d", f"--rdzv-endpoint={names[0]}:{port}", f"--local-addr={name}",
            "--module", WORKER, str(job_path), *arguments,
        ])
        for name in names
    ]  # fmt: skip


@dataclass(frozen=True)
class Started:
    """This process as one rank of a world started by torchrun (or srun, with the same variables), host by host."""

    rank: int
    world: int
    ranks_per_host: int

    @property
    def hosts(self) -> int:
        return self.world // self.ranks_per_host


def started(environment: Mapping[str, str] = os.environ) -> Started | None:
    """None if there is no such world: neither RANK nor WORLD_SIZE is set."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    rank, world = (integer_variable(environment, name, _HOW) for name in ("RANK", "WORLD_SIZE"))
    here = integer_variable(environment, "LOCAL_WORLD_SIZE", _HOW)
    if not rank < world:
        raise SpecError("RANK", f"{rank} of a world of {world}", _HOW)
    if not here or world % here:
        problem = f"{world} ranks do not fill hosts of {here}"
        raise SpecError("LOCAL_WORLD_SIZE", problem, "start as many ranks on every host")
    if not environment.get("MASTER_ADDR"):
        raise SpecError("MASTER_ADDR", "is not set", _HOW)
    integer_variable(environment, "MASTER_PORT", _HOW)
    return Started(rank, world, here)
