"""What the engine does in a step, as the list of its operators: on one rank, without the others, without values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.experts.rows import Assumed
from shardwise.measure.dryrun.trace import _pose, _structure_is_real
from shardwise.measure.dryrun.world import fake_tensors, nothing_moves, posing_as
from shardwise.spec.job import Job

GROUPS = ("tp", "cp", "dp", "pp", "ep", "expert_tp", "shard", "replicate")


@cache
def operators_of(job: Job, rank: int = 0) -> tuple[str, ...]:
    """Kernels with their formats, collectives with their sizes, in the order of their calls; the groups of the rank,
    the bytes it holds, and what it has moved to and from its host."""
    with ExitStack() as entered:
        entered.enter_context(posing_as(rank, job.strategy.world))
        entered.enter_context(_structure_is_real())
        entered.enter_context(nothing_moves())
        entered.enter_context(fake_tensors())
        engine = Engine(job, device="cpu", seed=0)
        _pose(engine, Assumed(1.0, 1))
        engine.compress(True)
        log = _Log()
        with log:
            engine.step(_batch(job, len(engine.rows)))
        groups = [f"{name}: {ranks}" for name in GROUPS if (ranks := _ranks(engine, name))]
        held = [f"{one.name} {tuple(one.parameter.shape)} {one.parameter.dtype}" for one in engine.parameters]
        states = [f"{name} {value.nbytes}" for of in engine.optimizer.state.values() for name, value in of.items()]
        moved = [] if engine.store is None else [f"{what}: {size}" for what, size in engine.store.lanes.moved.items()]
        return (*groups, *held, *states, *moved, *log.calls)


def _batch(job: Job, rows: int) -> Batch:
    tokens = torch.zeros((rows, job.training.seq), dtype=torch.int64)
    return Batch.of(tokens, tokens.clone())


def _ranks(engine: Engine, name: str) -> list[int] | None:
    try:
        return dist.get_process_group_ranks(engine.mesh.group(name)) if engine.mesh.size(name) > 1 else None
    except KeyError:
        return None


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        said = str(function)
        if said.startswith(("c10d", "aten._scaled_dot_product")):  # which say more than their results show
            said += f" {_described(args)}"
        self.calls.append(f"{said} → {_described(result)}")
        return result


def _described(values: Any) -> str:
    return ", ".join(
        f"{tuple(one.shape)} {one.dtype}" if isinstance(one, torch.Tensor) else str(one)
        for one in tree_leaves(values)
        if isinstance(one, torch.Tensor | int)
    )
