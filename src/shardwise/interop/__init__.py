"""Other tools' descriptions of a model or a job, read as `shardwise.spec` nouns and written back.

The names below are imported when first used: the tables of the families and frameworks are long.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["can_run", "export", "hf_config_from_model", "model_from_hf_config", "read", "read_job"]

_PUBLIC = {
    "can_run": "frameworks",
    "export": "frameworks",
    "hf_config_from_model": "huggingface",
    "model_from_hf_config": "huggingface",
    "read": "frameworks",
    "read_job": "jobs",
}

if TYPE_CHECKING:
    from shardwise.interop.frameworks import can_run, export, read
    from shardwise.interop.huggingface import hf_config_from_model, model_from_hf_config
    from shardwise.interop.jobs import read_job


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
