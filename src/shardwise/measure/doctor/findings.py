"""What is examined, and what each check finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.spec.hardware import Cluster

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Checked:
    check: str
    status: Status
    figure: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination:
    """A run of ``processes`` on each of ``host_count`` hosts that writes to ``folder``.

    ``others`` are hosts to compare clocks with, by ssh. Without a job neither its ``cluster`` nor the size of a
    checkpoint is known. What is found between hosts is written to ``wiring``, beside the ``switches`` above them.
    """

    folder: Path
    processes: int
    device: str  # cpu or cuda
    host_count: int = 1
    others: tuple[str, ...] = ()
    checkpoint_bytes: float | None = None
    checkpoint_limit_seconds: float = 600
    cluster: Cluster | None = None
    tp: int = 1
    wiring: Path | None = None
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
