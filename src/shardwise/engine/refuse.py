"""Refuses what does not run before anything starts, by the same table that the planner prunes by."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from shardwise.layout.gradient_schedules import require_gradient_schedules
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.support import not_built, verdict


def require_runs(job: Job, *, own_module: bool = False) -> None:
    """Raises SpecError for the worst finding of the support matrix about this job.

    ``own_module``: the network is the user's, so that the limits of our decoder do not apply.
    """
    aside = not_built(job.model) if own_module else ()
    if own_module and job.strategy.has_unlike_stages:
        problem = "the stages of a network from outside have equal degrees"
        raise SpecError("strategy.stage_tp", problem, "leave stage_tp and stage_dp out")
    for worst in (finding for finding in verdict(job).findings if finding not in aside):
        raise SpecError(worst.field, f"{' with '.join(worst.techniques)}: {worst.reason}", worst.remedy)
    require_gradient_schedules(job)


def require_devices(device: str, ranks: int) -> None:
    """Raises SpecError if this machine has too few devices; on a CPU a rank is a process."""
    import torch  # not needed by callers of `require_runs` alone

    there = torch.cuda.device_count()
    if device == "cuda" and there < ranks:
        raise SpecError("⟨run_device⟩", f"cuda: {there} GPUs for {ranks} ranks", "use ⟨run_device=cpu⟩")


def require_nvtx(job: Job, field: str = "run.nvtx") -> None:
    """Raises SpecError where no tool of a GPU could read NVTX ranges."""
    if job.run_device == "cpu":
        problem = "NVTX ranges are read by the tools of a GPU, and the ranks compute on CPUs"
        raise SpecError(field, problem, "leave it out; `train --profile` records the same ranges on CPUs")


def require_backend(job: Job, *, by_mpi: bool) -> None:
    """Raises SpecError if the ranks cannot communicate as the job asks; ``by_mpi``: mpirun started them."""
    if job.run.backend == "auto":
        return
    import torch.distributed as dist

    if not dist.is_mpi_available():
        remedy = "leave it out (gloo), or build PyTorch with MPI"
        raise SpecError("run.backend", "mpi is not in this build of PyTorch", remedy)
    if job.run_device == "cuda":
        raise SpecError("run.backend", "mpi is for CPU ranks; GPUs communicate by NCCL", "leave it out")
    if not by_mpi:
        raise SpecError("run.backend", "mpi is for ranks that mpirun starts", "mpirun -n N shardwise train ...")


# -- The file that offloading to a disk uses -------------------------------------------------------
# It has no name, so it disappears with the process that has it open.


OFFLOAD_FOLDER = "strategy.offload.folder"


def folder_of(folder: str | None) -> Path:
    return Path(folder or tempfile.gettempdir())


def nameless_file(folder: Path) -> IO[bytes]:
    """Raises SpecError if none can be made."""
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise SpecError(
            OFFLOAD_FOLDER, f"{folder}: {error.strerror or error}", "make it, or name another folder"
        ) from None


def may_offload(job: Job) -> bool:
    """Whether ranks need a store: a share of `auto` may start to be offloaded later."""
    return job.strategy.offload.any or "optimizer" in job.run.automatic


def require_folder(job: Job) -> None:
    """Raises SpecError if a rank could not make its file; call before any process starts."""
    offload = job.strategy.offload
    if may_offload(job) and offload.target == "nvme":
        nameless_file(folder_of(offload.folder)).close()
