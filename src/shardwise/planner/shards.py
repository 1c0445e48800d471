"""The columns of the planner's tables: ZeRO stages, and the groups of ranks that they divide states over."""

from __future__ import annotations

from shardwise.cost.network import spanned
from shardwise.cost.sweep.group import ShardChoice
from shardwise.layout.sharding import dense_ranks, expert_ranks
from shardwise.planner.constraints import Constraints
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import divisors
from shardwise.spec.strategy import Strategy

SHARD_GROUPS = 5  # sizes of a hybrid shard group that are tried beside all ranks
# ZeRO stage, parameters kept, gradients accumulated.
SHARDINGS = ((0, False, "sharded"), (1, False, "sharded"), (2, False, "sharded"), (3, False, "sharded"),
             (3, True, "sharded"), (3, True, "local"))  # fmt: skip
LEAVING = ((2, False, "sharded"), (3, False, "sharded"))
LOCAL = ((2, False, "local"), (3, False, "local"))  # only where gradients are asked to be accumulated so


def shard_choices(job: Job, constraints: Constraints, base: Strategy, *, states_leave: bool) -> tuple[ShardChoice, ...]:
    """Every way to divide the states of the layout ``base``.

    Over one rank all are the same, but that ZeRO-2 and 3 let gradients and weights leave, where ``states_leave``.
    """
    group = base.gradient_group
    sizes = constraints.candidates("shard_group", (*shard_groups(base), group))
    shardable = [size for size in sizes if _shardable(job, base, size)]
    undivided = (None,) if not constraints.names("shard_group") or None in shardable else ()
    stages = constraints.candidates("zero", (0, 1, 2, 3))
    kept = constraints.candidates("keep_parameters", (False, True))
    accumulated = constraints.candidates("accumulate", ("sharded", "local"))
    wanted = [
        (zero, keeps, accumulate)
        for zero, keeps, accumulate in (*SHARDINGS, *(LOCAL if constraints.names("accumulate") else ()))
        if zero in stages and keeps in kept and accumulate in accumulated
    ]
    if group == 1:
        wanted = [*wanted[:1], *(one for one in wanted[1:] if states_leave and one in LEAVING)]
    choices = [
        ShardChoice(zero, None if size == group else size, keeps, accumulate)
        for zero, keeps, accumulate in wanted
        for size in (shardable if zero else undivided)
    ]
    return tuple(dict.fromkeys(choices))


def shard_groups(base: Strategy) -> tuple[int | None, ...]:
    """All ranks that hold the same parameters, and parts of them: spread evenly over the possible sizes."""
    group = base.gradient_group
    sizes = [size for size in divisors(group) if 1 < size < group]
    if len(sizes) >= SHARD_GROUPS:
        sizes = [sizes[len(sizes) * part // SHARD_GROUPS] for part in range(SHARD_GROUPS)]
    return (None, *sizes)


def _shardable(job: Job, base: Strategy, size: int | None) -> bool:
    """Whether a shard group of this size lies on the network."""
    shards = size or base.gradient_group
    if base.gradient_group % shards:
        return False
    try:
        held = [dense_ranks(base, shards), *([expert_ranks(base, shards)] if job.model.moe else [])]
        for ranks in held:
            spanned(job.cluster, ranks.sharded, "strategy.shard_group")
            spanned(job.cluster, ranks.replicas, "strategy.shard_group")
    except SpecError:
        return False
    return True
