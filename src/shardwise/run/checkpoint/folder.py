"""The folder of a run, and which checkpoint or Hugging Face folder a path means."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from shardwise.interop.companions import CONFIG, KEPT_IN, NAMES, has_companions
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.interop.jobs import model_from
from shardwise.run.checkpoint.checkpoint_folder import INNER, LOCK, RemoteCheckpointFolder
from shardwise.run.checkpoint.checkpoint_folder import CheckpointFolder as CheckpointFolder
from shardwise.run.checkpoint.manifest import NAME, read_manifest
from shardwise.run.storage.place import Place, RemotePlace, place_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_yaml
from shardwise.spec.model import Model
from shardwise.spec.run import Run, Timeouts

NEWEST = "last"  # in place of a run's name
_REMEDY = "name a checkpoint (step-...), a folder of them, or a run's folder"


class RunFolder:
    """A run on disk: its job, prediction, metrics, checkpoints, and the logs of every attempt.

    Checkpoints may be kept elsewhere, as ``run`` says, or else the job file in the folder.
    """

    def __init__(self, path: Path, run: Run | None = None) -> None:
        self.path = path
        self._elsewhere = None if run is None else _checkpoints_of(run.checkpoints.folder, run.timeouts)
        self.job = path / "job.yaml"
        self.metrics = path / "metrics.jsonl"
        self.data = path / "data.json"  # a fingerprint of the data when the run began
        self.peak = path / "peak.json"  # the peak bytes of any rank, after a trial step
        self.profile = path / "profile"  # the profiled steps of every rank
        self.recut = path / "recut.yaml"  # the job with the stages that the run cut anew
        self.attempts = path / "attempts"
        self.events = path / "events.jsonl"  # what happened to the run
        self.keepers = path / "keepers.json"  # the processes that keep copies in memory, while there are any
        self.copied = path / "copied"  # the step of the newest copy in memory

    @cached_property
    def checkpoints(self) -> CheckpointFolder:
        return checkpoint_folder(self._elsewhere or self._of_job() or self.path / INNER, self.path)

    @property
    def in_use(self) -> bool | None:
        """Whether a process of this machine is training in it; None if the system cannot tell."""
        place: Place = self.path / INNER
        with contextlib.suppress(SpecError):  # a damaged job
            place = self.checkpoints.path
        return lock_held((place if isinstance(place, Path) else self.path / INNER) / LOCK)

    def note_copy(self, step: int) -> None:
        """Tells the launcher of a copy in memory; a full disk is not an error."""
        with contextlib.suppress(OSError):
            self.copied.write_text(str(step), encoding="utf-8")

    def _of_job(self) -> Place | None:
        """Where the job file says that checkpoints go, if it does; raises SpecError if the file is damaged."""
        if not self.job.is_file():
            return None
        try:
            job: Any = read_yaml(self.job, "job file")
        except SpecError as error:
            raise self._damaged(error.problem) from None
        if not isinstance(job, dict):
            raise self._damaged("it is not a job")
        run = job.get("run")
        run = run if isinstance(run, dict) else {}
        kept = run.get("checkpoints")
        folder = kept.get("folder") if isinstance(kept, dict) else None
        if folder is not None and not isinstance(folder, str):
            raise self._damaged(f"run.checkpoints.folder is {shown(folder)}")
        try:
            return _checkpoints_of(folder, Timeouts.from_dict(run.get("timeouts") or {}))
        except SpecError as error:
            raise self._damaged(f"run.timeouts.{error}") from None

    def _damaged(self, how: str) -> SpecError:
        """An error about the job file, which `train` writes; nothing else says where the checkpoints are."""
        return SpecError(str(self.job), f"is damaged: {how}", "remove it; `shardwise train` writes it anew")


def _checkpoints_of(folder: str | None, timeouts: Timeouts) -> Place | None:
    return place_of(folder, timeouts.checkpoint) if folder else None


def run_folder(text: str) -> RunFolder:
    """The run in a folder such as ``runs/NAME``; ``runs/last`` is the newest, unless a run has that name."""
    path = Path(text)
    try:
        if not path.exists() and path.name == NEWEST:
            runs = [path for path in path.parent.glob("*/job.yaml") if path.is_file()]
            path = max(runs, key=lambda job: job.stat().st_mtime, default=path / "job.yaml").parent
        there = (path / "job.yaml").is_file()
    except (OSError, ValueError) as error:
        problem = f"{shown(text)} is not a path ({getattr(error, 'strerror', error)})"
        raise SpecError("", problem, "check it") from None
    if not there:
        raise SpecError(str(path), "is not a run's folder", "name one that `shardwise train` wrote, such as runs/demo")
    return RunFolder(path)


def lock_held(path: Path) -> bool | None:
    """Whether a file is locked, by the kernel's list: trying the lock would briefly keep others out."""
    try:
        inode = f":{path.stat().st_ino}"
        held = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    except FileNotFoundError:
        return None if not Path("/proc/locks").exists() else False
    except (OSError, ValueError):
        return None
    return any(len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(inode) for fields in held)


def checkpoint_folder(where: str | Place, run: Path | None = None) -> CheckpointFolder:
    """The folder of checkpoints at a path or URI; ``run`` is the folder of the run that writes there."""
    place = place_of(where) if isinstance(where, str) else where
    if isinstance(place, Path):
        return CheckpointFolder(place)
    return RemoteCheckpointFolder(place, run)


def checkpoints_at(path: Place) -> list[Place]:
    """All checkpoints at a path, intact or damaged, newest first; raises SpecError if there is none."""
    folder = folder_at(path)
    checkpoints: list[Place] = (
        [path] if (path / NAME).is_file() else [folder.of_step(step) for step in folder.present()]
    )
    if not checkpoints:
        raise SpecError(str(path), "holds no checkpoint" if path.is_dir() else "is not a folder", _REMEDY)
    return checkpoints


def newest_at(path: Place) -> Place:
    """The newest committed checkpoint at a path; raises SpecError if there is none."""
    committed = [checkpoint for checkpoint in checkpoints_at(path) if (checkpoint / NAME).is_file()]
    if not committed:
        raise SpecError(str(path), "holds no checkpoint", _REMEDY)
    return committed[0]


def folder_at(path: Place) -> CheckpointFolder:
    """The folder of checkpoints at a path, which may be a run's folder."""
    if isinstance(path, RemotePlace):
        return checkpoint_folder(path)
    if (path / "job.yaml").is_file():
        return RunFolder(path).checkpoints
    inner = path / INNER
    return CheckpointFolder(inner if inner.is_dir() else path)


def start_at(source: Place) -> Place:
    """Where to load weights from, given a path to start from: a Hugging Face folder, or the newest checkpoint there."""
    if isinstance(source, Path) and has_companions(source):
        return source
    try:
        return newest_at(source)
    except SpecError as error:
        remedy = "name a Hugging Face folder, a checkpoint (step-...), a folder of them, or a run's folder"
        raise SpecError("run.start_from", f"{source} {error.problem}", remedy) from None


def require_start(model: Model, source: Place) -> None:
    """Raises SpecError if what a path holds is described as another model than ``model``."""
    start = start_at(source)
    huggingface = huggingface_at(start)
    theirs = (
        model_from(read_manifest(start).job.get("model")) if huggingface is None else model_from_hf_config(huggingface)
    )
    require_same_shapes(model, theirs, source)


def huggingface_at(start: Place) -> Path | None:
    """The result of `start_at`, if it is a Hugging Face folder."""
    return start if isinstance(start, Path) and has_companions(start) else None


def require_same_shapes(mine: Model, theirs: Model, source: Place) -> None:
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings"):
        if getattr(mine, name) != getattr(theirs, name):
            problem = f"{source} has {name} {getattr(theirs, name)}, the job's model has {getattr(mine, name)}"
            remedy = f"model: {source / CONFIG}" if huggingface_at(source) else "train the model that was saved"
            raise SpecError("run.start_from", problem, remedy)


def companions_at(source: Place) -> Path | None:
    """The folder with the small Hugging Face files (config, tokenizer) that belong to weights to start from."""
    start = start_at(source)
    folder = huggingface_at(start) or kept_companions(start)
    return folder if has_companions(folder) else None


def kept_companions(checkpoint: Place) -> Path:
    """Where a checkpoint keeps the small files of the Hugging Face folder that its weights came from.

    For a checkpoint in a store this is a local copy, removed when the process ends.
    """
    if isinstance(checkpoint, Path):
        return checkpoint.absolute().parent / KEPT_IN
    return _copied_companions(checkpoint.parent / KEPT_IN)


@cache
def _copied_companions(kept: RemotePlace) -> Path:
    folder = tempfile.TemporaryDirectory(prefix="shardwise-companions-")
    atexit.register(folder.cleanup)
    for name in set(NAMES) & kept.objects().keys():
        (Path(folder.name) / name).parent.mkdir(exist_ok=True)
        (Path(folder.name) / name).write_bytes((kept / name).read_bytes())
    return Path(folder.name)


# -- folders held open while the run goes on, so that it notices when one is moved or replaced -------

_MOVE_BACK = "move it back, or name where it is now (⟨run_folder⟩), and start it again: it resumes"


class HeldFolders:
    """Open folders: as long as one is open, no new folder can get its inode number."""

    def __init__(self, *paths: Path) -> None:
        self._held = {path.absolute(): os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths if path.is_dir()}

    @classmethod
    def of_run(cls, folder: RunFolder) -> HeldFolders:
        """The run's folder, and that of its checkpoints if it is on a disk."""
        checkpoints = folder.checkpoints.path
        return cls(folder.path, *([checkpoints] if isinstance(checkpoints, Path) else []))

    def require(self) -> None:
        """Raises SpecError for a folder that is not where it was."""
        for path, file in self._held.items():
            if not _is_at(path, file):
                raise SpecError(str(path), "was moved, removed or replaced while the run went on", _MOVE_BACK)

    def close(self) -> None:
        for file in self._held.values():
            os.close(file)
        self._held = {}


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a network disk that does not answer now
        return True
