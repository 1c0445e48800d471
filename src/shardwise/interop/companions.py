"""The small files of a Hugging Face folder besides its weights, which make them the same model elsewhere.

A folder of checkpoints keeps them in ``huggingface/`` for weights that came from such a folder, so that a conversion
can restore them: the family, the ids of special tokens, how text is generated, the tokenizer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.interop.huggingface import hf_config_from_model, hf_config_like, read_config
from shardwise.interop.jobs import is_folder
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model

CONFIG = "config.json"
KEPT_IN = "huggingface"  # beside the checkpoints
# Only these are ever copied: data that the transformers library and its tokenizers read, no code.
NAMES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
MOST_BYTES = 256 * 2**20
# Of code that is not copied, and of how weights were stored that are written as plain numbers.
_NOT_CARRIED = ("auto_map", "quantization_config")


def has_companions(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def folder_of_model(named: object) -> Path | None:
    """The Hugging Face folder that names a model, or whose config.json does; None for a preset and other files."""
    if not isinstance(named, str) or not named:
        return None
    path = Path(named)
    folder = path.parent if path.name == CONFIG else path if is_folder(named) else None
    return folder if folder is not None and has_companions(folder) else None


def companions(folder: Path) -> dict[str, Path]:
    """The known files that are there; raises SpecError for a link that leads out of the folder, and for huge ones."""
    found = {name: folder / name for name in NAMES if (folder / name).is_file()}
    for name, path in found.items():
        if path.is_symlink() and not _stays(path):
            raise SpecError(str(path), "is a link that leads out of its folder", "put the file itself there")
        if path.stat().st_size > MOST_BYTES:
            raise SpecError(str(path), f"is larger than {MOST_BYTES >> 20} MiB", "get another copy")
        found[name] = path.resolve()
    return found


def copy_companions(source: Path, target: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Copies them into a folder, which is made where it is not there; raises SpecError if that fails."""
    chosen = {name: path for name, path in companions(source).items() if name not in leave_out}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, path in chosen.items():
            shutil.copyfile(path, target / name, follow_symlinks=False)
    except OSError as error:
        problem = f"cannot be copied to {target} ({error.strerror})"
        raise SpecError(str(error.filename or source), problem, "check the permissions, and free space there") from None


def require_companions(source: Path, checkpoints: Path) -> None:
    """Raises SpecError if they may not be kept beside checkpoints: unsafe, or another model's are there."""
    companions(source)
    kept = checkpoints / KEPT_IN
    if has_companions(kept) and read_config(kept) != read_config(source):
        raise SpecError(str(kept), f"belongs to a different model than {source / CONFIG}", "name another folder")


def keep_companions(source: Path | None, checkpoints: Path) -> None:
    """Keeps those of the weights that the checkpoints in a folder come from, and no others that are there."""
    kept = checkpoints / KEPT_IN
    if source is not None and kept.absolute() == source.absolute():
        return
    shutil.rmtree(kept, ignore_errors=True)
    if source is not None:
        copy_companions(source, kept)


def config_for(model: Model, source: Path | None) -> dict[str, Any]:
    """The config.json of weights of a model that came from a folder, ``source``, if that is known.

    It is the folder's own, but for what has changed on the way: fields of the model, and what is not written.
    """
    if source is None:
        return hf_config_from_model(model)
    said: Mapping[str, Any] = read_config(source)
    return {key: value for key, value in hf_config_like(said, model).items() if key not in _NOT_CARRIED}


def _stays(link: Path) -> bool:
    """Whether a link leads to a file of its own folder, or of the blobs that the hub's cache keeps two folders up."""
    target, folder = Path(os.path.realpath(link)), Path(os.path.realpath(link.parent))
    return target.parent in (folder, folder.parent.parent / "blobs")
