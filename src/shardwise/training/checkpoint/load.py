"""Loading: once everything is checked, each rank reads the boxes it holds from whatever boxes were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.optim.optimizer import kind_for
from shardwise.engine.optim.updates import STATES
from shardwise.engine.trainer import Trainer
from shardwise.interop.companions import CONFIG
from shardwise.models.adapters import add_adapters
from shardwise.models.decoder import Decoder
from shardwise.models.huggingface import open_folder
from shardwise.models.layer import is_of_prediction
from shardwise.run.checkpoint.checkpoint_folder import CheckpointFolder, step_of
from shardwise.run.checkpoint.folder import huggingface_at, start_at
from shardwise.run.checkpoint.manifest import BASE, NAME, TO_RESUME, Manifest, read_manifest
from shardwise.run.storage.place import Place
from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import Adapters
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.training.checkpoint.base import fingerprint_of, require_base, require_whole
from shardwise.training.checkpoint.shards import (
    ShardReader,
    content_problem,
    header_problem,
    size_problem,
)
from shardwise.training.checkpoint.state import (
    BUFFER,
    OUTER,
    OWN_STEPS,
    WEIGHT,
    StateTensor,
    first_tensors,
    is_saved,
    lasting_buffers,
    late_name,
    restore_numbers,
    saved_name,
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
    alone = manifest.numbers.keys() <= {BASE} and all(key.startswith(_WEIGHTS) for key in manifest.tensors)
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
        if trainer.late is not None:  # their number varies
            trainer.late.expect(int(manifest.numbers.get("late_sums", 0)))
        require_base(manifest.numbers.get(BASE), trainer.base, folder, trainer.job)
    else:
        require_whole(manifest, folder)
    wanted = first_tensors(trainer) if weights_only else state_tensors(trainer)
    there = {key: full.shape for key, full in manifest.tensors.items()}
    wanted = [tensor for tensor in wanted if not tensor.optional or there.get(tensor.saved_as) == tensor.shape]
    require_tensors(manifest, ((tensor.saved_as, tensor.shape) for tensor in wanted), folder)
    reader = ShardReader(folder)
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
    if manifest.numbers.keys() <= {BASE}:
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


def _read(wanted: StateTensor, manifest: Manifest, reader: ShardReader) -> None:
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


# -- checks before a process starts: whether there is every tensor that the ranks will read ----------
# Only the headers of files are read; contents and checksums are left to the ranks.

Shapes = dict[str, tuple[int, ...]]


def require_resumable(job: Job, folder: CheckpointFolder) -> None:
    """Raises SpecError if the newest checkpoint of a run is intact, but the job cannot resume from it."""
    for step in folder.committed():
        path = folder.of_step(step)
        if path.is_symlink() or problems_of(path, contents=False):
            continue  # the ranks will report it and use an older one
        manifest = read_manifest(path)
        require_run(manifest, path)
        now = fingerprint_of(job, frozen_names(job)) if job.training.freezes else None
        require_base(manifest.numbers.get(BASE), now, path, job)
        require_tensors(manifest, tensors_of(job).items(), path)
        return


def require_weights(model: Model, source: Place) -> None:
    """Raises SpecError if a path to start from lacks weights of a model."""
    start = start_at(source)
    huggingface = huggingface_at(start)
    if huggingface is not None:
        _require_huggingface(model, huggingface)
        return
    manifest = require_intact(start, "run.start_from", contents=False)
    require_whole(manifest, start)
    require_tensors(manifest, weights_of(model).items(), start)


def _require_huggingface(model: Model, path: Path) -> None:
    folder = open_folder(path)
    theirs: Shapes = {name: place.shape for name, place in folder.naming.places.items()}
    if model.mtp_layers == 0:  # stored prediction modules are ignored
        theirs = {name: shape for name, shape in theirs.items() if not is_of_prediction(name, folder.model)}
    elif folder.model.mtp_layers != model.mtp_layers:
        problem = f"{path} stores {folder.model.mtp_layers} prediction modules, the job's model has {model.mtp_layers}"
        raise SpecError("run.start_from", problem, f"model.mtp_layers: {folder.model.mtp_layers}")
    mine = {key.partition("/")[2]: shape for key, shape in weights_of(model).items()}
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            here, there = (
                f"the shape {list(shapes[name])}" if name in shapes else "no place" for shapes in (mine, theirs)
            )
            problem = f"{name} has {there} in {path}, and {here} in the job's model"
            raise SpecError("run.start_from", problem, f"model: {path / CONFIG}")
        folder.require(name)


def tensors_of(job: Job) -> Shapes:
    """All tensors that the ranks of a job must find in a checkpoint of their run."""
    strategy, everything = job.strategy, weights_of(job.model)
    weights = {key: shape for key, shape in everything.items() if is_saved(job, key.partition("/")[2])}
    synchronise, workers = strategy.synchronise, strategy.data_parallel
    # Each parameter's weight and optimizer states: (name in a checkpoint, shape, name of the parameter).
    own = [
        (f"{state}/{name}", tuple(parameter.shape), name)
        for name, parameter in _empty(job.model, job.training.adapters).named_parameters()
        if is_saved(job, name)
        for state in (WEIGHT, *STATES[kind_for(name, parameter, job.training.optimizer)])
    ]
    weights |= {key: shape for key, shape, _ in own}
    if synchronise.every_step or workers == 1:
        return weights
    trained = [(name, shape) for key, shape, name in own if key.startswith(f"{WEIGHT}/")]
    late = [late_name(age) for age in range(synchronise.staleness)] if synchronise.is_async else []
    outer = OUTER if synchronise.method == "diloco" else ()
    weights |= {f"{state}/{name}": shape for state in (*late, *outer) for name, shape in trained}
    for worker in range(1, workers if synchronise.is_local else 1):
        weights |= {saved_name(key, worker): shape for key, shape, _ in own}
        weights[saved_name(OWN_STEPS, worker)] = (1,)
    return weights


def weights_of(model: Model) -> Shapes:
    """The shapes of the model's weights and buffers, by their names in a checkpoint."""
    decoder = _empty(model)
    weights = {f"{WEIGHT}/{name}": tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    return weights | {f"{BUFFER}/{name}": tuple(buffer.shape) for name, buffer in lasting_buffers(decoder)}


def frozen_names(job: Job) -> list[str]:
    """The weights of a job's model that it does not train."""
    return [name for name, _ in _empty(job.model).named_parameters() if not is_saved(job, name)]


@lru_cache(maxsize=2)
def _empty(model: Model, adapters: Adapters | None = None) -> Decoder:
    """The unsharded model, without values."""
    with torch.device("meta"):
        decoder = Decoder(model)
    if adapters is not None:
        add_adapters(decoder, adapters)
    return decoder
