"""The parameters of a rank: which part it holds of each, their initial values, and partial gradients to be summed.

Initial values, checkpoints, the gradient norm and `verify` need to know which elements of the undivided parameter a
local tensor is; data parallelism (`fully_shard`) divides further what is described here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.collectives.reductions import all_reduce_sum, split_like
from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.torch_private import compute_local_shape_and_global_offset, foreach_copy_
from shardwise.models.decoder import initial_value, is_stack_of_experts
from shardwise.models.stored import StoredWeight, fill_stored
from shardwise.models.weight_formats import Region, require_whole_blocks
from shardwise.spec.model import Model

_NOTES, _CODES = "_shardwise_parts", "_shardwise_codes"
# What recompute and compilation insert into the names of parameters.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Cut:
    """Runs of elements of one dimension, each from a start to a stop; beyond the whole tensor they are padding."""

    dimension: int
    runs: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True)
class HeldPart:
    """One rank's part of a parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    cuts: tuple[Cut, ...] = ()
    copies: int = 1  # ranks inside one data-parallel replica that hold the same elements
    partial: str | None = None
    """The mesh group over which the gradient has yet to be summed after the backward pass, because each rank has seen
    only some of the tokens or heads."""
    expert: bool = False
    counted: bool = True  # false for the second copy of a tied parameter

    def cut(self, dimension: int, start: int, stop: int, blocks: int = 1) -> HeldPart:
        """Elements ``start`` to ``stop`` of each of the equal ``blocks`` that a dimension consists of."""
        each = self.shape[dimension] // blocks
        return self.take(dimension, [(block * each + start, block * each + stop) for block in range(blocks)])

    def take(self, dimension: int, runs: Iterable[tuple[int, int]]) -> HeldPart:
        return replace(self, cuts=(*self.cuts, Cut(dimension, tuple(runs))))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this rank holds, padding included."""
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dimension] = cut.size
        return tuple(shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of the whole tensor; padding is zero."""
        for cut in self.cuts:
            pieces = [_run_of(whole, cut.dimension, start, stop) for start, stop in cut.runs]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dimension)
        return whole

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes this part into the whole tensor, without its padding."""
        if not self.cuts:
            whole.copy_(local)
            return
        cut, rest, at = self.cuts[0], replace(self, cuts=self.cuts[1:]), 0
        for start, stop in cut.runs:
            first, present = _inside(whole.shape[cut.dimension], start, stop)
            rest.put(local.narrow(cut.dimension, at, present), whole.narrow(cut.dimension, first, present))
            at += stop - start


def _inside(size: int, start: int, stop: int) -> tuple[int, int]:
    """Where the existing elements of a run begin, and how many there are."""
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


def note_part(module: nn.Module, name: str, part: HeldPart) -> None:
    """Notes which part the parameter ``name`` of this module is."""
    module.__dict__.setdefault(_NOTES, {})[name] = part


def keep(module: nn.Module, name: str, part: HeldPart) -> None:
    """Replaces a whole parameter by its part, and notes which."""
    whole = getattr(module, name)
    with torch.no_grad():
        local = part.of(whole.detach()).clone(memory_format=torch.contiguous_format)
    setattr(module, name, nn.Parameter(local, requires_grad=whole.requires_grad))
    note_part(module, name, part)


def has_note(module: nn.Module, name: str) -> bool:
    return name in module.__dict__.get(_NOTES, {})


def part_of(module: nn.Module, name: str) -> HeldPart:
    """What was noted, else the whole parameter, the same on every rank of a replica."""
    notes: dict[str, HeldPart] = module.__dict__.get(_NOTES, {})
    return notes.get(name) or HeldPart(tuple(getattr(module, name).shape))


def plain_name(name: str) -> str:
    """A parameter's name in the undivided, unwrapped model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parts_of(root: nn.Module) -> dict[str, HeldPart]:
    """Every parameter of this rank by its plain name; a parameter shared under two names is listed once."""
    parts: dict[str, HeldPart] = {}
    seen: set[int] = set()
    for prefix, module in root.named_modules(remove_duplicate=True):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=True):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            parts[plain_name(f"{prefix}.{name}" if prefix else name)] = part_of(module, name)
    return parts


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of this rank: its name in the whole model, what part it is, and the tensor to train."""

    name: str
    part: HeldPart
    parameter: nn.Parameter

    @property
    def gradient(self) -> Tensor | None:
        return None if self.parameter.grad is None else local(self.parameter.grad)


def held(chunks: Iterable[nn.Module]) -> list[HeldParameter]:
    """All parameters of a rank's stages, each once; but not the codes of stored weights (`stored_weights`)."""
    parameters: dict[int, HeldParameter] = {}
    for chunk in chunks:
        parts, codes = parts_of(chunk), set[int]()
        for module in chunk.modules():
            if isinstance(module, StoredWeight):
                codes.update(map(id, module.parameters()))
        for name, parameter in chunk.named_parameters():
            if id(parameter) in codes:
                continue
            parameters.setdefault(id(parameter), HeldParameter(plain_name(name), parts[plain_name(name)], parameter))
    return list(parameters.values())


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that data parallelism may have divided: the same memory, out of any graph."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def ranks_with_copy(part: HeldPart, mesh: Mesh) -> int:
    """Ranks of the world that hold the same elements of a gradient; 0 for the second copy of a tied parameter."""
    replicas = mesh.size("expert_replicate" if part.expert else "replicate")
    return part.copies * replicas if part.counted else 0


def sum_partial(parameters: Sequence[HeldParameter], mesh: Mesh) -> None:
    """Completes the gradients of whole parameters for which each rank has seen only some tokens or heads."""
    groups = sorted({parameter.part.partial for parameter in parameters if parameter.part.partial})
    for group in groups:
        mine = [parameter.gradient for parameter in parameters if parameter.part.partial == group]
        gradients = [gradient for gradient in mine if gradient is not None]
        for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
            _sum_together([gradient for gradient in gradients if gradient.dtype == dtype], mesh.group(group))


def _sum_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    with sent("tp", Called.WHOLE_GRADIENTS, flat):
        all_reduce_sum(flat, group)
    foreach_copy_(tensors, split_like(flat, tensors))


@dataclass(frozen=True)
class HeldCodes:
    """A frozen weight of this rank in fewer bits: of the whole ``name`` the matrices from ``first`` on."""

    name: str
    stored: StoredWeight
    shape: tuple[int, ...]  # of the whole
    first: int = 0

    def fill(self, slice_of: Callable[[str, tuple[slice, ...]], Tensor]) -> None:
        """Quantises it on the way from where ``slice_of`` reads slices of whole weights."""

        def read(matrix: int, region: Region) -> Tensor:
            rows, columns = slice(*region.rows), slice(*region.columns)
            if len(self.shape) == 2:
                return slice_of(self.name, (rows, columns))
            at = self.first + matrix
            return slice_of(self.name, (slice(at, at + 1), columns, rows))[0].T  # experts are [inputs, outputs] here

        def here(tensor: Tensor) -> tuple[Tensor, int]:
            if not isinstance(tensor, DTensor):
                return tensor.detach(), 0
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            return local(tensor), offset[0]

        fill_stored(self.stored, read, here)


def store(module: nn.Module, name: str, form: str) -> StoredWeight:
    """Takes a parameter that is cut already out of a module; the codes of what is left are to be filled."""
    part = part_of(module, name)
    runs = [(0, size) for size in part.shape]
    for cut in part.cuts:
        (runs[cut.dimension],) = cut.runs
    *experts, one, other = runs
    whole = (part.shape[-2], part.shape[-1])
    rows, columns = (other, one) if experts else (one, other)
    first, last = experts[0] if experts else (0, 1)
    whole = whole[::-1] if experts else whole
    require_whole_blocks(form, name, whole, Region(rows, columns))
    stored = StoredWeight(form, whole, Region(rows, columns), last - first)
    setattr(module, name, None)
    stored.__dict__[_CODES] = HeldCodes("", stored, part.shape, first)
    return stored


def stored_weights(chunks: Iterable[nn.Module]) -> Iterator[HeldCodes]:
    """The frozen weights of a rank's stages that are kept in fewer bits."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, StoredWeight):
                whole = plain_name(f"{name}.")[:-1].replace(".experts.stored.", ".experts.")
                yield replace(module.__dict__[_CODES], name=whole.replace(".stored", ".weight"))


Whole = Callable[[str, HeldPart], Tensor]


def materialise(root: nn.Module, device: torch.device) -> None:
    """Allocates parameters on the meta device; tied ones stay tied, which `nn.Module.to_empty` alone would undo."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    root.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            owner, _, own = name.rpartition(".")
            setattr(root.get_submodule(owner), own, root.get_parameter(first))


@torch.no_grad()
def initialise_parts(chunks: Iterable[nn.Module], model: Model, seed: int) -> None:
    """Gives parameters the values that `initialise` gives the whole model, one at a time; buffers become zero."""
    chunks = list(chunks)
    for chunk in chunks:
        for buffer in chunk.buffers():
            buffer.zero_()
    for target in held(chunks):
        fill(target, partial(_drawn, seed=seed, model=model, like=target.parameter))
    for codes in stored_weights(chunks):
        device = codes.stored.tensors["codes"].device
        codes.fill(partial(first_slice, shape=codes.shape, seed=seed, model=model, device=device))


@torch.no_grad()
def fill(target: HeldParameter, part_value: Whole) -> None:
    """Writes into the local tensor what ``part_value`` gives for its part of the model."""
    local(target.parameter).copy_(divided_as(target.parameter, part_value(target.name, target.part)))


def divided_as(tensor: Tensor, value: Tensor) -> Tensor:
    """The part of ``value`` that this rank holds of ``tensor``, which data parallelism may have divided."""
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        for dimension, (start, length) in enumerate(zip(offset, shape)):
            value = value.narrow(dimension, min(start, value.shape[dimension] - length), length)
    return value


def as_divided(values: Tensor, like: Tensor) -> Tensor:
    """This rank's ``values`` as a tensor divided like ``like``."""
    if not isinstance(like, DTensor):
        return values
    return DTensor.from_local(values, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def first_slice(
    name: str, slices: tuple[slice, ...], shape: tuple[int, ...], seed: int, model: Model, device: torch.device
) -> Tensor:
    """A slice of a weight's initial value; of stacked experts only those in it are drawn."""
    if not is_stack_of_experts(name):
        return initial_value(name, shape, seed, model, device=device)[slices]
    experts = range(shape[0])[slices[0]]
    return initial_value(name, shape, seed, model, device=device, experts=experts)[(slice(None), *slices[1:])]


def _drawn(name: str, part: HeldPart, seed: int, model: Model, like: Tensor) -> Tensor:
    """The part's initial values; of stacked experts only those held here are drawn."""
    draw = partial(initial_value, name, part.shape, seed, model, like.dtype, like.device)
    first, rest = part.cuts[:1], part.cuts[1:]
    if is_stack_of_experts(name) and first and first[0].dimension == 0:
        here = range(*first[0].runs[0])
        return replace(part, cuts=rest).of(draw(experts=here))
    return part.of(draw())
