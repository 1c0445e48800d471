"""A table of the variables by which each launcher tells a process its place; what a launcher omits is derived.

Sources: torch's elastic/agent/server/local_elastic_agent.py and distributed/run.py; srun(1), "OUTPUT ENVIRONMENT
VARIABLES"; the environments of processes that Open MPI and Hydra started; Kubeflow Trainer's torch plugin; SkyPilot's
documentation of distributed jobs. Ray has no rank of its own: Ray Train sets torchrun's variables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.interop.fabric.node_list import nodes_of, tasks_of_nodes
from shardwise.spec.errors import SpecError, shown


@dataclass(frozen=True)
class Variable:
    """One of ``names``, the first that is set; ``read`` turns its text into a value."""

    names: tuple[str, ...]
    read: Callable[[str, str], int | str | None]


@dataclass(frozen=True)
class LauncherRow:
    """The variables of a launcher that starts ranks (``rank``), or one process per node (``node``)."""

    name: str
    rank: Variable | None = None
    world: Variable | None = None
    local_rank: Variable | None = None
    local_world: Variable | None = None
    node: Variable | None = None
    nodes: Variable | None = None
    address: Variable | None = None
    port: Variable | None = None
    job: tuple[str, ...] = ()
    """Variables that tell two jobs on one host apart."""
    single: bool = False
    """It also starts ordinary commands (`srun --pty bash`, `mpirun -n 1`): a world of one does not count as a world."""
    is_mpi: bool = False
    set_variable: str = "export {name}=..."
    """How a user sets a variable on all ranks."""


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise SpecError(name, f"{shown(text)} is not a number", "its launcher sets it: leave it alone")
    return int(text)


def _number_if_any(name: str, text: str) -> int | None:
    """None for values such as `auto`, `gpu` or a range of nodes, which torchrun's options may have."""
    return int(text) if text.isdecimal() and int(text) else None


def _text(name: str, text: str) -> str | None:
    return text.strip() or None


def _first_line(name: str, text: str) -> str | None:
    return next(iter(text.split()), None)


def _first_node(name: str, text: str) -> str:
    return nodes_of(text, name)[0]


def _host_of_endpoint(name: str, text: str) -> str | None:
    return text.rpartition(":")[0] or text or None


def _equal_tasks(name: str, text: str) -> int:
    """Tasks of a node; raises SpecError if nodes differ."""
    counts = tasks_of_nodes(text, name)
    if len(set(counts)) > 1:
        raise SpecError(name, f"{shown(text)}: nodes have different numbers of tasks", "use --ntasks-per-node")
    return counts[0]


def _count(*names: str) -> Variable:
    return Variable(names, _number)


TORCHRUN = LauncherRow(
    "torchrun",
    rank=_count("RANK"), world=_count("WORLD_SIZE"),
    local_rank=_count("LOCAL_RANK"), local_world=_count("LOCAL_WORLD_SIZE"),
    nodes=_count("GROUP_WORLD_SIZE"),
    address=Variable(("MASTER_ADDR",), _text), port=_count("MASTER_PORT"),
    job=("TORCHELASTIC_RUN_ID",),
)  # fmt: skip
OPEN_MPI = LauncherRow(
    "Open MPI",
    rank=_count("OMPI_COMM_WORLD_RANK"), world=_count("OMPI_COMM_WORLD_SIZE"),
    local_rank=_count("OMPI_COMM_WORLD_LOCAL_RANK"), local_world=_count("OMPI_COMM_WORLD_LOCAL_SIZE"),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    single=True, is_mpi=True, set_variable="mpirun -x {name}=...",
)  # fmt: skip
PMI = LauncherRow(
    "PMI (MPICH, Intel MPI, Cray)",
    rank=_count("PMI_RANK"), world=_count("PMI_SIZE"),
    local_rank=_count("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), local_world=_count("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job=("PMI_JOBID",),
    single=True, is_mpi=True, set_variable="mpiexec -genv {name} ...",
)  # fmt: skip
PMIX = LauncherRow("PMIx", rank=_count("PMIX_RANK"), job=("PMIX_NAMESPACE",))
SLURM = LauncherRow(
    "Slurm",
    rank=_count("SLURM_PROCID"), world=_count("SLURM_STEP_NUM_TASKS"),
    local_rank=_count("SLURM_LOCALID"), local_world=Variable(("SLURM_STEP_TASKS_PER_NODE",), _equal_tasks),
    address=Variable(("SLURM_STEP_NODELIST",), _first_node),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    single=True,
)  # fmt: skip
KUBEFLOW = LauncherRow(
    "Kubeflow",
    node=_count("PET_NODE_RANK"), nodes=Variable(("PET_NNODES",), _number_if_any),
    local_world=Variable(("PET_NPROC_PER_NODE",), _number_if_any),
    address=Variable(("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"), _host_of_endpoint), port=_count("PET_MASTER_PORT"),
    job=("PET_RDZV_ID",),
)  # fmt: skip
SKYPILOT = LauncherRow(
    "SkyPilot",
    node=_count("SKYPILOT_NODE_RANK"), nodes=_count("SKYPILOT_NUM_NODES"),
    local_world=Variable(("SKYPILOT_NUM_GPUS_PER_NODE",), _number_if_any),
    address=Variable(("SKYPILOT_NODE_IPS",), _first_line),
    job=("SKYPILOT_TASK_ID",),
)  # fmt: skip

RANK_LAUNCHERS = (TORCHRUN, OPEN_MPI, PMI, SLURM, PMIX)  # the innermost first, where they are nested
NODE_LAUNCHERS = (KUBEFLOW, SKYPILOT)
