"""Weights from and to Hugging Face folders (config.json and safetensors), never all in memory at once."""

from __future__ import annotations

from shardwise.models.huggingface.folder import open_folder, write_folder

__all__ = ["open_folder", "write_folder"]
