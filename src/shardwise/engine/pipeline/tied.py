"""One embedding at both ends of a pipeline: a lookup in the first stage, a matmul in the last.

If the two stages are on different ranks each has a copy; both start equal, and the sum of their gradients keeps them
so (Shoeybi et al. 2019). If a folded pipeline puts them on one rank there is one parameter, the first stage's, which
the last one borrows: data parallelism, the optimizer and a checkpoint see it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.labels import Called
from shardwise.engine.parameters import local, note_part, part_of
from shardwise.engine.profiler_ranges import sent


@dataclass(frozen=True)
class TiedEnds:
    """``embedding`` and ``head`` are the modules whose ``weight`` is tied, if they are on this rank."""

    embedding: nn.Module | None
    head: nn.Module | None
    group: dist.ProcessGroup | None  # of the two ranks, if they are two

    @property
    def borrowers(self) -> tuple[nn.Module, ...]:
        """The head that has no parameter of its own. Its gradient is never deferred: the first stage reduces it."""
        return (self.head,) if self.embedding and self.head else ()

    def follow(self) -> None:
        """Gives the head the embedding's current parameter: FSDP swaps whole and sharded ones."""
        for head in self.borrowers:
            assert self.embedding is not None
            head.__dict__["weight"] = self.embedding.weight  # not registered as a parameter of the head

    def copy_of(self, tensor: Tensor) -> None:
        """Copies ``tensor``, of the weight's shape, from the first stage to the last.

        Sums over more than two workers round by the position of a number in the message, which differs at both ends.
        """
        if self.group is not None:
            with sent("pp", Called.TIED_WEIGHT, tensor):
                dist.broadcast(local(tensor), group=self.group, group_src=0)

    def add_gradients(self) -> None:
        """Call after gradients were reduced over the data-parallel ranks, whose shards are the same at both ends."""
        if self.group is None:
            return
        weight = self.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        gradient = local(weight.grad)
        with sent("pp", Called.TIED_GRADIENTS, gradient):
            all_reduce_sum(gradient, self.group)

    @property
    def weight(self) -> nn.Parameter:
        module = self.embedding or self.head
        assert module is not None
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        return weight


def tie_ends(
    modules: Mapping[int, nn.Module],
    placement: tuple[int, ...],
    group: dist.ProcessGroup,
    *,
    embedding: str = "embedding",
    head: str = "head",
) -> TiedEnds | None:
    """Ties the ends of a pipeline whose stages ``modules`` are here; None on ranks between them.

    Call when the parameters have their local shapes, after tensor and before data parallelism. A head's own copy is
    noted as not counted: the norm of the gradients counts the embedding's.
    """
    last = len(placement) - 1
    first_part = modules[0].get_submodule(embedding) if 0 in modules else None
    last_part = modules[last].get_submodule(head) if last in modules else None
    if first_part is None and last_part is None:
        return None
    if first_part is None or last_part is None:
        if last_part is not None:
            note_part(last_part, "weight", replace(part_of(last_part, "weight"), counted=False))
        return TiedEnds(first_part, last_part, _pair(group, placement[0], placement[last]))
    tied = TiedEnds(first_part, last_part, None)
    del last_part.weight
    tied.follow()
    modules[last].register_forward_pre_hook(lambda *_: tied.follow())
    return tied


def _pair(group: dist.ProcessGroup, first: int, last: int) -> dist.ProcessGroup:
    """Only the two ends make this group; the ranks between them take no part."""
    ranks = [dist.get_global_rank(group, rank) for rank in (first, last)]
    pair: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, group_desc="tied embedding")
    return pair
