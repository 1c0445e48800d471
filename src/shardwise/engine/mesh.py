"""The ranks of a strategy as PyTorch device meshes: who communicates with whom, for every purpose.

Several views of the same ranks, each a `DeviceMesh` of the whole world, because one mesh cannot say that experts and
dense parts are divided differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.cost.states import divided_over, expert_shards
from shardwise.spec.strategy import Strategy


@dataclass(frozen=True)
class Mesh:
    """``group``, ``size`` and ``rank`` of every set of ranks that communicates, by its name:

    - ``tp``, ``cp``, ``dp``, ``pp``: the dimensions of the strategy;
    - ``sequence``: cp·tp, ranks that hold parts of the same sequences;
    - ``stage``: dp·cp·tp, all ranks of one pipeline stage;
    - ``kv_copies``: tensor-parallel ranks that hold the same key-value heads, where there are fewer heads than ranks;
    - ``ep``, ``expert_tp``: ranks that hold different experts, and parts of the same expert;
    - ``replicate``, ``shard``: cp·dp ranks with the same dense parameters, cut into shard groups by ZeRO;
    - ``expert_replicate``, ``expert_shard``: the same for experts.
    """

    strategy: Strategy
    views: tuple[DeviceMesh, ...]

    def group(self, name: str) -> dist.ProcessGroup:
        return self.along(name).get_group()

    def size(self, name: str) -> int:
        return self.along(name).size()

    def rank(self, name: str) -> int:
        return self.along(name).get_local_rank()

    def along(self, *names: str) -> DeviceMesh:
        """The mesh of this rank's neighbours along one name, or two of the same view."""
        for view in self.views:
            if set(names) <= set(view.mesh_dim_names or ()):
                return view[names if len(names) > 1 else names[0]]
        raise KeyError(names)

    @property
    def gradients(self) -> DeviceMesh:
        """(replicate, shard) of dense parameters."""
        return self.along("replicate", "shard")

    @property
    def expert_gradients(self) -> DeviceMesh:
        return self.along("expert_replicate", "expert_shard")


def build_mesh(strategy: Strategy, device: str = "cpu", key_value_heads: int | None = None) -> Mesh:
    """All views; every rank of the world calls this, in the same order of its other calls."""
    repeats = strategy.tp // min(strategy.tp, key_value_heads or strategy.tp)
    order = tuple(reversed(strategy.order))  # outermost first, as arrays are laid out
    ranks = torch.arange(strategy.world).reshape([strategy.degree(name) for name in order])
    inside = [name for name in order if name != "pp"]
    shards = divided_over(strategy)
    expert_sharded = int(expert_shards(strategy, shards))
    copies, expert_copies = strategy.gradient_group // shards, strategy.expert_data_parallel // expert_sharded

    def view(groups: Sequence[Sequence[str]], shape: dict[str, int]) -> DeviceMesh:
        names = [name for group in groups for name in group]
        laid_out = ranks.permute([order.index(name) for name in names]).reshape(list(shape.values()))
        return DeviceMesh(device, laid_out.contiguous(), mesh_dim_names=tuple(shape))

    sequence = [name for name in inside if name in ("cp", "tp")]
    gradient = [name for name in inside if name in ("cp", "dp")]
    rest = strategy.pp * strategy.tp
    expert_ranks = strategy.ep * strategy.expert_tensor_parallel
    return Mesh(
        strategy,
        (
            DeviceMesh(device, ranks, mesh_dim_names=order),
            view([["pp"], inside], {"other stages": strategy.pp, "stage": prod(ranks.shape) // strategy.pp}),
            view(
                [["pp", "dp"], sequence],
                {"other sequences": strategy.pp * strategy.data_parallel, "sequence": strategy.cp * strategy.tp},
            ),
            view([["pp", "dp", "cp"], ["tp"]], {"other heads": strategy.world // repeats, "kv_copies": repeats}),
            view([["pp", "tp"], gradient], {"other parts": rest, "replicate": copies, "shard": shards}),
            view(
                [["pp"], inside],
                {
                    "expert_stages": strategy.pp,
                    "expert_replicate": expert_copies,
                    "expert_shard": expert_sharded,
                    "expert_ranks": expert_ranks,
                },
            ),
            view(
                [["pp"], inside],
                {
                    "other experts": strategy.pp * strategy.expert_data_parallel,
                    "ep": strategy.ep,
                    "expert_tp": strategy.expert_tensor_parallel,
                },
            ),
        ),
    )
