"""DeepSpeed folders: fp32 weights from the flat partitions that ZeRO keeps on every rank.

The format is that of DeepSpeed's own ``zero_to_fp32.py``. Stages 1 and 2 flatten all parameters of a group and split
them into one piece per rank, padded at the end to a multiple of 2·ranks elements. Stage 3 splits every parameter
separately, padded to a multiple of the ranks; a rank's pieces lie end to end in its groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.units import counted
from shardwise.training.checkpoint.full_tensors import LazyTensor
from shardwise.training.convert.torch_file import read_torch_file
from shardwise.training.convert.weights import Description, Weights, lazily, named_weights, tensors_in

LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OTHERS = re.compile(r"layer_\d+.*\.pt|.*expert.*\.pt")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AGAIN = "save the checkpoint again"


def is_deepspeed(folder: Path) -> bool:
    return (folder / LATEST).is_file() or any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def deepspeed_weights(source: Path, about: Description | None) -> Weights:
    """The weights of the newest step; raises SpecError for tensor or pipeline parallelism and for experts."""
    folder = _step_folder(source)
    models, optimizers = _files(folder)
    state = _mapping(read_torch_file(models[0]), models[0])
    step = state.get("global_steps")
    step = step if type(step) is int and step >= 0 else 0
    if not optimizers:
        origin = f"the DeepSpeed folder {folder}"
        return named_weights(tensors_in(state, str(models[0])), about, origin, step)
    zero = _partitions(optimizers)
    tensors = {**_buffers(state, models[0]), **_frozen(zero, models, state), **_trained(zero, state, models[0])}
    for alias, name in _mapping(state.get("shared_params") or {}, models[0]).items():
        if name in tensors:
            tensors[alias] = tensors[name]
    ranks = counted(len(zero.groups), "rank")
    return named_weights(tensors, about, f"the DeepSpeed folder {folder} (ZeRO-{zero.stage}, {ranks})", step)


def _step_folder(source: Path) -> Path:
    latest = source / LATEST
    if not latest.is_file():
        return source
    tag = latest.read_bytes()[:200].decode(errors="replace").strip()
    if not _TAG.fullmatch(tag) or not (source / tag).is_dir():
        raise SpecError(str(latest), f"names {shown(tag)}, which is not a folder beside it", "name the step's folder")
    return source / tag


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of model and optimizer states, in the order of the ranks."""
    models: dict[int, Path] = {}
    optimizers: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        for pattern, into in ((_MODEL, models), (_OPTIMIZER, optimizers)):
            if match := pattern.fullmatch(path.name):
                if int(match[2]) > 0:
                    raise SpecError(str(path), "is of tensor parallelism, which is not merged", "save it with tp 1")
                into[int(match[1] or 0)] = path
        if _OTHERS.fullmatch(path.name):
            problem = "is of a pipeline or of experts, which are not merged"
            raise SpecError(str(path), problem, "save it without them")
    for into in (models, optimizers):
        if sorted(into) != list(range(len(into))):
            missing = min(set(range(len(into))) - into.keys())
            raise SpecError(str(folder), f"lacks the states of rank {missing}", _AGAIN)
    if not models:
        raise SpecError(str(folder), "has no mp_rank_00_model_states.pt", "name the folder that deepspeed has saved")
    return [models[rank] for rank in sorted(models)], [optimizers[rank] for rank in sorted(optimizers)]


@dataclass(frozen=True)
class _Zero:
    """``groups`` are the flat fp32 partitions of each rank."""

    stage: int
    groups: list[list[Tensor]]
    where: Path


def _partitions(paths: Sequence[Path]) -> _Zero:
    stages, groups = set(), []
    for path in paths:
        state = _mapping(_mapping(read_torch_file(path), path).get("optimizer_state_dict"), path)
        stage, ranks = state.get("zero_stage"), state.get("partition_count")
        if stage not in (1, 2, 3):
            raise SpecError(str(path), f"is of the unknown ZeRO stage {shown(stage)}", "stages 1, 2 and 3 are read")
        ranks = max(ranks, default=0) if isinstance(ranks, list) and all(type(rank) is int for rank in ranks) else ranks
        if ranks != len(paths):
            raise SpecError(str(path), f"is one of {shown(ranks)}, and {len(paths)} are there", _AGAIN)
        flat = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
        if not isinstance(flat, list) or not all(
            isinstance(partition, Tensor) and partition.dim() == 1 for partition in flat
        ):
            raise SpecError(str(path), "has no flat fp32 partitions", _AGAIN)
        stages.add(stage)
        groups.append(flat)
    if len(stages) > 1 or len({len(flat) for flat in groups}) > 1:
        raise SpecError(str(paths[0]), "and the other ranks' files are not of one checkpoint", _AGAIN)
    return _Zero(stages.pop(), groups, paths[0])


def _trained(zero: _Zero, state: Mapping[str, Any], path: Path) -> dict[str, LazyTensor]:
    shapes = state.get("param_shapes")
    if not isinstance(shapes, list) or not shapes:
        raise SpecError(str(path), "does not say which parameters there are (param_shapes)", _AGAIN)
    groups = [_shapes(shape, path) for shape in shapes]
    if zero.stage == 3:
        return _laid_out(zero, zero.groups, 1, {name: shape for group in groups for name, shape in group.items()})
    if len(groups) != len(zero.groups[0]):
        raise SpecError(str(path), f"names {len(groups)} groups, the partitions are of {len(zero.groups[0])}", _AGAIN)
    tensors: dict[str, LazyTensor] = {}
    for number, group in enumerate(groups):
        tensors |= _laid_out(zero, [[flat[number] for flat in zero.groups]], 2 * len(zero.groups), group)
    return tensors


def _laid_out(
    zero: _Zero, sources: Sequence[list[Tensor]], multiple: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    """Parameters split evenly over sources, in each of which they lie end to end, padded to a multiple."""
    sizes = {name: -(-math.prod(shape) // len(sources)) for name, shape in shapes.items()}
    needed = sum(sizes.values())
    for parts in sources:
        stored = sum(part.numel() for part in parts)
        if stored < needed or -(-stored // multiple) != -(-needed // multiple):
            problem = f"holds {stored:,} elements where the parameters make {needed:,}"
            raise SpecError(str(zero.where), problem, "the files are not of one checkpoint")
    tensors, at = {}, 0
    for name, shape in shapes.items():
        tensors[name] = _cut(shape, sources[0][0].dtype, [(parts, at, sizes[name]) for parts in sources])
        at += sizes[name]
    return tensors


def _cut(shape: tuple[int, ...], dtype: torch.dtype, ranges: Sequence[tuple[list[Tensor], int, int]]) -> LazyTensor:
    """A tensor made of ranges (parts, first, size): elements from ``first`` on of parts laid end to end."""

    def read() -> Tensor:
        pieces = [piece for parts, first, size in ranges for piece in _range(parts, first, size)]
        return torch.cat(pieces)[: math.prod(shape)].view(shape)

    return LazyTensor(shape, dtype, read)


def _range(parts: list[Tensor], first: int, size: int) -> list[Tensor]:
    pieces, at = [], 0
    for part in parts:
        low, high = max(first - at, 0), min(first + size - at, part.numel())
        if low < high:
            pieces.append(part[low:high])
        at += part.numel()
    return pieces or [parts[0][:0]]


def _frozen(zero: _Zero, models: Sequence[Path], state: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Parameters that were not trained: stored in full, or under stage 3 as a piece on every rank."""
    shapes = _shapes(state.get("frozen_param_shapes") or {}, models[0])
    if not shapes:
        return {}
    states = [state]
    if zero.stage == 3:
        states += [_mapping(read_torch_file(path), path) for path in models[1:]]
    held = [_mapping(state.get("frozen_param_fragments"), models[0]) for state in states]
    tensors = {}
    for name, shape in shapes.items():
        pieces = [fragments.get(name) for fragments in held]
        flat = [piece.flatten() for piece in pieces if isinstance(piece, Tensor)]
        if len(flat) < len(held) or sum(piece.numel() for piece in flat) < math.prod(shape):
            raise SpecError(name, f"is not whole in {models[0].parent}", _AGAIN)
        tensors[name] = _cut(shape, flat[0].dtype, [(flat, 0, sum(piece.numel() for piece in flat))])
    return tensors


def _buffers(state: Mapping[str, Any], path: Path) -> dict[str, LazyTensor]:
    names = state.get("buffer_names")
    module = _mapping(state.get("module"), path)
    if not isinstance(names, list):
        return {}
    return {
        name: lazily(buffer.float()) for name, buffer in module.items() if name in names and isinstance(buffer, Tensor)
    }


def _shapes(group: Any, path: Path) -> dict[str, tuple[int, ...]]:
    shapes = _mapping(group, path)
    for name, shape in shapes.items():
        if not isinstance(shape, tuple) or any(type(size) is not int or size < 0 for size in shape):
            raise SpecError(str(path), f"has no shape of {shown(name)}", _AGAIN)
    return {str(name): shape for name, shape in shapes.items()}


def _mapping(value: Any, path: Path) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise SpecError(str(path), "does not hold what DeepSpeed saves there", "name the folder that it has saved")
    return value
