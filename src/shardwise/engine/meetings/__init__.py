"""Data-parallel workers that do not sum their gradients in every step."""

from __future__ import annotations

from shardwise.engine.meetings.late import LateSums
from shardwise.engine.meetings.outer import OuterSteps

__all__ = ["LateSums", "OuterSteps"]
