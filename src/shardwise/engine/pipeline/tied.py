"""One embedding at both ends of a pipeline: a lookup in the first stage, a matmul in the last.

If the two stages are on different ranks, each has a copy; both start equal, and summing their gradients keeps them so
(Shoeybi et al. 2019). If a folded pipeline puts both on one rank, there is one parameter, the first stage's, which the
last stage borrows: data parallelism, the optimizer and checkpoints see it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.labels import Called
from shardwise.engine.mesh import new_group
from shardwise.engine.parameters import local, note_part, part_of
from shardwise.engine.profiler_ranges import sent


@dataclass(frozen=True)
class TiedEnds:
    """The modules of this rank whose ``weight`` is tied."""

    embedding: nn.Module | None  # in the first stage
    readers: tuple[nn.Module, ...]  # in the last stage: the head, the embedding of prediction modules, or both
    group: dist.ProcessGroup | None  # of the two ranks, if the stages are on two

    @property
    def borrowers(self) -> tuple[nn.Module, ...]:
        """Readers without a parameter of their own. Their gradient is never deferred: the first stage reduces it."""
        return self.readers if self.embedding else ()

    def follow(self) -> None:
        """Gives the readers the embedding's current parameter: FSDP swaps whole and sharded ones."""
        for reader in self.borrowers:
            assert self.embedding is not None
            reader.__dict__["weight"] = self.embedding.weight  # not registered as a parameter of the reader

    def copy_of(self, tensor: Tensor) -> None:
        """Copies ``tensor``, of the weight's shape, from the first stage to the last.

        Needed after sums over more than two workers: their rounding depends on an element's place in the message, which
        differs between the two stages.
        """
        if self.group is not None:
            with sent("pp", Called.TIED_WEIGHT, tensor):
                dist.broadcast(local(tensor), group=self.group, group_src=0)

    def add_gradients(self) -> None:
        """Call after gradients were reduced over the data-parallel ranks, whose shards are the same at both ends."""
        weight = self.weight
        if self.group is None or not weight.requires_grad:
            return
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        gradient = local(weight.grad)
        with sent("pp", Called.TIED_GRADIENTS, gradient):
            all_reduce_sum(gradient, self.group)

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.modules[0].weight  # type: ignore[assignment]
        return weight

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All of this rank."""
        return (*(() if self.embedding is None else (self.embedding,)), *self.readers)


def tie_ends(
    modules: Mapping[int, nn.Module],
    placement: tuple[int, ...],
    ranks: Sequence[int],
    *,
    embedding: str = "embedding",
    readers: Sequence[str] = ("head",),
) -> TiedEnds | None:
    """Ties the ends of a pipeline; ``modules`` are this rank's stages. None on ranks that have neither end.

    ``ranks`` maps pipeline ranks of this pipeline to ranks of the world. Call when the parameters have their local
    shapes: after tensor and before data parallelism. The last stage's own copy is marked as not counted, since the
    gradient norm counts the first stage's.
    """
    last = len(placement) - 1
    first = modules[0].get_submodule(embedding) if 0 in modules else None
    reading = tuple(modules[last].get_submodule(name) for name in readers) if last in modules else ()
    if first is None and not reading:
        return None
    if first is None or not reading:
        for module in reading:
            note_part(module, "weight", replace(part_of(module, "weight"), counted=False))
        # Only the two ends make this group; the ranks between them take no part.
        group = new_group([ranks[placement[0]], ranks[placement[last]]], "tied embedding")
        return TiedEnds(first, reading, group)
    tied = TiedEnds(first, reading, None)
    for module in reading:
        del module.weight
    tied.follow()
    modules[last].register_forward_pre_hook(lambda *_: tied.follow())
    return tied
