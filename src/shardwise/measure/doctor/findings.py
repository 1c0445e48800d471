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
    """The run that is examined for."""

    folder: Path  # that it writes to
    processes: int  # on each host
    device: str  # cpu or cuda
    host_count: int = 1
    others: tuple[str, ...] = ()  # hosts to compare clocks with, by ssh
    checkpoint_bytes: float | None = None  # unknown without a job
    checkpoint_limit_seconds: float = 600
    cluster: Cluster | None = None  # unknown without a job
    tp: int = 1
    wiring: Path | None = None  # where to write what is measured between hosts
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # above the hosts, for that file
