"""Who communicates with whom, against the coordinates of the ranks."""

from __future__ import annotations

from itertools import permutations

import torch.distributed as dist

from engine.workers import on_ranks
from shardwise.engine.mesh import build_mesh
from shardwise.layout.groups import coordinate
from shardwise.spec.strategy import DIMENSIONS, Strategy

NAMES = ("tp", "cp", "dp", "pp", "sequence", "stage", "ep", "expert_tp", "replicate", "shard", "expert_replicate",
         "expert_shard")  # fmt: skip


def members(strategy: Strategy) -> dict[str, list[int]]:
    mesh = build_mesh(strategy)
    return {name: dist.get_process_group_ranks(mesh.group(name)) for name in NAMES}


def same_but(strategy: Strategy, rank: int, *free: str) -> list[int]:
    """Ranks that stand where ``rank`` stands in every dimension but ``free``."""
    fixed = [name for name in DIMENSIONS if name not in free]
    return [
        other
        for other in range(strategy.world)
        if all(coordinate(strategy, name, other) == coordinate(strategy, name, rank) for name in fixed)
    ]


def test_every_group_has_the_ranks_that_the_order_says() -> None:
    for order in list(permutations(DIMENSIONS))[::5]:
        strategy = Strategy(tp=2, cp=2, dp=2, pp=1, ep=2, expert_tp=1, zero=1, shard_group=2, order=order)
        for rank, found in enumerate(on_ranks(8, members, strategy)):
            for name in DIMENSIONS:
                assert found[name] == same_but(strategy, rank, name)
            assert found["sequence"] == same_but(strategy, rank, "cp", "tp")
            assert found["stage"] == list(range(8))
            together = same_but(strategy, rank, "cp", "dp")
            start = together.index(rank) // 2 * 2
            assert found["shard"] == together[start : start + 2]
            assert found["replicate"] == together[together.index(rank) % 2 :: 2]
            assert found["ep"] == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert found["expert_tp"] == [rank]
            assert len(found["expert_shard"]) * len(found["expert_replicate"]) == 4


def test_a_pipeline_keeps_experts_and_gradients_inside_a_stage() -> None:
    strategy = Strategy(tp=2, dp=2, pp=2, ep=2, expert_tp=2)
    for rank, found in enumerate(on_ranks(8, members, strategy)):
        stage = set(same_but(strategy, rank, "tp", "cp", "dp"))
        assert all(set(found[name]) <= stage for name in NAMES if name != "pp")
        assert found["expert_tp"] == same_but(strategy, rank, "tp")
        assert found["expert_replicate"] == [rank] and len(found["replicate"]) == 2
