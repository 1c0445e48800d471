"""Checks before a process starts: whether what a run loads has every tensor that its ranks will read.

Only the headers of files are read; contents and checksums are left to the ranks.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from shardwise.engine.optim.optimizer import kind_for
from shardwise.engine.optim.updates import STATES
from shardwise.interop.companions import CONFIG
from shardwise.models.decoder import Decoder
from shardwise.models.huggingface import open_folder
from shardwise.models.prediction import is_of_prediction
from shardwise.run.checkpoint.folder import CheckpointFolder, huggingface_at, start_at
from shardwise.run.checkpoint.manifest import read_manifest
from shardwise.run.storage.place import Place
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.training.checkpoint.load import problems_of, require_intact, require_run, require_tensors
from shardwise.training.checkpoint.state import BUFFER, OUTER, OWN_STEPS, WEIGHT, lasting_buffers, late_name, saved_name

Shapes = dict[str, tuple[int, ...]]


def require_resumable(job: Job, folder: CheckpointFolder) -> None:
    """Raises SpecError if the newest checkpoint of a run is intact, but the job cannot resume from it."""
    for step in folder.committed():
        path = folder.of_step(step)
        if path.is_symlink() or problems_of(path, contents=False):
            continue  # the ranks will report it and use an older one
        manifest = read_manifest(path)
        require_run(manifest, path)
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
    strategy, weights = job.strategy, weights_of(job.model)
    synchronise, workers = strategy.synchronise, strategy.data_parallel
    # Each parameter's weight and optimizer states: (name in a checkpoint, shape, name of the parameter).
    own = [
        (f"{state}/{name}", tuple(parameter.shape), name)
        for name, parameter in _empty(job.model).named_parameters()
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


@lru_cache(maxsize=1)
def _empty(model: Model) -> Decoder:
    """The unsharded model, without values."""
    with torch.device("meta"):
        return Decoder(model)
