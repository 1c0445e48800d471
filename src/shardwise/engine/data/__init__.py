"""Data parallelism: whole copies, ZeRO and FSDP, and workers that synchronise less often than every step."""

from __future__ import annotations

from shardwise.engine.data.apply import DataParallel, apply_data

__all__ = ["DataParallel", "apply_data"]
