"""Which checkpoints a path means: one, those of a folder, or those of a run."""

from __future__ import annotations

from pathlib import Path

from shardwise.interop.companions import CONFIG, KEPT_IN, has_companions
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.interop.jobs import model_from
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.training.checkpoint.folder import CheckpointFolder
from shardwise.training.checkpoint.manifest import NAME, read_manifest

_REMEDY = "name a checkpoint (step-...), a folder of them, or a run's folder"


def checkpoints_at(path: Path) -> list[Path]:
    """All that are there, whole or damaged, the newest first; raises SpecError if there is none."""
    if (path / NAME).is_file():
        return [path]
    folder = _folder_at(path)
    found = [folder.of_step(step) for step in folder.present()]
    if not found:
        raise SpecError(str(path), "holds no checkpoint" if path.is_dir() else "is not a folder", _REMEDY)
    return found


def newest_at(path: Path) -> Path:
    """The newest that was committed; raises SpecError if there is none."""
    if (path / NAME).is_file():
        return path
    folder = _folder_at(path)
    for step in folder.committed():
        return folder.of_step(step)
    raise SpecError(str(path), "holds no checkpoint" if path.is_dir() else "is not a folder", _REMEDY)


def _folder_at(path: Path) -> CheckpointFolder:
    inner = path / "checkpoints"
    return CheckpointFolder(inner if inner.is_dir() else path)


def start_at(source: Path) -> Path:
    """Where a run that starts from a path finds weights: that Hugging Face folder, or the newest checkpoint there."""
    if has_companions(source):
        return source
    try:
        return newest_at(source)
    except SpecError as error:
        remedy = "name a Hugging Face folder, a checkpoint (step-...), a folder of them, or a run's folder"
        raise SpecError("run.start_from", f"{source} {error.problem}", remedy) from None


def require_start(model: Model, source: Path) -> None:
    """Raises SpecError if a path holds nothing that a run of ``model`` can start from, by what it says of itself."""
    found = start_at(source)
    theirs = model_from_hf_config(found) if has_companions(found) else model_from(read_manifest(found).job.get("model"))
    require_same_shapes(model, theirs, source)


def require_same_shapes(mine: Model, theirs: Model, source: Path) -> None:
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings"):
        if getattr(mine, name) != getattr(theirs, name):
            problem = f"{source} has {name} {getattr(theirs, name)}, the job's model has {getattr(mine, name)}"
            remedy = f"model: {source / CONFIG}" if has_companions(source) else "train the model that was saved"
            raise SpecError("run.start_from", problem, remedy)


def companions_at(source: Path) -> Path | None:
    """The folder with the small files of the Hugging Face folder that weights to start from are, or came from."""
    found = start_at(source)
    folder = found if has_companions(found) else kept_companions(found)
    return folder if has_companions(folder) else None


def kept_companions(checkpoint: Path) -> Path:
    """Where the small files are kept of the Hugging Face folder that the weights of a checkpoint once came from."""
    return checkpoint.absolute().parent / KEPT_IN
