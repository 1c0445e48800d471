"""What a file is: our own job, a Hugging Face config.json, or the configuration of another framework."""

from __future__ import annotations

from pathlib import Path

from shardwise.interop.recognise import CONFIG, JOB, own_kind, suffix_of
from shardwise.spec.files import MOST_IN_CONFIGURATION, bounded_text


def kind_of(text: str, name: str = "") -> str:
    """`JOB`, `CONFIG` or the name of a framework; anything else is read as a job, whose rules then say why it is none.

    ``name`` is that of the file, if it has one.
    """
    kind = own_kind(text, name)
    if kind is not None:
        return kind
    # The frameworks' tables are only loaded for a file that is not clearly ours.
    from shardwise.interop.frameworks import recognised

    return recognised(text, suffix_of(text, name)) or JOB


def other_framework(path: Path | str) -> str | None:
    """The framework whose configuration the file is; None for our own job file, and for any other file."""
    try:
        text = bounded_text(Path(path), MOST_IN_CONFIGURATION)
    except (OSError, ValueError):
        return None
    kind = JOB if text is None else kind_of(text, str(path))
    return None if kind in (JOB, CONFIG) else kind
