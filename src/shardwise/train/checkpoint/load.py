"""Loading: each rank reads the boxes it holds out of whatever boxes were saved, after everything was checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.trainer import Trainer
from shardwise.spec.errors import SpecError
from shardwise.train.checkpoint.folder import CheckpointFolder, step_of
from shardwise.train.checkpoint.manifest import NAME, Manifest, read_manifest
from shardwise.train.checkpoint.numbers import TO_RESUME
from shardwise.train.checkpoint.shards import ShardReader, checked, mislabelled
from shardwise.train.checkpoint.state import Kept, expect, kept, take_numbers

_WEIGHTS = ("weight/", "buffer/")


def problems_of(
    folder: Path, *, rank: int = 0, world: int = 1, progress: Callable[[int], None] = lambda size: None
) -> list[str]:
    """What is wrong with a checkpoint's files; of several ranks each looks at some of them."""
    try:
        manifest = read_manifest(folder)
    except SpecError as error:
        return [str(error)]
    if step_of(folder) not in (None, manifest.step):
        return [f"{folder}: is of step {manifest.step:,}, not of the step in its name"]
    if missing := _missing(manifest):
        return [f"{folder / NAME}: does not say where the run was: it has no {', '.join(missing)}"]
    mine = sorted(manifest.files)[rank::world]
    entries = manifest.entries()
    found = [
        (name, checked(folder / name, manifest.files[name], progress) or mislabelled(folder / name, entries[name]))
        for name in mine
    ]
    return [f"{folder / name}: {problem}" for name, problem in found if problem]


def _missing(manifest: Manifest) -> list[str]:
    """The numbers that a run needs and does not find; weights alone have none, and are whole."""
    alone = not manifest.numbers and all(key.startswith(_WEIGHTS) for key in manifest.tensors)
    return [] if alone else [name for name in TO_RESUME if name not in manifest.numbers]


def newest_good(folder: CheckpointFolder, say: Callable[[str], None] = lambda text: None) -> int | None:
    """The newest step whose checkpoint is whole, found by all ranks together; ``say`` hears of damaged ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    listed: list[Any] = [folder.committed()]
    dist.broadcast_object_list(listed)
    for step in listed[0]:
        found: list[Any] = [None] * world
        path = folder.of_step(step)
        own = [f"{path}: is a link"] if path.is_symlink() else problems_of(path, rank=rank, world=world)
        dist.all_gather_object(found, own)
        problems = [problem for some in found for problem in some]
        if not problems:
            return int(step)
        for problem in dict.fromkeys(problems):
            say(problem)
    return None


@torch.no_grad()
def load(trainer: Trainer[Any], folder: Path, *, weights_only: bool = False) -> Manifest:
    """Fills a trainer of any layout; raises SpecError, before a tensor is touched, for another model's checkpoint."""
    manifest = read_manifest(folder)
    if not weights_only:
        if not manifest.numbers:
            raise SpecError(
                str(folder), "holds weights alone: no run can resume from them", "start from them: run.start_from"
            )
        expect(trainer, manifest.numbers)
    wanted = [one for one in kept(trainer) if not weights_only or one.key.startswith(_WEIGHTS)]
    if weights_only:
        wanted = [replace(one, worker=0) for one in wanted]
    wanted = [one for one in wanted if not one.optional or _is_there(one, manifest)]
    _require_same_model(manifest, wanted, folder)
    reader = ShardReader(folder)
    try:
        for one in wanted:
            _read(one, manifest, reader, folder)
    finally:
        reader.close()
    if weights_only:
        trainer.weights_given()
    else:
        take_numbers(trainer, manifest.numbers)
    return manifest


def _is_there(one: Kept, manifest: Manifest) -> bool:
    whole = manifest.tensors.get(one.saved_as)
    return whole is not None and whole.shape == one.shape


def _require_same_model(manifest: Manifest, wanted: Sequence[Kept], folder: Path) -> None:
    for one in wanted:
        whole = manifest.tensors.get(one.saved_as)
        if whole is None:
            kind, _, name = one.saved_as.partition("/")
            remedy = "the model, or the optimizer, of the checkpoint is another: start from its weights (start_from)"
            raise SpecError(str(folder), f"has no {kind} of {name}", remedy)
        if whole.shape != one.shape:
            problem = f"{one.key} has the shape {list(whole.shape)}, this model's is {list(one.shape)}"
            raise SpecError(str(folder), problem, "use the model that was trained")


def _read(one: Kept, manifest: Manifest, reader: ShardReader, folder: Path) -> None:
    pieces, tensor = manifest.tensors[one.saved_as].pieces, one.read()
    for place in one.places:
        found = 0
        for piece in pieces:
            common = place.box.common(piece.box)
            if common is None:
                continue
            part = reader.slice_of(piece.file, piece.entry, piece.box.shape, common.inside(piece.box))
            tensor[place.local][common.inside(place.box)] = part.to(tensor.device, tensor.dtype)
            found += common.elements
        if found != place.box.elements:
            raise SpecError(str(folder), f"lacks a part of {one.saved_as}", "take another checkpoint")
    one.write(tensor)
