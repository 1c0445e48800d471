"""What a rank holds of every parameter of the whole model: written down where it is cut, read by all others.

Initial values, checkpoints, the gradient norm and `verify` need to know which elements of the undivided parameter a
local tensor is; data parallelism (`fully_shard`) divides further what is described here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

_NOTES = "_shardwise_parts"
# What recompute and compilation put into the names of parameters.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Cut:
    """Elements ``start`` to ``stop`` of one dimension; what lies beyond the whole parameter is padding.

    ``blocks``: the dimension is that many equal parts one behind the other, and these elements are taken of each.
    """

    dimension: int
    start: int
    stop: int
    blocks: int = 1


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter.

    ``copies``: ranks inside one data-parallel replica that hold the same elements (1 where each holds others).
    ``partial``: the mesh group over whose ranks the gradient is still to be summed after the backward pass, since each
    has seen only some of the tokens or heads. ``counted`` is false for a second copy of a tied parameter.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    copies: int = 1
    partial: str | None = None
    expert: bool = False
    counted: bool = True

    def cut(self, dimension: int, start: int, stop: int, blocks: int = 1) -> Part:
        return replace(self, cuts=(*self.cuts, Cut(dimension, start, stop, blocks)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what this rank holds, padding included."""
        shape = list(self.shape)
        for one in self.cuts:
            shape[one.dimension] = (one.stop - one.start) * one.blocks
        return tuple(shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of the whole tensor; padding is zero."""
        for one in self.cuts:
            if one.blocks > 1:
                blocks = whole.chunk(one.blocks, one.dimension)
                pieces = [block.narrow(one.dimension, one.start, one.stop - one.start) for block in blocks]
                whole = torch.cat(pieces, one.dimension)
                continue
            stop = min(one.stop, whole.shape[one.dimension])
            present = max(0, stop - one.start)
            piece = whole.narrow(one.dimension, min(one.start, whole.shape[one.dimension] - present), present)
            missing = one.stop - one.start - present
            if missing:
                shape = list(piece.shape)
                shape[one.dimension] = missing
                piece = torch.cat([piece, piece.new_zeros(shape)], one.dimension)
            whole = piece
        return whole

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes this part into the whole tensor, without its padding."""
        for number, one in enumerate(self.cuts):
            if one.blocks > 1:
                inside = Part(self._of_block(one), (replace(one, blocks=1), *self.cuts[number + 1 :]))
                for piece, block in zip(local.chunk(one.blocks, one.dimension), whole.chunk(one.blocks, one.dimension)):
                    inside.put(piece, block)
                return
            present = max(0, min(one.stop, self.shape[one.dimension]) - one.start)
            start = min(one.start, self.shape[one.dimension] - present)
            whole = whole.narrow(one.dimension, start, present)
            local = local.narrow(one.dimension, 0, present)
        whole.copy_(local)

    def _of_block(self, one: Cut) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[one.dimension] //= one.blocks
        return tuple(shape)


def note_part(module: nn.Module, name: str, part: Part) -> None:
    """Writes down what the parameter ``name`` of this very module holds."""
    module.__dict__.setdefault(_NOTES, {})[name] = part


def has_note(module: nn.Module, name: str) -> bool:
    return name in module.__dict__.get(_NOTES, {})


def part_of(module: nn.Module, name: str) -> Part:
    """What was written down, else the whole parameter, the same on every rank of a replica."""
    notes: dict[str, Part] = module.__dict__.get(_NOTES, {})
    return notes.get(name) or Part(tuple(getattr(module, name).shape))


def plain_name(name: str) -> str:
    """A parameter's name in the undivided, unwrapped model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parts_of(root: nn.Module) -> dict[str, Part]:
    """Every parameter of this rank by its plain name; a parameter shared under two names is listed once."""
    found: dict[str, Part] = {}
    seen: set[int] = set()
    for prefix, module in root.named_modules(remove_duplicate=True):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=True):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            found[plain_name(f"{prefix}.{name}" if prefix else name)] = part_of(module, name)
    return found
