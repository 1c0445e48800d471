"""Ranks that fork from a process which has imported torch: they are what the launcher starts, without its start-up.

A rank takes five seconds of a processor to import what it trains with, a test of restarts starts eight of them. It is
still a process of its own in a session of its own, a child of the launcher, killed and waited for like any other; that
the launcher starts an interpreter is for the tests of the command line to see.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from engine.workers import pool
from shardwise.launch.local import DEBUG

_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class WarmProcess:
    """As much of a `subprocess.Popen` as the launcher uses."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int | None:
        return self._waited(0)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _waited(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


@contextmanager
def warm_ranks() -> Iterator[None]:
    """Here the launcher's ranks start warm, but for those whose environment PyTorch reads when it is imported."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")}
    with mock.patch("shardwise.launch.ranks.subprocess", SimpleNamespace(Popen=_start, **names)):
        yield


def _start(command: Sequence[str], **options: Any) -> Any:
    environment = options.get("env")
    enters = "-I" in command  # an emulated node, before anything is imported
    is_rank = environment is not None and command[0] == sys.executable and sys.platform == "linux" and not enters
    if not is_rank or DEBUG.items() <= environment.items():
        return subprocess.Popen(command, **options)
    pool()  # has said what its parent, which is the ranks' too, imports
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    arguments = (theirs, list(command[1:]), dict(environment), str(Path.cwd()), options["stdout"].name)
    with _adopting():
        between = context.Process(target=_fork, args=arguments, daemon=True)
        between.start()
        theirs.close()
        pid = ours.recv()
        between.join()
    ours.close()
    return WarmProcess(pid)


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile a descendant whose parent ends becomes a child of this process."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _fork(told: Connection, arguments: list[str], environment: Mapping[str, str], folder: str, log: str) -> None:
    """Between the common parent and a rank: it ends at once, and the launcher adopts the rank."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.001)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    told.send(os.getpid())
    told.close()
    status = 1
    try:
        status = _run(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(arguments: list[str]) -> int:
    """As an interpreter does: `-m MODULE ...` or `FILE ...`; the status to exit with."""
    import torch

    from halves import quick_products

    gc.freeze()  # what was imported before need not be scanned
    quick_products()
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(2)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    try:
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
