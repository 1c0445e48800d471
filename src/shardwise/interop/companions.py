"""The small files of a Hugging Face folder besides its weights: family, ids of special tokens, generation, tokenizer.

A folder of checkpoints keeps them in ``huggingface/`` if its weights came from such a folder, so that a conversion can
restore them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from shardwise.interop.huggingface import hf_config_from_model, hf_config_like, read_config
from shardwise.interop.jobs import is_folder
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model

CONFIG = "config.json"
KEPT_IN = "huggingface"  # beside the checkpoints
TOOLS_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # of conversations with tools
# Only these are ever copied: data that the transformers library and its tokenizers read, no code.
NAMES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", TOOLS_TEMPLATE, "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
MOST_BYTES = 256 * 2**20
# They refer to code, which is not copied, and to how the weights were stored, which are written as plain numbers.
_NOT_CARRIED = ("auto_map", "quantization_config")


def has_companions(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def folder_of_model(named: object) -> Path | None:
    """The Hugging Face folder that a model is named by, directly or by its config.json; None for anything else."""
    if not isinstance(named, str) or not named:
        return None
    path = Path(named)
    folder = path.parent if path.name == CONFIG else path if is_folder(named) else None
    return folder if folder is not None and has_companions(folder) else None


def companions(folder: Path) -> dict[str, Path]:
    """The known files in the folder; raises SpecError for a link that leads out of it, and for a huge file."""
    files = {name: folder / name for name in NAMES if (folder / name).is_file()}
    for name, path in files.items():
        if not _stays(path, folder):
            raise SpecError(str(path), "is a link that leads out of its folder", "put the file itself there")
        if path.stat().st_size > MOST_BYTES:
            raise SpecError(str(path), f"is larger than {MOST_BYTES >> 20} MiB", "get another copy")
        files[name] = path.resolve()
    return files


def copy_companions(source: Path, target: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Copies them into a folder, creating it if needed; raises SpecError if that fails."""
    chosen = {name: path for name, path in companions(source).items() if name not in leave_out}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, path in chosen.items():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target / name, follow_symlinks=False)
    except OSError as error:
        problem = f"cannot be copied to {target} ({error.strerror})"
        raise SpecError(str(error.filename or source), problem, "check the permissions, and free space there") from None


def require_companions(source: Path, checkpoints: Path) -> None:
    """Raises SpecError if they cannot be kept beside checkpoints: unsafe, or another model's are there."""
    companions(source)
    kept = checkpoints / KEPT_IN
    if has_companions(kept) and read_config(kept) != read_config(source):
        raise SpecError(str(kept), f"belongs to a different model than {source / CONFIG}", "name another folder")


def keep_companions(source: Path | None, checkpoints: Path) -> None:
    """Keeps those of ``source``, from which the checkpoints' weights come, and removes any others."""
    kept = checkpoints / KEPT_IN
    if source is not None and kept.absolute() == source.absolute():
        return
    shutil.rmtree(kept, ignore_errors=True)
    if source is not None:
        copy_companions(source, kept)


def config_for(model: Model, source: Path | None) -> dict[str, Any]:
    """The config.json of weights that came from the folder ``source``, if known.

    It is the folder's own, except for changed fields of the model, and keys that are not carried over.
    """
    if source is None:
        return hf_config_from_model(model)
    config = hf_config_like(read_config(source), model)
    return {key: value for key, value in config.items() if key not in _NOT_CARRIED}


def end_tokens(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text, as generation_config.json or config.json say; none if neither does."""
    for name in ("generation_config.json", CONFIG):
        path = companions(folder).get(name)
        config = {} if path is None else read_config(path)
        named = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        numbers = named if isinstance(named, list) else [named]
        if numbers and all(type(number) is int for number in numbers):
            return tuple(numbers)
    return ()


def _stays(path: Path, folder: Path) -> bool:
    """Whether no link leads out of the folder, unless to the blobs that the hub's cache keeps two folders up."""
    target, folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return target.is_relative_to(folder) or target.parent == folder.parent.parent / "blobs"
