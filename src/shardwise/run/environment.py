"""Which launcher started this process, as which rank, and what its host is called."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.interop.fabric import nodes_of, tasks_of_nodes
from shardwise.layout.groups import local_rank
from shardwise.spec.errors import SpecError, shown

# -- this host: its name, as its launcher knows it, and its network interfaces -----------------------

HOST = "SHARDWISE_HOST"  # set by our launchers: the name in a host file, or the address of a Ray node
_NAMES = (HOST, "SLURMD_NODENAME")


def host_name() -> str:
    """The name by which the launcher addresses this host, or the host's own."""
    return next((os.environ[name] for name in _NAMES if os.environ.get(name)), socket.gethostname())


# -- interfaces --------------------------------------------------------------------------------------

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def loopback_interface() -> str:
    """The name of the loopback interface; "" if there is none."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "")


def address_towards(address: str) -> str:
    """This host's own address, as seen from ``address``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:  # sends nothing
        asked.connect((address, 9))
        return str(asked.getsockname()[0])


def interface_towards(address: str) -> str:
    """The name of the interface that leads to ``address``; "" if unknown."""
    try:
        return interface_of(address_towards(address))
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The name of the interface with this IPv4 address; "" if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none, or this is not Linux
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return loopback_interface() if address.startswith("127.") else ""


# -- the variables by which each launcher tells a process its place; what it omits is derived --------
# Sources: torch's elastic/agent/server/local_elastic_agent.py and distributed/run.py; srun(1), "OUTPUT ENVIRONMENT
# VARIABLES"; the environments of processes that Open MPI and Hydra started; Kubeflow Trainer's torch plugin; SkyPilot's
# documentation of distributed jobs. Ray has no rank of its own: Ray Train sets torchrun's variables.


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
    job: tuple[str, ...] = ()  # variables that tell two jobs on one host apart
    single: bool = False
    """It also starts ordinary commands (`srun --pty bash`, `mpirun -n 1`): a world of one does not count as a world."""
    is_mpi: bool = False
    set_variable: str = "export {name}=..."  # how a user sets a variable on all ranks


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise SpecError(name, f"{shown(text)} is not a number", "its launcher sets it: leave it alone")
    return int(text)


def _number_if_any(name: str, text: str) -> int | None:
    """None for values such as `auto`, `gpu` or a range of nodes, which torchrun's options may have."""
    return int(text) if text.isdecimal() and int(text) else None


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
    address=Variable(("MASTER_ADDR",), lambda name, text: text.strip() or None), port=_count("MASTER_PORT"),
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
    address=Variable(("SLURM_STEP_NODELIST",), lambda name, text: nodes_of(text, name)[0]),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    single=True,
)  # fmt: skip
KUBEFLOW = LauncherRow(
    "Kubeflow",
    node=_count("PET_NODE_RANK"), nodes=Variable(("PET_NNODES",), _number_if_any),
    local_world=Variable(("PET_NPROC_PER_NODE",), _number_if_any),
    address=Variable(("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"),
                     lambda name, text: text.rpartition(":")[0] or text or None),
    port=_count("PET_MASTER_PORT"),
    job=("PET_RDZV_ID",),
)  # fmt: skip
SKYPILOT = LauncherRow(
    "SkyPilot",
    node=_count("SKYPILOT_NODE_RANK"), nodes=_count("SKYPILOT_NUM_NODES"),
    local_world=Variable(("SKYPILOT_NUM_GPUS_PER_NODE",), _number_if_any),
    address=Variable(("SKYPILOT_NODE_IPS",), lambda name, text: next(iter(text.split()), None)),
    job=("SKYPILOT_TASK_ID",),
)  # fmt: skip

RANK_LAUNCHERS = (TORCHRUN, OPEN_MPI, PMI, SLURM, PMIX)  # the innermost first, where they are nested
NODE_LAUNCHERS = (KUBEFLOW, SKYPILOT)


# -- this process ------------------------------------------------------------------------------------
# Every launcher whose variables are set makes a claim. The innermost decides; the others must agree with it, or have
# started one agent per node, as Slurm does for torchrun and mpirun.

PORT = 29400  # torchrun's own default
OWN_LAUNCHER = "SHARDWISE_LAUNCHER"
HOW = "start all ranks by torchrun, srun or mpirun"
_PORTS = range(20_000, 30_000)  # below the range from which systems pick ports for outgoing connections
# Slurm's own steps: 0xfffffffa is interactive (`salloc`), ...b the batch script, ...c extern.
_SPECIAL_STEPS = 0xFFFFFFF0
_PLACES = ("rank", "world", "local_rank", "local_world")
_ALLOCATED_TASKS, _ALLOCATED_NODES, _ALLOCATED_LIST = "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"


@dataclass(frozen=True)
class Started:
    """This process as one rank of a world whose ranks are numbered host by host."""

    rank: int
    world: int
    ranks_per_host: int
    address: str | None = None  # where the ranks meet; None for ranks of our own launcher, which meet in a file
    port: int | None = None
    launcher: str = field(default=TORCHRUN.name, compare=False)
    is_mpi: bool = field(default=False, compare=False)

    @property
    def hosts(self) -> int:
        return self.world // self.ranks_per_host

    @property
    def local_rank(self) -> int:
        return local_rank(self.rank, self.ranks_per_host)


@dataclass(frozen=True)
class StartedNode:
    """This process as the only one of its node, whose ranks it starts."""

    node: int
    nodes: int
    ranks_here: int | None  # None if nothing says how many
    address: str
    port: int
    launcher: str = field(default="", compare=False)


@dataclass(frozen=True)
class _Claim:
    """What a launcher's variables say."""

    row: LauncherRow
    values: Mapping[str, Any]
    named: Mapping[str, str]  # the variable that each value comes from

    def differs_from(self, other: _Claim) -> str | None:
        """The first thing on which the two contradict each other."""
        both = [what for what in _PLACES if what in self.values and what in other.values]
        return next((what for what in both if self.values[what] != other.values[what]), None)

    def said(self, what: str) -> str:
        return f"{self.row.name} says {self.values[what]} ({self.named[what]})"


def started(environment: Mapping[str, str] = os.environ, *, always: bool = False) -> Started | None:
    """None if nobody started this process as a rank.

    With ``always`` a world of one rank counts too, and a rank of our own launcher: its worker asks so, while a command
    that somebody types there is no rank.
    """
    own = OWN_LAUNCHER in environment  # the innermost of all: others do not know its ranks
    if own and not always:
        return None
    rows = (TORCHRUN,) if own else RANK_LAUNCHERS
    claims = [_claim(row, environment) for row in rows if _has_rank(row, environment)]
    alone = [claim for claim in claims if claim.row.single and claim.values.get("world") == 1 and not always]
    claims = [claim for claim in claims if claim not in alone]
    if claims == [claim for claim in claims if claim.row is PMIX and claim.values["rank"] == 0] and not _completing(
        environment
    ):
        return None  # no claim, or PMIx alone, which does not say that there are other ranks
    if not own and "RANK" not in environment:
        claims += _completing(environment)
    inner, *others = claims
    agreeing = [inner, *_agreeing(inner, others, alone)]
    if inner.row.is_mpi:
        _compare_with_allocation(inner, environment)
    place = _place(inner, agreeing, environment, own=own)
    _compare_with_nodes(place, inner, environment)
    return place


def started_node(environment: Mapping[str, str] = os.environ) -> StartedNode | None:
    """None if this process is a rank, or its node the only one."""
    if OWN_LAUNCHER in environment or started(environment) is not None:
        return None
    for row in NODE_LAUNCHERS:
        said = _claim(row, environment)
        if said.values.get("node") is None or said.values.get("nodes", 1) < 2:
            continue
        node, nodes = said.values["node"], said.values["nodes"]
        if node >= nodes:
            raise SpecError(said.named["node"], f"{node} of {nodes} nodes", f"{row.name} counts them from 0")
        address = environment.get("MASTER_ADDR") or said.values.get("address")
        if not address:
            raise SpecError("MASTER_ADDR", f"is not set, and {row.name} does not say it", "give the first node's")
        return StartedNode(
            node, nodes, said.values.get("local_world"), address, _port([said], environment), row.name
        )  # fmt: skip
    return None


# -- claims ------------------------------------------------------------------------------------------------


def _claim(row: LauncherRow, environment: Mapping[str, str]) -> _Claim:
    values, named = {}, {}
    for what in (*_PLACES, "node", "nodes", "address", "port"):
        variable: Variable | None = getattr(row, what)
        name = next((candidate for candidate in variable.names if candidate in environment), None) if variable else None
        if variable is not None and name is not None and (value := variable.read(name, environment[name])) is not None:
            values[what], named[what] = value, name
    return _Claim(row, values, named)


def _completing(environment: Mapping[str, str]) -> list[_Claim]:
    """A claim by torchrun's variables, which users set to complete what another launcher says."""
    return [_claim(TORCHRUN, environment)] if "WORLD_SIZE" in environment else []


def _has_rank(row: LauncherRow, environment: Mapping[str, str]) -> bool:
    """Whether a launcher set a rank; batch scripts and shells of an allocation have a SLURM_PROCID without a step."""
    assert row.rank is not None
    if row is SLURM:
        step = environment.get("SLURM_STEP_ID", "")
        if not step.isdecimal() or int(step) >= _SPECIAL_STEPS or "SLURM_STEP_NUM_TASKS" not in environment:
            return False
    return any(name in environment for name in row.rank.names)


def _agreeing(inner: _Claim, others: Sequence[_Claim], agents: Sequence[_Claim]) -> list[_Claim]:
    """The claims that agree with the innermost; raises SpecError for one that contradicts it.

    ``agents`` are claims of launchers that only started the launcher of the ranks.
    """
    same: list[_Claim] = []
    for other in others:
        differs = inner.differs_from(other)
        if differs is None:
            same.append(other)
        elif _started_agents(inner, other) or any(agent.differs_from(other) is None for agent in agents):
            agents = [*agents, other]
        else:
            raise SpecError(differs, f"{inner.said(differs)}, {other.said(differs)}", "start it by one of them")
    return same


def _started_agents(inner: _Claim, outer: _Claim) -> bool:
    """Whether the outer launcher started one agent per node, which started the ranks; mpirun may be one of them."""
    world, per_host = inner.values.get("world"), inner.values.get("local_world")
    if not world or not per_host or outer.values.get("local_world", 0) != 1:
        return False
    hosts = inner.values.get("nodes", world // per_host)
    return outer.values.get("world") in (hosts, hosts - 1)


def _compare_with_allocation(inner: _Claim, environment: Mapping[str, str]) -> None:
    """Raises SpecError if mpirun's world differs from Slurm's allocation, from which it takes its slots.

    An allocation of one task per node only reserves nodes. Inside a step the variable counts the step's tasks.
    """
    tasks, nodes = (environment.get(name, "") for name in (_ALLOCATED_TASKS, _ALLOCATED_NODES))
    if "SLURM_STEP_ID" in environment or not tasks.isdecimal() or tasks == (nodes or "1"):
        return
    if int(tasks) != inner.values["world"]:
        problem = f"{inner.said('world')}, the allocation {tasks} ({_ALLOCATED_TASKS})"
        raise SpecError("world", problem, f"start {tasks} ranks, or unset {_ALLOCATED_TASKS}")


def _compare_with_nodes(place: Started, inner: _Claim, environment: Mapping[str, str]) -> None:
    for row in NODE_LAUNCHERS:
        said = _claim(row, environment)
        nodes = said.values.get("nodes", 1)
        if said.values.get("node") is not None and nodes > 1 and nodes != place.hosts:
            problem = f"{inner.row.name} says {place.hosts}, {row.name} says {nodes} ({said.named['nodes']})"
            raise SpecError("nodes", problem, f"start it on all of them, or unset {said.named['nodes']}")


# -- claims, completed -------------------------------------------------------------------------------------


def _place(inner: _Claim, agreeing: Sequence[_Claim], environment: Mapping[str, str], *, own: bool) -> Started:
    said: dict[str, Any] = {}
    for claim in reversed(agreeing):
        said |= {name: value for name, value in claim.values.items() if name in _PLACES}
    for name, variable in (("rank", "RANK"), ("world", "WORLD_SIZE"), ("local_world", "LOCAL_WORLD_SIZE")):
        if name not in said:
            _require(environment, variable, "" if inner.row is TORCHRUN else f"{inner.row.name} does not say it")
    rank, world, here = said["rank"], said["world"], said["local_world"]
    if not rank < world:
        raise SpecError(inner.named.get("rank", "RANK"), f"{rank} of a world of {world}", HOW)
    if not here or world % here:
        name, problem = inner.named.get("local_world", "LOCAL_WORLD_SIZE"), f"{world} ranks do not fill hosts of {here}"
        raise SpecError(name, problem, "start as many ranks on every host")
    if said.get("local_rank", local_rank(rank, here)) != local_rank(rank, here):
        problem = f"is {said['local_rank']}, but rank {rank} is number {local_rank(rank, here)} of {here} on its host"
        raise SpecError(inner.named.get("local_rank", "LOCAL_RANK"), problem, "number the ranks host by host")
    if own and "SHARDWISE_RENDEZVOUS" in environment:
        return Started(rank, world, here)
    address = _address(inner, agreeing, environment, alone=here == world)
    port = _port(agreeing, environment, alone=here == world)
    return Started(rank, world, here, address, port, inner.row.name, inner.row.is_mpi)


def _address(inner: _Claim, agreeing: Sequence[_Claim], environment: Mapping[str, str], *, alone: bool) -> str:
    """Where rank 0 is: as claimed, this host if it has all ranks, or the allocation's first node, as for mpirun."""
    if given := environment.get("MASTER_ADDR"):
        return given
    if inner.row is TORCHRUN:
        raise SpecError("MASTER_ADDR", "is not set", HOW)
    if alone:
        return "127.0.0.1"
    if said := next((claim.values["address"] for claim in agreeing if "address" in claim.values), None):
        return str(said)
    if _ALLOCATED_LIST in environment:
        return nodes_of(environment[_ALLOCATED_LIST], _ALLOCATED_LIST)[0]
    how = inner.row.set_variable.format(name="MASTER_ADDR")
    raise SpecError("MASTER_ADDR", f"is not set, and {inner.row.name} does not say where rank 0 is", how)


def _port(claims: Sequence[_Claim], environment: Mapping[str, str], *, alone: bool = False) -> int:
    """The given port, or one derived from the job's identity, so that two jobs on a host do not meet."""
    if claims[0].row is TORCHRUN and "MASTER_PORT" not in environment:
        _require(environment, "MASTER_PORT", "")
    for name in ("MASTER_PORT", claims[0].named.get("port", "")):
        if name in environment:
            port = _claim(TORCHRUN, {"MASTER_PORT": environment[name]}).values["port"]
            if not 0 < port < 65536:
                raise SpecError(name, f"{port} is not a port", "use 1 to 65535")
            return int(port)
    names = [name for claim in claims for name in claim.row.job] + ["SLURM_JOB_ID"]
    job = [environment[name] for name in names if name in environment]
    if not job and alone:
        job = [str(_launcher_process(claims[0]))]
    return _PORTS[zlib.crc32(" ".join(job).encode()) % len(_PORTS)] if job else PORT


def _launcher_process(claim: _Claim) -> int:
    """The nearest ancestor that is not a rank: all ranks of a host share it, even behind a wrapper script."""
    process, marker = os.getppid(), f"{claim.named['rank']}=".encode()
    try:
        while marker in Path(f"/proc/{process}/environ").read_bytes():
            status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
            process = int(status.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):  # no /proc, or not ours to read
        pass
    return process


def _require(environment: Mapping[str, str], name: str, why: str) -> None:
    if name not in environment:
        raise SpecError(name, "is not set" + (f", and {why}" if why else ""), HOW)
