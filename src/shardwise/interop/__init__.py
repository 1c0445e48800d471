"""Other tools' descriptions of a model or a job, read as `shardwise.spec` nouns and written back."""

from __future__ import annotations

from typing import Any

from shardwise.interop.huggingface import hf_config_from_model, model_from_hf_config

__all__ = ["can_run", "export", "hf_config_from_model", "model_from_hf_config", "read"]

_FRAMEWORKS = ("can_run", "export", "read")


def __getattr__(name: str) -> Any:
    """The frameworks' tables are only read when one is asked for."""
    if name not in _FRAMEWORKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardwise.interop import frameworks

    return getattr(frameworks, name)
