"""The processes that train together, and the process groups of a strategy's mesh.

The mesh is not a `DeviceMesh` of all ranks: that cannot express that experts and dense parts are divided differently,
and it makes a process group for every dimension, even if that is unused, has one rank, or the same ranks as another.
Each group costs connections and, with gloo, a thread that wakes up a hundred times a second.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from shardwise.engine.torch_private import Store, clear_sharding_prop_cache
from shardwise.layout.groups import Division, coordinate, first_rank, local_rank
from shardwise.layout.mesh import mesh_divisions
from shardwise.run.environment import Started, interface_towards, loopback_interface
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Strategy

# -- The groups of a strategy's mesh ---------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """``group``, ``size`` and ``rank`` of every named set of ranks that communicates (see `layout.mesh`).

    Names that mean the same ranks share a process group.
    """

    whole: Strategy
    device: str
    divisions: Mapping[str, Division]
    groups: Mapping[Division, dist.ProcessGroup]

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy as this rank's stage sees it."""
        return self.whole.of_stage(self.pipeline_rank) if self.whole.has_unlike_stages else self.whole

    @cached_property
    def pipeline_rank(self) -> int:
        return coordinate(self.whole, "pp", dist.get_rank())

    def group(self, name: str) -> dist.ProcessGroup:
        return self._alone if self.size(name) == 1 else self.groups[self.divisions[name]]

    def size(self, name: str) -> int:
        division = self.divisions[name]
        return len(own(division) if self.whole.has_unlike_stages else division[0])

    def rank(self, name: str) -> int:
        return own(self.divisions[name]).index(dist.get_rank())

    @property
    def pipeline(self) -> Sequence[int]:
        """The ranks that hold the stages of this rank's pipeline, in order.

        Between unlike stages these are the ranks with the same place in their stage.
        """
        if not self.whole.has_unlike_stages:
            return own(self.divisions["pp"])
        inside = dist.get_rank() - first_rank(self.whole, self.pipeline_rank)
        return [first_rank(self.whole, stage) + inside for stage in range(self.whole.pp)]

    def same(self, group: str, other: str) -> bool:
        """Whether two names mean the same ranks everywhere."""
        return self.divisions[group] == self.divisions[other]

    def sharding(self, replicate: str, shard: str) -> DeviceMesh:
        """The mesh that `fully_shard` takes for this rank: two dimensions if there are several shard groups."""
        if self.size(replicate) == 1:
            return DeviceMesh.from_group(self.group(shard), self.device, mesh_dim_names=(shard,))
        columns = {rank: ranks for ranks in self.divisions[shard] for rank in ranks}
        ranks = torch.tensor([columns[rank] for rank in own(self.divisions[replicate])])
        return DeviceMesh.from_group(
            [self.group(replicate), self.group(shard)], self.device, ranks, mesh_dim_names=(replicate, shard)
        )

    @cached_property
    def _alone(self) -> dist.ProcessGroup:
        """Singleton group for a dimension of size 1."""
        return new_group((dist.get_rank(),))


def build_mesh(strategy: Strategy, device: str = "cpu", key_value_heads: int | None = None) -> Mesh:
    """Makes all groups; every rank of the world calls this, in the same order relative to its other calls."""
    divisions = mesh_divisions(strategy, key_value_heads)
    groups: dict[Division, dist.ProcessGroup] = {}
    for name, division in divisions.items():
        if max(map(len, division)) > 1 and division not in groups:
            groups[division] = new_group(own(division), name)
    mesh = Mesh(strategy, device, divisions, groups)
    if strategy.has_unlike_stages:
        assert mesh._alone  # made here by all ranks: names of groups count earlier groups, so all must make as many
    return mesh


def own(division: Division) -> tuple[int, ...]:
    """The group that this rank is in."""
    here = dist.get_rank()
    return next(ranks for ranks in division if here in ranks)


def new_group(ranks: Sequence[int], meaning: str | None = None) -> dist.ProcessGroup:
    """A process group made by its own ranks; all ranks of the world must make equally many, or names differ.

    ``meaning`` is the flight recorder's name for it.
    """
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=meaning)
    return group


# -- Joining and leaving the processes that train together -----------------------------------------


def store_at(address: str, port: int, rank: int, world: int, seconds: float = 300) -> Store:
    """The store of all ranks, which rank 0 serves; under torchrun its agent does."""
    place = f"[{address}]" if ":" in address else address
    store, _, _ = next(rendezvous(f"tcp://{place}:{port}", rank, world, timeout=timedelta(seconds=seconds)))
    return store  # type: ignore[no-any-return]


WAIT_SECONDS = 300.0  # for the slowest rank to be started


def store_of(here: Started, seconds: float = WAIT_SECONDS) -> Store:
    """Raises SpecError if the ranks cannot meet in time."""
    assert here.address is not None and here.port is not None, "ranks of our own launcher meet in a file"
    bind_gloo(here.address, several_hosts=here.hosts > 1)
    try:
        return store_at(here.address, here.port, here.rank, here.world, seconds)
    except RuntimeError as error:  # as torch raises
        first = next(iter(str(error).splitlines()), "no answer")
        problem = f"rank {here.rank} of {here.world} at {here.address}:{here.port}: {first}"
        raise SpecError(
            "rendezvous", problem, "set MASTER_ADDR and MASTER_PORT to a free port of rank 0's host"
        ) from None


def bind_gloo(address: str, *, several_hosts: bool) -> None:
    """Makes gloo use the interface that reaches rank 0; by default it uses that of the host's name, often another one.

    Loopback is not an option if other hosts must reach this one.
    """
    name = interface_towards(address)
    if name and not (several_hosts and name == loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def silence_blas_fallback() -> None:
    """Hides a warning: on a CPU without bf16 PyTorch falls back to BLAS, and every process prints a stack trace."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")


@contextmanager
def process_group(
    rank: int, world: int, meeting: str | Store, *, device: str = "cpu", seconds: float = 120, on_cpu: str = "gloo"
) -> Iterator[None]:
    """The default process group of ``world`` processes that meet in a file or a store; destroyed at the end.

    Besides NCCL on GPUs there is always a CPU backend, for checkpoints and small agreements; without GPUs, ``on_cpu``.
    """
    silence_blas_fallback()
    store = dist.FileStore(meeting, world) if isinstance(meeting, str) else meeting  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else on_cpu
    if device == "cuda":
        torch.cuda.set_device(local_rank(rank, torch.cuda.device_count()))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
    # Not in a finally clause: a failed rank that leaves breaks the connections of others, which would hide its error.
    yield
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch's cache of operators on DTensors names the groups of this world; equal meshes of the next would use them.
    clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
