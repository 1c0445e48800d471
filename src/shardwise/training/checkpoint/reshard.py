"""The same state in another number of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.interop.companions import has_companions, keep_companions
from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.contents import weight_keys
from shardwise.training.checkpoint.find import kept_companions
from shardwise.training.checkpoint.folder import CheckpointFolder
from shardwise.training.checkpoint.load import problems_of
from shardwise.training.checkpoint.manifest import read_manifest
from shardwise.training.checkpoint.whole import Described, whole_tensors, write_checkpoint


def reshard(
    source: Path,
    out: CheckpointFolder,
    shards: int,
    *,
    weights_only: bool = False,
    progress: Callable[[int], None] = lambda size: None,
) -> Path:
    """Writes the checkpoint's state as whole tensors into ``shards`` files.

    With ``weights_only`` a run can start from it, but none can resume. Raises SpecError for a damaged
    source before anything is written.
    """
    for problem in problems_of(source):
        raise SpecError("", problem, "take another checkpoint")
    manifest = read_manifest(source)
    keys = weight_keys(manifest) if weights_only else list(manifest.tensors)
    about = Described(manifest.step, manifest.job, {} if weights_only else manifest.numbers)
    made = write_checkpoint(out, about, whole_tensors(source, manifest, keys), shards, progress)
    if has_companions(kept_companions(source)):
        keep_companions(kept_companions(source), out.path)
    return made
