"""Other tools' descriptions of a model, read as `shardwise.spec` nouns and written back."""

from __future__ import annotations

from shardwise.interop.huggingface import hf_config_from_model, model_from_hf_config

__all__ = ["hf_config_from_model", "model_from_hf_config"]
