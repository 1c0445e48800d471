"""The undivided network: every tensor put together on rank 0, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.parameters import HeldPart, plain_name
from shardwise.engine.torch_private import persistent_buffers

Described = Sequence[dict[str, tuple[HeldPart, torch.dtype]]]  # of every rank, what it holds


@dataclass(frozen=True)
class HeldPiece:
    """A rank's part of a tensor; ``read`` fetches it, wherever it is stored."""

    part: HeldPart
    dtype: torch.dtype
    read: Callable[[], Tensor]


def whole_tensors(pieces: dict[str, HeldPiece], aliases: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """On rank 0 every tensor of the network by its name, on the CPU; on the others nothing, but they have to iterate.

    ``pieces`` are this rank's; ``aliases`` are second names of the same tensors.
    """
    rank = dist.get_rank()
    described: list[dict[str, tuple[HeldPart, torch.dtype]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(described, {name: (one.part, one.dtype) for name, one in pieces.items()})
    for name in dict.fromkeys(name for one in described for name in one):
        mine = pieces[name].read().detach() if name in pieces else None
        if isinstance(mine, DTensor):
            mine = mine.full_tensor()  # together with all ranks that share it
        owners = _owners(name, described)
        if rank == 0:
            whole = _collected(name, owners, described, mine)
            yield name, whole
            yield from ((other, whole) for other, first in aliases.items() if first == name)
        elif rank in owners and mine is not None:
            dist.send(mine.contiguous(), 0)


def _owners(name: str, described: Described) -> list[int]:
    """The first rank that holds each part."""
    found: dict[object, int] = {}
    for rank, one in enumerate(described):
        if name in one:
            found.setdefault(one[name][0].cuts, rank)
    return list(found.values())


def _collected(name: str, owners: Sequence[int], described: Described, mine: Tensor | None) -> Tensor:
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu") if mine is None else mine.device
    first, dtype = described[owners[0]][name]
    whole = torch.empty(first.shape, dtype=dtype)
    for owner in owners:
        part, _ = described[owner][name]
        if owner == 0:
            assert mine is not None
            local = mine
        else:
            local = torch.empty(part.local_shape, dtype=dtype, device=device)
            dist.recv(local, owner)
        part.put(local.cpu(), whole)
    return whole


def kept_buffers(root: nn.Module) -> dict[str, HeldPiece]:
    """Buffers that a state dict holds; they are whole on every rank."""
    return {
        plain_name(f"{prefix}.{name}" if prefix else name): HeldPiece(
            HeldPart(tuple(buffer.shape)), buffer.dtype, buffer.detach
        )
        for prefix, module in root.named_modules()
        for name, buffer in persistent_buffers(module).items()
    }


def second_names(module: nn.Module) -> dict[str, str]:
    """Names of tied parameters beyond their first."""
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            others[name] = known
    return others
