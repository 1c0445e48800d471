"""Weights from and to Hugging Face folders (config.json and safetensors), never all in memory at once."""

from __future__ import annotations

from shardwise.models.huggingface.folder import open_folder, read_model, read_slice, read_tensors
from shardwise.models.huggingface.writer import write_folder

__all__ = ["open_folder", "read_model", "read_slice", "read_tensors", "write_folder"]
