"""What a file is: our own job, a Hugging Face config.json, or the configuration of another framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.interop.recognise import JOB, own_kind, suffix_of
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.files import MOST_IN_CONFIGURATION, bounded_text
from shardwise.spec.job import Job

if TYPE_CHECKING:
    from shardwise.interop.frameworks import Configuration


def configuration_in(text: str, name: str = "", folder: Path | None = None) -> Configuration | str:
    """The configuration of another framework that a text is, or that it starts if it is a script; else its own kind.

    Anything else is read as a job, whose rules then say why it is none. ``name`` is that of the file, if it has one;
    files that it names are read from ``folder``.
    """
    kind = own_kind(text, name)
    if kind is not None:
        return kind
    # The frameworks' tables are only loaded for a file that is not clearly ours.
    from shardwise.interop.frameworks import configuration_of

    configuration = configuration_of(text, name, folder)
    if configuration is None:
        _require_readable_script(text, name)
    return configuration or JOB


def other_framework(path: Path | str) -> Configuration | None:
    """The configuration of another framework in a file; None for our own job file, and for any other file."""
    text = _text_of(path)
    kind = JOB if text is None else configuration_in(text, Path(path).name, Path(path).parent)
    return None if isinstance(kind, str) else kind


def _text_of(path: Path | str) -> str | None:
    """The text of a file that can be read and is of a configuration's length."""
    try:
        return bounded_text(Path(path), MOST_IN_CONFIGURATION)
    except (OSError, ValueError):
        return None


def require_job(data: Mapping[str, Any], name: str) -> None:
    """Raises SpecError for a file that was read as a job because it is no other, and has none of a job's fields."""
    known = [field.name for field in fields(Job)]
    misspelt = all(nearest_name(str(key), known).startswith("did you mean") for key in data)
    if misspelt or any(key in known for key in data):
        return
    from shardwise.interop.frameworks import READERS

    keys = ", ".join(shown(key).strip("'") for key in list(data)[:3])
    others = ", ".join(f"{reader.title} ({reader.signature[0]})" for reader in READERS.values())
    problem = f"has {keys}, but no field of a job ({', '.join(known[:3])}, ...), nor what marks a file of {others}"
    raise SpecError(Path(name).name, problem, "write a job file (`shardwise plan --out job.yaml` does)")


_CONFIGURATIONS = re.compile(r"[\w./-]+\.(?:ya?ml|json|toml)\b")


def _require_readable_script(text: str, name: str) -> None:
    """Raises SpecError for a script that starts something whose options no framework here has."""
    if suffix_of(text, name) != ".sh":
        return
    from shardwise.interop.frameworks import starts_another

    launch = starts_another(text)
    if launch is None:
        return
    started = shown(launch.program.rpartition("/")[2])
    named = sorted(set(launch.files) or set(_CONFIGURATIONS.findall(text)))
    if named:
        words = " or ".join(shown(file) for file in named[:3])
        problem, remedy = f"starts {started} with {words}, which is not beside it or of no known kind", "give that file"
    else:
        problem, remedy = f"starts {started}, whose options are not read", "describe the job in a job file"
    raise SpecError(name, problem, remedy)
