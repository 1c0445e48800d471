"""Adapters of our checkpoints and of PEFT's folders: beside weights that are read on demand, and in PEFT's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.models.adapters import is_of_adapter
from shardwise.models.huggingface.adapters import CONFIG, Added, LoadedAdapter, is_adapter, read_adapter, write_adapter
from shardwise.models.huggingface.tensors import Naming
from shardwise.run.checkpoint.folder import folder_at, newest_at
from shardwise.run.checkpoint.manifest import BASE, Manifest, read_manifest, weight_keys
from shardwise.run.storage.place import Place, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.training.checkpoint.base import DRAWN, fingerprint_at
from shardwise.training.checkpoint.full_tensors import LazyTensor, full_tensors
from shardwise.training.convert.weights import Weights


def is_adapter_checkpoint(path: Path) -> bool:
    """Whether the newest checkpoint at a path lacks frozen weights."""
    if not path.is_dir() or not ((path / "manifest.json").is_file() or folder_at(path).committed()):
        return False
    return BASE in read_manifest(newest_at(path)).numbers


def saved_adapter(folder: Place, manifest: Manifest) -> LoadedAdapter:
    """What a checkpoint holds of a run that freezes weights: adapters, and weights that were trained."""
    job = Job.from_dict(manifest.job)
    tensors = full_tensors(folder, manifest, weight_keys(manifest))
    values = {key.partition("/")[2]: tensor for key, tensor in tensors.items()}
    added: dict[str, Added] = {}
    for name in values:
        if is_of_adapter(name) and name.endswith(".a"):
            assert job.training.adapters is not None
            adapter = name.removesuffix(".a")
            magnitude = values.get(f"{adapter}.magnitude")
            beside = f"{adapter.removesuffix('.adapter')}.weight" if adapter.endswith(".adapter") else adapter[:-8]
            added[beside] = Added(
                values[name].read(), values[f"{adapter}.b"].read(), job.training.adapters.factor,
                None if magnitude is None else magnitude.read(),
            )  # fmt: skip
    trained = {name: tensor.read() for name, tensor in values.items() if not is_of_adapter(name)}
    fingerprint = manifest.numbers.get(BASE)
    return LoadedAdapter(added, trained, job.run.start_from, None if fingerprint is None else str(fingerprint))


def opened_adapter(path: Path, weights: Weights) -> LoadedAdapter:
    """The adapter at a path, PEFT's or ours, for a model."""
    if is_adapter(path):
        return read_adapter(path, Naming.of_model(weights.model, weights.companions))
    if not is_adapter_checkpoint(path):
        problem = f"holds no adapter: neither {CONFIG} nor a checkpoint beside frozen weights"
        raise SpecError(str(path), problem, "name a folder of PEFT, or a run with training.adapters")
    newest = newest_at(path)
    return saved_adapter(newest, read_manifest(newest))


def require_its_base(adapter: LoadedAdapter, source: Path, weights: Weights, where: str) -> None:
    """Raises SpecError if an adapter of ours was trained beside other frozen weights than those at a path."""
    saved = adapter.fingerprint
    if saved is None or saved.startswith(DRAWN) or is_adapter_checkpoint(source):
        return
    frozen = [name for name in weights.tensors if name not in adapter.trained]
    try:
        now = fingerprint_at(place_of(str(source)), frozen)
    except (SpecError, KeyError):  # a file of another tool, which has no rows to read alone
        return
    if now != saved:
        problem = f"was trained beside other weights than those of {source}"
        raise SpecError(where, problem, f"use its own base: {adapter.base}")


def with_adapter(weights: Weights, adapter: LoadedAdapter, where: str) -> Weights:
    """The weights, each with what its adapter adds once it is read."""
    tensors = dict(weights.tensors)
    for named in (adapter.added, adapter.trained):
        _require_known(named, weights, where)
    for name, value in adapter.trained.items():
        tensors[name] = _changed(tensors[name], lambda weight, value=value: value.to(weight.dtype))  # type: ignore[misc]
    for name, added in adapter.added.items():
        tensors[name] = _changed(tensors[name], added.to)
    return replace(weights, tensors=tensors, origin=f"{weights.origin} with {where}")


def _require_known(named: Mapping[str, Added | Tensor], weights: Weights, where: str) -> None:
    for name, one in named.items():
        there = weights.tensors.get(name)
        wanted = None
        if isinstance(one, Tensor):
            wanted = tuple(one.shape)
        elif there is not None:
            wanted = (one.b @ one.a).shape if one.a.dim() == 2 else (*one.a.shape[:2], one.b.shape[2])
        if there is None or tuple(wanted or ()) != there.shape:
            problem = f"in {where} fits no weight of {weights.model.name}"
            raise SpecError(name, problem, "use the base that it was trained with")


def _changed(tensor: LazyTensor, change: Callable[[Tensor], Tensor]) -> LazyTensor:
    def read() -> Tensor:
        with torch.no_grad():
            return change(tensor.read())

    return LazyTensor(tensor.shape, tensor.dtype, read)


def write_peft(source: Path, companions: Path | None, path: Path) -> int:
    """Writes the adapter of one of our checkpoints as a folder that `peft` loads; its number of tensors."""
    newest = newest_at(source)
    manifest = read_manifest(newest)
    job, adapter = Job.from_dict(manifest.job), saved_adapter(newest, manifest)
    naming = Naming.of_model(job.model, companions)
    write_adapter(path, naming, job.training.adapters, adapter, job.run.start_from)
    return len(adapter.added) + len(adapter.trained)
