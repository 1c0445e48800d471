"""The ranks of a strategy in groups: who communicates with whom, for every purpose.

Not one `DeviceMesh` of all ranks, which cannot say that experts and dense parts are divided differently, and which
makes a process group for every dimension, used or not, over one rank or the same ranks as another: each costs
connections and, with gloo, a thread that wakes up a hundred times a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout.sharding import divided_over, expert_shards
from shardwise.spec.strategy import Strategy

Division = tuple[tuple[int, ...], ...]  # all ranks, each in one group


@dataclass(frozen=True)
class Mesh:
    """``group``, ``size`` and ``rank`` of every set of ranks that communicates, by its name:

    - ``tp``, ``cp``, ``dp``, ``pp``: the dimensions of the strategy;
    - ``sequence``: cp·tp, ranks that hold parts of the same sequences;
    - ``stage``: dp·cp·tp, all ranks of one pipeline stage;
    - ``kv_copies``: tensor-parallel ranks that hold the same key-value heads, where there are fewer heads than ranks;
    - ``ep``, ``expert_tp``: ranks that hold different experts, and parts of the same expert;
    - ``replicate``, ``shard``: cp·dp ranks with the same dense parameters, cut into shard groups by ZeRO;
    - ``expert_replicate``, ``expert_shard``: the same for experts;
    - ``worker``: all ranks of one replica, where those do not meet in every step.

    Names that mean the same ranks share a process group.
    """

    strategy: Strategy
    device: str
    divisions: Mapping[str, Division]
    groups: Mapping[Division, dist.ProcessGroup]

    def group(self, name: str) -> dist.ProcessGroup:
        return self._alone if self.size(name) == 1 else self.groups[self.divisions[name]]

    def size(self, name: str) -> int:
        return len(self.divisions[name][0])

    def rank(self, name: str) -> int:
        return own(self.divisions[name]).index(dist.get_rank())

    def same(self, one: str, other: str) -> bool:
        """Whether two names mean the same ranks everywhere."""
        return self.divisions[one] == self.divisions[other]

    def sharding(self, replicate: str, shard: str) -> DeviceMesh:
        """This rank's neighbours as `fully_shard` wants them: two dimensions where there are several shard groups."""
        if self.size(replicate) == 1:
            return DeviceMesh.from_group(self.group(shard), self.device, mesh_dim_names=(shard,))
        columns = {rank: ranks for ranks in self.divisions[shard] for rank in ranks}
        ranks = torch.tensor([columns[rank] for rank in own(self.divisions[replicate])])
        return DeviceMesh.from_group(
            [self.group(replicate), self.group(shard)], self.device, ranks, mesh_dim_names=(replicate, shard)
        )

    @cached_property
    def _alone(self) -> dist.ProcessGroup:
        """For who asks for a group though it has one rank."""
        return new_group((dist.get_rank(),))


def build_mesh(strategy: Strategy, device: str = "cpu", key_value_heads: int | None = None) -> Mesh:
    """All groups; every rank of the world calls this, in the same order of its other calls."""
    divisions = divide(strategy, key_value_heads)
    groups: dict[Division, dist.ProcessGroup] = {}
    for division in divisions.values():
        if len(division[0]) > 1 and division not in groups:
            groups[division] = new_group(own(division))
    return Mesh(strategy, device, divisions, groups)


def divide(strategy: Strategy, key_value_heads: int | None = None) -> dict[str, Division]:
    """For every name of a mesh the groups into which it divides the ranks of the world."""
    order = tuple(reversed(strategy.order))  # outermost first, as arrays are laid out
    ranks = torch.arange(strategy.world).reshape([strategy.degree(name) for name in order])
    inside = [name for name in order if name != "pp"]
    sequence = [name for name in inside if name in ("cp", "tp")]
    gradient = [name for name in inside if name in ("cp", "dp")]

    def groups(*members: str) -> torch.Tensor:
        """[groups, ranks]: a group for every place along the other dimensions."""
        others = [name for name in order if name not in members]
        laid_out = ranks.permute([order.index(name) for name in (*others, *members)])
        return laid_out.reshape(-1, prod(strategy.degree(name) for name in members))

    shards = divided_over(strategy)
    expert_sharded = int(expert_shards(strategy, shards))
    repeats = strategy.tp // min(strategy.tp, key_value_heads or strategy.tp)
    # From the outside in: copies of an expert's shards, its shards, its owners, its parts.
    experts = groups(*inside).reshape(
        -1,
        strategy.expert_data_parallel // expert_sharded,
        expert_sharded,
        strategy.ep,
        strategy.expert_tensor_parallel,
    )
    apart = {} if strategy.synchronise.every_step else {"worker": groups(*(name for name in order if name != "dp"))}
    dense = groups(*gradient).reshape(-1, strategy.gradient_group // shards, shards)
    return {
        **{name: _along(groups(name), 1) for name in order},
        "stage": _along(groups(*inside), 1),
        "sequence": _along(groups(*sequence), 1),
        "kv_copies": _along(groups("tp").reshape(-1, repeats), 1),
        "replicate": _along(dense, 1),
        "shard": _along(dense, 2),
        "expert_replicate": _along(experts, 1),
        "expert_shard": _along(experts, 2),
        "ep": _along(experts, 3),
        "expert_tp": _along(experts, 4),
        **{name: _along(laid_out, 1) for name, laid_out in apart.items()},
    }


def own(division: Division) -> tuple[int, ...]:
    """The group that this rank is in."""
    here = dist.get_rank()
    return next(ranks for ranks in division if here in ranks)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group that its own ranks make; all ranks of the world make equally many groups, or names differ."""
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


def _along(laid_out: torch.Tensor, dimension: int) -> Division:
    """The groups along one dimension, in a fixed order."""
    groups = laid_out.movedim(dimension, -1).reshape(-1, laid_out.shape[dimension])
    return tuple(sorted(tuple(ranks) for ranks in groups.tolist()))
