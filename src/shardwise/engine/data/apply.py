"""Data parallelism: the same parameters on several ranks, whole (ZeRO-0) or divided (ZeRO-1, 2, 3, hybrid).

Applied last, around everything else. Gradients are sums over the ranks: each rank differentiates its share of the
loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from shardwise.engine.collectives.communicator import GradientSums
from shardwise.engine.compression import MomentumSum
from shardwise.engine.data.fsdp import Sharded
from shardwise.engine.data.replicated import Bucket, Replicated
from shardwise.engine.mesh import Mesh
from shardwise.engine.offload.states import StoredStates
from shardwise.engine.optim.precision import FP32, Precision
from shardwise.engine.patterns import DECODER, Patterns, find_layers, matching, units_of
from shardwise.engine.torch_private import foreach_copy_
from shardwise.spec.job import Job

PREFETCH = 1  # units gathered ahead of the one that computes; more would hide nothing more


class DataParallel:
    """Data parallelism of all stages of this rank, as a step drives it.

    Without a pipeline, call `before_microbatch` before each forward pass and `after_step` after the optimizer. A
    pipeline calls the ``parts`` of its stages itself (`engine.pipeline.runtime.Reduction`). Gradients are complete when
    the last pass returns.
    """

    def __init__(self, parts: dict[nn.Module, Sharded | Replicated]) -> None:
        self.parts = parts
        self._sharded = [part for part in parts.values() if isinstance(part, Sharded)]

    def start(self) -> None:
        """Call once the parameters have values, before the optimizer is made."""
        for part in self.parts.values():
            part.start()

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """fp32 values of whole 16-bit parameters; divided parameters are fp32 themselves."""
        return {parameter: master for part in self.parts.values() for parameter, master in part.masters.items()}

    @property
    def buckets(self) -> dict[str, Bucket]:
        """Whole parameters whose gradients are summed together; divided ones have none."""
        whole = [(number, part) for number, part in enumerate(self.parts.values()) if isinstance(part, Replicated)]
        return {f"{number}.{index}": bucket for number, part in whole for index, bucket in enumerate(part.buckets)}

    @property
    def feedback(self) -> dict[str, Tensor]:
        """What compressed sums of gradients keep from one step to the next, on this rank alone."""
        compressed = [(name, bucket.compressed) for name, bucket in self.buckets.items() if bucket.compressed]
        return {
            f"{name}.{state}": tensor for name, compressor in compressed for state, tensor in compressor.states.items()
        }

    @property
    def compressed_bytes(self) -> int:
        """What this rank has sent in compressed sums so far."""
        return sum(bucket.compressed.sent_bytes for bucket in self.buckets.values() if bucket.compressed)

    def follow_momenta(self, momentum: Callable[[nn.Parameter], Tensor], kept: float) -> None:
        """Tells compressed sums where the optimizer keeps momenta, and how much of these is left after a step."""
        for bucket in self.buckets.values():
            if isinstance(bucket.compressed, MomentumSum):
                bucket.compressed.follow([momentum(parameter) for parameter in bucket.parameters], kept)

    def compress(self, now: bool) -> None:
        """Whether the next sums are compressed, where the strategy compresses at all."""
        for bucket in self.buckets.values():
            bucket.compresses = now

    def forget_masters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drops the masters of these parameters, whose fp32 values others keep from now on."""
        for parameter in parameters:
            for part in self.parts.values():
                part.masters.pop(parameter, None)

    def is_sharded(self, stage: nn.Module) -> bool:
        return isinstance(self.parts[stage], Sharded)

    def offload(self, stored: StoredStates, stay: AbstractSet[nn.Parameter]) -> None:
        """Moves ``stored`` weights and gradients off the device, but not the gradients of parameters in ``stay``."""
        for part in self._sharded:
            part.offload(stored, stay)

    def settle_gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor | None] | None:
        """Waits for gradients that leave the device; returns the norms of those, None if all are on the device."""
        away = [part.gradients for part in self._sharded if part.gradients]
        for gradients in away:
            gradients.settle()
        return [away[0].stored.summed.get(parameter) for parameter in parameters] if away else None

    @torch.no_grad()
    def publish(self) -> None:
        """Copies masters into the weights, after something other than the optimizer has written them."""
        masters = self.masters
        if masters:
            foreach_copy_(list(masters), list(masters.values()))

    def before_step(self) -> None:
        """Call before the first forward pass of weights that may have changed."""
        for part in self._sharded:
            part.before_step()

    def before_microbatch(self, last: bool) -> None:
        for part in self.parts.values():
            part.before_microbatch(last)

    def after_step(self) -> None:
        for part in self.parts.values():
            part.after_step()

    def after_evaluation(self) -> None:
        """Call after forward passes without backward passes."""
        for part in self._sharded:
            part.after_evaluation()


def apply_data(
    root: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    precision: Precision = FP32,
    *,
    patterns: Patterns = DECODER,
    job: Job | None = None,
) -> DataParallel:
    """Puts a module, or each of the stages of this rank, under the data parallelism of the mesh's strategy.

    What ``patterns`` calls layers, else the largest list of equal blocks, is communicated one by one. Under expert
    parallelism the experts inside them may be divided over other ranks. ``job`` says by which collective gradients are
    summed, and on what network; without it, the backend's own is used.
    """
    roots = [root] if isinstance(root, nn.Module) else list(root)
    sums, strategy = GradientSums(mesh, job), mesh.strategy
    experts_apart = not (mesh.same("replicate", "expert_replicate") and mesh.same("shard", "expert_shard"))
    divided = mesh.size("shard") > 1 or (experts_apart and mesh.size("expert_shard") > 1)
    sharded = strategy.zero and (divided or strategy.offload.weights or strategy.offload.gradients)
    parts: dict[nn.Module, Sharded | Replicated] = {}
    for stage in roots:
        blocks = [module for _, module in matching(stage, patterns.layers)] or find_layers(stage)
        units = units_of(stage, blocks, patterns, experts_apart)
        if sharded:
            parts[stage] = Sharded(stage, units, mesh, precision, PREFETCH, sums)
        else:
            parts[stage] = Replicated(stage, units, mesh, precision, sums)
    return DataParallel(parts)
