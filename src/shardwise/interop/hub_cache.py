"""The local cache of Hugging Face: models by their ids, found without its library, the network or any weights.

Its layout is described in huggingface.co/docs/huggingface_hub/guides/manage-cache, its variables in
huggingface.co/docs/huggingface_hub/package_reference/environment_variables.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hub import is_hub_id

# Variables that name the cache, or a folder that it lies in; the first one that is set counts.
_VARIABLES = {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
_USUAL = "~/.cache/huggingface/hub"
_MOST_CHARACTERS = 200  # of the name of a commit


def cached_model(named: str) -> Path | None:
    """The folder of a model in the cache: the commit of its main branch, or else the newest, that has a config.json."""
    if not is_hub_id(named):
        return None
    wanted = f"models--{named.replace('/', '--')}".lower()
    try:
        models = [path for path in _cache().iterdir() if path.name.lower() == wanted]
        commits = [path for model in models for path in (model / "snapshots").iterdir()]
        found = [path for path in commits if (path / "config.json").is_file()]
        return max(found, key=lambda path: (path.name == _main(path.parents[1]), path.stat().st_mtime), default=None)
    except OSError:
        return None


def not_there(named: str) -> SpecError:
    """The error of an id that means neither a preset nor a model in the cache."""
    problem = f"{shown(named)} is not a preset, a file, or a model in this machine's Hugging Face cache"
    page = f"https://huggingface.co/{named}/blob/main/config.json"
    return SpecError("", problem, f"run {download(named)}, or save {page} in a folder and name that: ⟨model=FOLDER⟩")


def download(named: str) -> str:
    """The command that brings a model's description into the cache."""
    return f"`hf download {named} config.json`"


def _cache() -> Path:
    for variable, inside in _VARIABLES.items():
        if folder := os.environ.get(variable):
            return Path(os.path.expandvars(folder)).expanduser() / inside
    return Path(_USUAL).expanduser()


def _main(model: Path) -> str:
    """The commit of a model's main branch; empty if the cache does not say."""
    try:
        with (model / "refs" / "main").open(encoding="utf-8") as file:
            return file.read(_MOST_CHARACTERS).strip()
    except (OSError, ValueError):
        return ""
