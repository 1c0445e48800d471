"""The parameters of a rank and their gradients after the backward pass: sums that are still missing.

Everything works on local tensors, a few calls for all parameters together, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.names import sent
from shardwise.engine.parts import Part, parts_of, plain_name
from shardwise.engine.reductions import all_reduce_sum


@dataclass(frozen=True)
class Held:
    """A parameter of this rank: its name in the whole model, what part it is, and the tensor to train."""

    name: str
    part: Part
    parameter: nn.Parameter

    @property
    def gradient(self) -> Tensor | None:
        return None if self.parameter.grad is None else local(self.parameter.grad)


def held(chunks: Iterable[nn.Module]) -> list[Held]:
    """All parameters of a rank's stages, each once."""
    found: dict[int, Held] = {}
    for chunk in chunks:
        parts = parts_of(chunk)
        for name, parameter in chunk.named_parameters():
            found.setdefault(id(parameter), Held(plain_name(name), parts[plain_name(name)], parameter))
    return list(found.values())


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that data parallelism may have divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks_with_copy(part: Part, mesh: Mesh) -> int:
    """Ranks of the world that hold the same elements of a gradient; 0 for the twin of a tied parameter."""
    replicas = mesh.size("expert_replicate" if part.expert else "replicate")
    return part.copies * replicas if part.counted else 0


def sum_partial(parameters: Sequence[Held], mesh: Mesh) -> None:
    """Completes the gradients of whole parameters of which each rank has seen some tokens or heads only."""
    groups = sorted({one.part.partial for one in parameters if one.part.partial})
    for group in groups:
        mine = [one.gradient for one in parameters if one.part.partial == group]
        for same_type in _by_type([one for one in mine if one is not None]):
            _sum_together(same_type, mesh.group(group))


def _by_type(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    for dtype in sorted({one.dtype for one in tensors}, key=str):
        yield [one for one in tensors if one.dtype == dtype]


def _sum_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([one.flatten() for one in tensors])
    with sent("tp", Called.WHOLE_GRADIENTS, flat):
        all_reduce_sum(flat, group)
    sizes = [one.numel() for one in tensors]
    torch._foreach_copy_([one.view(-1) for one in tensors], list(torch.split(flat, sizes)))
