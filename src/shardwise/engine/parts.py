"""What a rank holds of every parameter of the whole model: written down where it is cut, read by all others.

Initial values, checkpoints, the gradient norm and `verify` need to know which elements of the undivided parameter a
local tensor is; data parallelism (`fully_shard`) divides further what is described here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

_NOTES = "_shardwise_parts"
# What recompute and compilation put into the names of parameters.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Cut:
    """Runs of elements, each from a start to a stop, of one dimension; what lies beyond the whole is padding."""

    dimension: int
    runs: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.runs)


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
        """Elements ``start`` to ``stop`` of each of so many equal blocks that a dimension consists of."""
        each = self.shape[dimension] // blocks
        return self.take(dimension, [(block * each + start, block * each + stop) for block in range(blocks)])

    def take(self, dimension: int, runs: Iterable[tuple[int, int]]) -> Part:
        return replace(self, cuts=(*self.cuts, Cut(dimension, tuple(runs))))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what this rank holds, padding included."""
        shape = list(self.shape)
        for one in self.cuts:
            shape[one.dimension] = one.size
        return tuple(shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of the whole tensor; padding is zero."""
        for one in self.cuts:
            pieces = [_run_of(whole, one.dimension, start, stop) for start, stop in one.runs]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, one.dimension)
        return whole

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes this part into the whole tensor, without its padding."""
        if not self.cuts:
            whole.copy_(local)
            return
        one, rest, at = self.cuts[0], replace(self, cuts=self.cuts[1:]), 0
        for start, stop in one.runs:
            first, present = _inside(whole.shape[one.dimension], start, stop)
            rest.put(local.narrow(one.dimension, at, present), whole.narrow(one.dimension, first, present))
            at += stop - start


def _inside(size: int, start: int, stop: int) -> tuple[int, int]:
    """Where the elements of a run that exist begin, and how many they are."""
    present = max(0, min(stop, size) - start)
    return min(start, size - present), present


def _run_of(whole: torch.Tensor, dimension: int, start: int, stop: int) -> torch.Tensor:
    first, present = _inside(whole.shape[dimension], start, stop)
    piece = whole.narrow(dimension, first, present)
    missing = stop - start - present
    if not missing:
        return piece
    shape = list(piece.shape)
    shape[dimension] = missing
    return torch.cat([piece, piece.new_zeros(shape)], dimension)


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
