"""What a check found, in words and with its figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    figure: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination:
    """What is asked for: a run of ``processes`` on each of ``host_count`` hosts that writes to ``folder``.

    ``others`` are hosts to compare with, by ssh. Without a job the size of a checkpoint is not known.
    """

    folder: Path
    processes: int
    device: str  # cpu or cuda
    host_count: int = 1
    others: tuple[str, ...] = ()
    checkpoint_bytes: float | None = None
    checkpoint_limit_seconds: float = 600
