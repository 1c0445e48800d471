"""The exit status, whoever reads what a command prints and whatever goes wrong: 0 only for what was done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.running import run
from shardwise.launch.outcome import DONE, FAILED, MISTAKE, STOPPED, STOPPED_WITHOUT_CHECKPOINT, Attempt, Outcome
from shardwise.launch.run import Launch
from shardwise.spec.errors import DoesNotFit, SpecError

SMALL = (
    *("train", "--model", "tiny", "--cluster", "laptop:2", "--dp", "2", "--seq", "32"),
    *("--global-batch", "4", "--precision", "fp32", "--run-folder"),
)
TOO_LARGE = ("analyze", "--model", "llama3-70b", "--cluster", "dgx-h100:1", "--global-batch", "64", "--seq", "8192")
FAULTS = [
    BrokenPipeError(32, "Broken pipe"),
    ConnectionResetError(104, "Connection reset by peer"),
    BlockingIOError(11, "Resource temporarily unavailable"),
    FileNotFoundError(2, "No such file or directory"),
    EOFError("no more"),
    RuntimeError("gloo"),
    MemoryError(),
    KeyboardInterrupt(),
    SystemExit(4),
    SpecError("run", "is wrong"),
    DoesNotFit("run", "is too large"),
]
COMMANDS = {
    "stdout": [(["list", "models"], 0), (TOO_LARGE, 1)],
    "stdout stderr": [([*TOO_LARGE, "--json"], 1), (["lisst"], 2)],
}


def raising(fault: BaseException) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise fault

    return raises


@pytest.mark.quick(8)
@pytest.mark.parametrize("method", ["supervised", "_supervised", "_checked"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_run_that_breaks_off_is_no_success(
    fault: BaseException, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it breaks off: around the ranks, in them, or after them."""
    monkeypatch.setattr(Launch, method, raising(fault))
    if method == "_checked":
        monkeypatch.setattr(Launch, "_supervised", lambda *_: Outcome(DONE, False, (Attempt(tmp_path, 1.0, None),)))
    try:
        found = run(*SMALL, str(tmp_path / "run"))
    except BaseException as raised:
        assert raised is fault  # Python ends with status 1
    else:
        assert found.status in (FAILED, MISTAKE, 130, 4), found


@pytest.mark.quick(2)
@pytest.mark.parametrize("status", [DONE, FAILED, MISTAKE, STOPPED, STOPPED_WITHOUT_CHECKPOINT])
def test_a_run_is_done_only_with_its_last_checkpoint(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(status, status in (STOPPED, STOPPED_WITHOUT_CHECKPOINT), (Attempt(tmp_path, 1.0, None),))
    monkeypatch.setattr(Launch, "_supervised", lambda *_: outcome)
    found = run(*SMALL, str(tmp_path / "run"), "--steps", "12")
    assert found.status == (status or FAILED), found
    assert ("there is no checkpoint of the last step, 12" in found.err) == (status == DONE)


def ended(arguments: Sequence[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-m", "shardwise", *arguments], text=True, env=environment, **given)


@pytest.mark.quick(1)
@pytest.mark.parametrize("closed", COMMANDS)
def test_a_reader_that_leaves_changes_no_status(closed: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for arguments, status in COMMANDS[closed]:
        done = ended(arguments, **dict.fromkeys(closed.split(), writing))
        assert done.returncode == status, (arguments, done)
        assert "Traceback" not in (done.stderr or "") and "BrokenPipe" not in (done.stderr or "")
    os.close(writing)


@pytest.mark.slow
def test_what_a_full_disk_does_not_take_is_an_error_and_progress_is_not_missed() -> None:
    with Path("/dev/full").open("w") as disk:
        done = ended(["list", "models"], stdout=disk)
        assert done.returncode == MISTAKE
        assert done.stderr.startswith("shardwise: error: standard output: cannot be written (No space left on device)")
        assert done.stderr.count("\n") == 1
        assert ended(TOO_LARGE, stdout=disk, stderr=disk).returncode == MISTAKE
        assert ended(TOO_LARGE, stderr=disk).returncode == FAILED
