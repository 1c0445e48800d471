"""Small programs as ranks, and what is left of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.launch.local import supervise
from shardwise.launch.outcome import Outcome
from shardwise.spec.run import Timeouts

# What each program begins with; `attempt` counts from 1, `others_wait` is what a rank in a collective looks like.
PREFACE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from shardwise.run.attempt import Reporter, WorldPlace

place = WorldPlace.from_environment()
reporter = Reporter(place)
rank, attempt = place.rank, int(place.attempt.rpartition("-")[2])
run = place.folder.parent

def others_wait():
    while True:
        time.sleep(0.05)

"""
QUICK = Timeouts(start=60, step=60, checkpoint=60)


def program(folder: Path, body: str, preface: str = PREFACE) -> list[str]:
    """The command that runs ``body`` as one rank."""
    path = folder / "program.py"
    path.write_text(preface + body, encoding="utf-8")
    return [sys.executable, str(path)]


def launch(folder: Path, body: str, world: int = 2, **settings: Any) -> Outcome:
    command = program(folder, body, settings.pop("preface", PREFACE))
    return supervise(command, world, folder / "run", **{"timeouts": QUICK, "restarts": 0, **settings})


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def noted_pids(folder: Path) -> list[int]:
    """Processes that wrote their own number into a file ``*.pid``."""
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid")) if path.read_text()]
