"""Loading: once everything is checked, each rank reads the boxes it holds from whatever boxes were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.trainer import Trainer
from shardwise.run.checkpoint.checkpoint_folder import CheckpointFolder, step_of
from shardwise.run.checkpoint.manifest import NAME, TO_RESUME, Manifest, read_manifest
from shardwise.run.storage.place import Place
from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.shards import (
    AnyShardReader,
    content_problem,
    header_problem,
    open_shards,
    size_problem,
)
from shardwise.training.checkpoint.state import (
    BUFFER,
    WEIGHT,
    StateTensor,
    prepare_to_load,
    restore_numbers,
    state_tensors,
)

_OF_MODEL = (WEIGHT, BUFFER)
_WEIGHTS = tuple(f"{kind}/" for kind in _OF_MODEL)
_TRAINED = "use the model that was trained"
_MISSING = "use its optimizer and strategy.synchronise, or start from its weights in another folder: run.start_from"


def problems_of(
    folder: Place,
    *,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int], None] = lambda size: None,
    contents: bool = True,
) -> list[str]:
    """What is wrong with a checkpoint's files; several ranks share the work.

    Without ``contents`` only which files exist, their sizes and their headers are checked, which is quick.
    """
    try:
        manifest = read_manifest(folder)
    except SpecError as error:
        return [str(error)]
    if step_of(folder) not in (None, manifest.step):
        return [f"{folder}: is of step {manifest.step:,}, not of the step in its name"]
    if missing := _missing(manifest):
        return [f"{folder / NAME}: does not say where the run was: it has no {', '.join(missing)}"]
    mine = sorted(manifest.files)[rank::world]
    entries, problems = manifest.entries(), []
    for name in mine:
        path, wanted = folder / name, manifest.files[name]
        damaged = content_problem(path, wanted, progress) if contents else size_problem(path, wanted)
        if problem := damaged or header_problem(path, entries[name]):
            problems.append(f"{path}: {problem}")
    return problems


def require_intact(folder: Place, field: str = "", *, contents: bool = True) -> Manifest:
    """The manifest of a checkpoint; raises SpecError with the first problem of its files."""
    for problem in problems_of(folder, contents=contents):
        raise SpecError(field, problem, "take another checkpoint")
    return read_manifest(folder)


def _missing(manifest: Manifest) -> list[str]:
    """The numbers that a run needs but a checkpoint lacks; a weights-only checkpoint is complete without any."""
    alone = not manifest.numbers and all(key.startswith(_WEIGHTS) for key in manifest.tensors)
    return [] if alone else [name for name in TO_RESUME if name not in manifest.numbers]


def newest_intact(
    folders: Sequence[CheckpointFolder], on_damaged: Callable[[str], None] = lambda text: None
) -> Place | None:
    """The newest intact checkpoint, checked by all ranks together; ``on_damaged`` gets every problem.

    If several folders have the same step, the first folder's is taken.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    there = [(step, -number) for number, folder in enumerate(folders) for step in folder.committed()]
    listed: list[Any] = [sorted(there, reverse=True)]
    dist.broadcast_object_list(listed)
    for step, number in listed[0]:
        of_ranks: list[Any] = [None] * world
        path: Place = folders[-number].of_step(step)
        own = [f"{path}: is a link"] if path.is_symlink() else problems_of(path, rank=rank, world=world)
        dist.all_gather_object(of_ranks, own)
        problems = [problem for some in of_ranks for problem in some]
        if not problems:
            return path
        for problem in dict.fromkeys(problems):
            on_damaged(problem)
    return None


@torch.no_grad()
def load(trainer: Trainer[Any], folder: Place, *, weights_only: bool = False) -> Manifest:
    """Fills a trainer of any layout; raises SpecError, before a tensor is touched, for another model's checkpoint."""
    manifest = read_manifest(folder)
    if not weights_only:
        require_run(manifest, folder)
        prepare_to_load(trainer, manifest.numbers)
    wanted = state_tensors(trainer)
    if weights_only:
        wanted = [replace(tensor, worker=0) for tensor in wanted if tensor.key.startswith(_WEIGHTS)]
    there = {key: full.shape for key, full in manifest.tensors.items()}
    wanted = [tensor for tensor in wanted if not tensor.optional or there.get(tensor.saved_as) == tensor.shape]
    require_tensors(manifest, ((tensor.saved_as, tensor.shape) for tensor in wanted), folder)
    reader = open_shards(folder)
    try:
        for tensor in wanted:
            _read(tensor, manifest, reader)
    finally:
        reader.close()
    if weights_only:
        trainer.on_weights_loaded()
    else:
        restore_numbers(trainer, manifest.numbers)
    return manifest


def require_run(manifest: Manifest, folder: Place) -> None:
    """Raises SpecError if a checkpoint holds weights only, so that no run can resume from it."""
    if not manifest.numbers:
        remedy = "start from them in another folder: run.start_from"
        raise SpecError(str(folder), "holds weights only: no run can resume from them", remedy)


def require_tensors(manifest: Manifest, wanted: Iterable[tuple[str, tuple[int, ...]]], folder: Place) -> None:
    """Raises SpecError if one of ``wanted`` is missing from a checkpoint, or has another shape."""
    for key, shape in wanted:
        full = manifest.tensors.get(key)
        if full is None:
            kind, _, name = key.partition("/")
            raise SpecError(str(folder), f"has no {kind} of {name}", _MISSING if kind not in _OF_MODEL else _TRAINED)
        if full.shape != shape:
            problem = f"{key} has the shape {list(full.shape)}, this model's is {list(shape)}"
            raise SpecError(str(folder), problem, _TRAINED)


def _read(wanted: StateTensor, manifest: Manifest, reader: AnyShardReader) -> None:
    """Fills a tensor from the pieces that overlap it, which cover it: `read_manifest` has checked that."""
    pieces, tensor = manifest.tensors[wanted.saved_as].pieces, wanted.read()
    for place in wanted.places:
        for piece in pieces:
            common = place.box.common(piece.box)
            if common is None:
                continue
            part = reader.slice_of(piece.file, piece.entry, piece.box.shape, common.inside(piece.box))
            tensor[place.local][common.inside(place.box)] = part.to(tensor.device, tensor.dtype)
    wanted.write(tensor)
