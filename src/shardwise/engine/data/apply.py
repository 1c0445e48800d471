"""Data parallelism: the same parameters on several ranks, whole (ZeRO-0) or divided (ZeRO-1, 2, 3, hybrid).

Applied last, around everything else. Gradients are sums over the ranks: what each differentiates is its share of the
loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from shardwise.engine.collectives.choose import GradientSums
from shardwise.engine.data.fsdp import Sharded
from shardwise.engine.data.replicated import Replicated
from shardwise.engine.data.units import find_layers, units_of
from shardwise.engine.mesh import Mesh
from shardwise.engine.offload.states import StoredStates
from shardwise.engine.optim.precision import FP32, Precision
from shardwise.engine.patterns import DECODER, Patterns, matching
from shardwise.engine.torch_private import foreach_copy_
from shardwise.spec.job import Job

PREFETCH = 1  # units gathered ahead of the one that computes: one hides the gather where it can be hidden at all


class DataParallel:
    """What a step tells data parallelism, for all stages of this rank.

    Without a pipeline: `before_microbatch` before each forward pass, `after_step` after the optimizer. A pipeline
    tells it before the backward passes of each stage (`before_backward`, `before_input_gradients`) and after weight
    gradients that were computed apart (`after_weight_gradients`). Gradients are complete when the last pass returns.
    """

    def __init__(self, parts: dict[nn.Module, Sharded | Replicated]) -> None:
        self.parts = parts

    def start(self) -> None:
        """Once the parameters have their first values, before the optimizer is made."""
        for part in self.parts.values():
            part.start()

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """fp32 values of whole parameters that are computed with in 16 bits; divided parameters are fp32 themselves."""
        return {parameter: master for part in self.parts.values() for parameter, master in part.masters.items()}

    @property
    def feedback(self) -> dict[str, Tensor]:
        """What compressed sums of gradients keep from one step to the next: of this rank alone."""
        whole = [(number, part) for number, part in enumerate(self.parts.values()) if isinstance(part, Replicated)]
        return {f"{number}.{name}": state for number, part in whole for name, state in part.feedback.items()}

    @property
    def compressed_bytes(self) -> int:
        """What has left this rank in compressed sums until now."""
        return sum(part.compressed_bytes for part in self.parts.values() if isinstance(part, Replicated))

    def follow_momenta(self, momentum: Callable[[nn.Parameter], Tensor], kept: float) -> None:
        """Where the optimizer's momentum of a parameter is, and how much of it is left after a step."""
        for part in self.parts.values():
            if isinstance(part, Replicated):
                part.follow_momenta(momentum, kept)

    def compress(self, now: bool) -> None:
        """Whether the next sums are compressed, where the strategy compresses at all."""
        for part in self.parts.values():
            if isinstance(part, Replicated):
                part.compress(now)

    def forget_masters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Somebody else keeps the fp32 values of these from now on."""
        for parameter in parameters:
            for part in self.parts.values():
                part.masters.pop(parameter, None)

    def offload(self, stored: StoredStates, stay: AbstractSet[nn.Parameter]) -> None:
        """Weights and gradients that are ``stored`` leave the device; not the gradients of those that ``stay``."""
        for part in self.parts.values():
            if isinstance(part, Sharded):
                part.offload(stored, stay)

    def settle_gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor | None] | None:
        """Waits until those that leave have left; norms of those that are elsewhere, None if all are here."""
        away = [part.gradients for part in self.parts.values() if isinstance(part, Sharded) and part.gradients]
        for one in away:
            one.settle()
        return [away[0].stored.summed.get(parameter) for parameter in parameters] if away else None

    @torch.no_grad()
    def publish(self) -> None:
        """After masters were written by others than the optimizer: the weights that are computed with follow."""
        masters = self.masters
        if masters:
            foreach_copy_(list(masters), list(masters.values()))

    def before_microbatch(self, last: bool) -> None:
        for part in self.parts.values():
            part.before_microbatch(last)

    def after_step(self) -> None:
        for part in self.parts.values():
            part.after_step()

    def before_backward(self, module: nn.Module, last: bool) -> None:
        self.parts[module].before_microbatch(last)

    def before_input_gradients(self, module: nn.Module) -> None:
        self.parts[module].before_input_gradients()

    def after_weight_gradients(self, module: nn.Module, last: bool) -> None:
        self.parts[module].after_weight_gradients(last)


def apply_data(
    root: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    precision: Precision = FP32,
    *,
    layers: Sequence[nn.Module] | None = None,
    patterns: Patterns = DECODER,
    prefetch: int = PREFETCH,
    job: Job | None = None,
) -> DataParallel:
    """Puts a module, or each of the stages of this rank, under the data parallelism of the mesh's strategy.

    ``layers`` are communicated one by one; they default to what ``patterns`` calls layers, else to the largest list
    of equal blocks. Experts inside them have ranks of their own where expert parallelism makes them so. ``job`` says
    by which collective gradients are summed, and on what network; without it, by the backend's own.
    """
    roots = [root] if isinstance(root, nn.Module) else list(root)
    sums = GradientSums(mesh, job)
    return DataParallel({one: _apply(one, mesh, precision, layers, patterns, prefetch, sums) for one in roots})


def _apply(
    root: nn.Module,
    mesh: Mesh,
    precision: Precision,
    layers: Sequence[nn.Module] | None,
    patterns: Patterns,
    prefetch: int,
    sums: GradientSums,
) -> Sharded | Replicated:
    if layers is None:
        layers = [module for _, module in matching(root, patterns.layers)] or find_layers(root)
    experts_apart = not (mesh.same("replicate", "expert_replicate") and mesh.same("shard", "expert_shard"))
    units = units_of(root, layers, patterns, experts_apart)
    divided = mesh.size("shard") > 1 or (experts_apart and mesh.size("expert_shard") > 1)
    offload = mesh.strategy.offload
    if mesh.strategy.zero and (divided or offload.weights or offload.gradients):
        return Sharded(root, units, mesh, precision, prefetch, sums)
    return Replicated(root, units, mesh, precision, sums)
