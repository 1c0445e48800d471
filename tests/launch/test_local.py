"""The local launcher with real processes: who failed first, restarts, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.running import PREFACE, QUICK, alive, launch, noted_pids, program, wait_until
from shardwise.launch.local import KEPT, new_folder, supervise
from shardwise.launch.outcome import DONE, FAILED, MISTAKE, STOPPED, Commit, Event
from shardwise.spec.errors import SpecError
from shardwise.spec.run import Timeouts


def test_ranks_know_their_place_and_end_well(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        """
print(rank, place.world, place.local_rank, place.rendezvous, os.environ["GLOO_SOCKET_IFNAME"], os.environ["MINE"])
reporter.phase("done", 1)
""",
        world=3,
        environment={"MINE": "x"},
    )
    assert (found.status, found.stopped, found.failure, len(found.attempts)) == (0, False, None, 1)
    folder = found.attempts[0].folder
    logs = [(folder / f"rank-{rank}.log").read_text() for rank in range(3)]
    (rendezvous,) = {Path(line.split()[3]) for line in logs}
    assert not rendezvous.exists()  # any more
    assert [line.split()[:3] for line in logs] == [[str(rank), "3", str(rank)] for rank in range(3)]
    assert {tuple(line.split()[4:]) for line in logs} in ({("lo", "x")}, {("lo0", "x")})


@pytest.mark.quick(1)
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_rank_is_named_and_all_start_again(killed: int, tmp_path: Path) -> None:
    events: list[Event] = []
    found = launch(
        tmp_path,
        f"""
reporter.phase("step", 7)
if attempt == 1:
    if rank == {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
    others_wait()
""",
        world=3,
        restarts=1,
        on_event=events.append,
    )
    assert found.status == 0
    assert [one.folder.name for one in found.attempts] == ["attempt-0001", "attempt-0002"]
    failure = found.attempts[0].failure
    assert failure is not None
    assert (failure.rank, failure.cause, failure.phase, failure.step) == (killed, "killed", "step", 7)
    assert [event.kind for event in events] == ["started", "failed", "started"]
    assert f"rank {killed} (step, step 7): killed by SIGKILL; restart 1 of 1 from step 0" in events[1].text


def test_a_rank_that_raises_says_why(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        """
reporter.phase("data", 3)
if rank == 1:
    try:
        raise ValueError("no tea")
    except ValueError as error:
        reporter.failed(error)
        others_wait()  # what hangs at its end is ended too
others_wait()
""",
    )
    assert found.status == 1
    assert str(found.failure) == "rank 1 (data, step 3): ValueError: no tea"


def test_a_rank_that_ends_without_a_word_is_quoted(tmp_path: Path) -> None:
    found = launch(tmp_path, "if rank == 1:\n    sys.exit('no coffee')\nothers_wait()", world=2)
    assert str(found.failure) == "rank 1 (start, step 0): exit status 1: 'no coffee'"


def test_victims_are_not_named(tmp_path: Path) -> None:
    """Rank 0 complains at once about its peer, as gloo does; the peer's own end is seen only after that."""
    found = launch(
        tmp_path,
        """
if rank == 0:
    try:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:550] Connection closed by peer [127.0.0.1]:1234")
    except RuntimeError as error:
        reporter.failed(error)
        sys.exit(1)
if rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
others_wait()
""",
        world=3,
    )
    assert str(found.failure) == "rank 1 (start, step 0): killed by SIGKILL"


@pytest.mark.slow
def test_a_rank_with_only_a_victims_complaint_is_named_at_last(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        """
if rank == 1:
    reporter.failed(RuntimeError("Connection reset by peer"))
others_wait()
""",
    )
    assert found.failure is not None
    assert found.failure.rank == 1


def test_tries_are_bounded(tmp_path: Path) -> None:
    found = launch(tmp_path, "sys.exit(3)", world=1, restarts=2)
    assert (found.status, len(found.attempts)) == (1, 3)
    assert len({one.folder for one in found.attempts}) == 3


@pytest.mark.slow
def test_progress_earns_the_tries_back(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.write_text("0")
    found = launch(
        tmp_path,
        f"""
steps = Path({str(steps)!r})
if attempt <= 4:
    steps.write_text(str(10 * attempt))
    sys.exit(3)
""",
        world=1,
        restarts=1,
        last_commit=lambda: Commit(int(steps.read_text())),
    )
    assert (found.status, len(found.attempts)) == (0, 5)


def test_only_the_last_attempts_are_kept(tmp_path: Path) -> None:
    (tmp_path / "run" / "notes").mkdir(parents=True)
    made = [new_folder(tmp_path / "run") for _ in range(KEPT + 2)]
    assert sorted(tmp_path.glob("run/*")) == sorted([*made[2:], tmp_path / "run" / "notes"])
    assert made[-1].name == f"attempt-{KEPT + 2:04d}"


def test_a_users_mistake_is_not_tried_again(tmp_path: Path) -> None:
    found = launch(tmp_path, "print('job.yaml: no such model', file=sys.stderr)\nsys.exit(2)", restarts=5)
    assert (found.status, len(found.attempts)) == (2, 1)
    assert found.failure is not None
    assert (found.failure.mistake, found.failure.reason) == (True, "job.yaml: no such model")


@pytest.mark.parametrize("when", ["before it reports", "after"])
def test_what_cannot_be_imported_is_not_tried_again(when: str, tmp_path: Path) -> None:
    """A package that is broken, or missing in what the ranks run."""
    body = "import no_such_package"
    if when == "after":
        body = f"try:\n    {body}\nexcept ImportError as error:\n    reporter.failed(error)\n    sys.exit(1)"
    found = launch(tmp_path, body, restarts=3)
    assert (found.status, len(found.attempts)) == (2, 1)
    assert found.failure is not None
    assert found.failure.reason == "ModuleNotFoundError: No module named 'no_such_package'"


def test_a_mistake_that_a_rank_reports(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        """
from shardwise.spec.errors import SpecError
reporter.failed(SpecError("data.path", "is not there", "check it"))
others_wait()
""",
        restarts=5,
    )
    assert found.status == 2
    assert found.failure is not None
    assert found.failure.reason == "data.path: is not there; check it"


def test_a_stopped_rank_is_seen_and_named(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        """
reporter.phase("step", 4)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
others_wait()
""",
        world=3,
        timeouts=Timeouts(start=60, step=3, checkpoint=60),
    )
    failure = found.failure
    assert failure is not None
    assert (failure.rank, failure.cause, failure.phase, failure.step) == (1, "silent", "step", 4)
    assert "no sign of life" in failure.reason


@pytest.mark.slow
def test_a_rank_that_stays_behind_is_named(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        """
reporter.phase("data", 4)
if rank == 1:
    others_wait()
reporter.phase("step", 4)
others_wait()
""",
        world=3,
        timeouts=Timeouts(start=60, step=1, checkpoint=60),
    )
    failure = found.failure
    assert failure is not None
    assert (failure.rank, failure.cause, failure.phase) == (1, "stuck", "data")
    assert "program.py" in failure.reason
    assert "in others_wait" in failure.reason


def test_a_rank_that_the_others_gave_up_on_is_named(tmp_path: Path) -> None:
    """The process group's own limit comes before the watchdog's: those that wait raise, the one at fault does not."""
    found = launch(
        tmp_path,
        """
reporter.phase("data", 4)
(run / f"reads-{rank}").touch()
if rank != 1:
    while not all((run / f"reads-{other}").exists() for other in range(3)):
        time.sleep(0.01)
    reporter.phase("step", 4)
    reporter.failed(RuntimeError("Timed out waiting 4000ms for recv operation to complete"))
others_wait()
""",
        world=3,
    )
    failure = found.failure
    assert failure is not None
    assert (failure.rank, failure.cause, failure.phase) == (1, "stuck", "data")


def test_slow_work_that_was_announced_is_no_failure(tmp_path: Path) -> None:
    body = """
reporter.phase("checkpoint", 4)
time.sleep(1)
reporter.phase("step", 5, limit_seconds=60)
time.sleep(1)
"""
    assert launch(tmp_path, body, timeouts=Timeouts(start=60, step=0.3, checkpoint=60)).status == 0


def test_ranks_that_never_report(tmp_path: Path) -> None:
    found = launch(
        tmp_path, "import time\ntime.sleep(60)", preface="", timeouts=Timeouts(start=0.5, step=60, checkpoint=60)
    )
    assert found.failure is not None
    assert "rank 0: has not reported since it was started" in str(found.failure)


def test_nothing_that_a_rank_started_is_left(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        """
child = subprocess.Popen(["sleep", "1000"])
(run / f"{rank}.pid").write_text(str(child.pid))
(run / f"own-{rank}.pid").write_text(str(os.getpid()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 0:
    while len(list(run.glob("*.pid"))) < 4:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
others_wait()
""",
    )
    assert found.failure is not None
    assert found.failure.rank == 0
    pids = noted_pids(tmp_path / "run")
    assert len(pids) == 4
    wait_until(lambda: not any(alive(pid) for pid in pids), seconds=5)


KILL_GUARD = """
for one in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
    if b"guard.py" in Path(f"/proc/{one}/cmdline").read_bytes():
        os.kill(int(one), signal.SIGNAL)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_guard_that_is_gone_ends_no_run(name: str, tmp_path: Path) -> None:
    """The guard first, then a rank: the run starts again, and ends."""
    body = f"""
reporter.phase("step", 7)
if attempt == 1:
    if rank == 0:
        {KILL_GUARD.replace("SIGNAL", name).strip().replace(chr(10), chr(10) + "        ")}
        os.kill(os.getpid(), signal.SIGKILL)
    others_wait()
"""
    found = launch(tmp_path, body, restarts=1)
    assert (found.status, len(found.attempts)) == (0, 2)
    assert found.attempts[0].failure is not None and found.attempts[0].failure.rank == 0


ENDS = {  # how a rank ends, and what a run is if no rank ends worse
    "sys.exit(0)": DONE,
    f"sys.exit({STOPPED})": STOPPED,
    "sys.exit(2)": MISTAKE,
    "os._exit(1)": FAILED,
    "raise BrokenPipeError(32, 'Broken pipe')": FAILED,
    "os.kill(os.getpid(), signal.SIGKILL)": FAILED,
    "os.kill(os.getpid(), signal.SIGTERM)": FAILED,
}


@pytest.mark.parametrize("worse", ENDS)
def test_a_run_is_done_only_if_all_its_ranks_are(worse: str, tmp_path: Path) -> None:
    found = launch(tmp_path, f"reporter.phase('step', 7)\nif rank == 1:\n    {worse}")
    assert (found.status, found.stopped) == (ENDS[worse], ENDS[worse] == STOPPED)


# -- signals, which need a launcher of their own -----------------------------------------------------

LAUNCHER = """
import sys
from pathlib import Path
from shardwise.launch.local import supervise

outcome = supervise([sys.executable, sys.argv[1]], 2, Path(sys.argv[2]), grace_seconds=float(sys.argv[3]),
                    on_event=lambda event: print(event.kind, event.text, flush=True))
print("ended", outcome.stopped, len(outcome.attempts))
sys.exit(outcome.status)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
READY = """
child = subprocess.Popen(["sleep", "1000"])
(run / f"child-{rank}.pid").write_text(str(child.pid))
(run / f"rank-{rank}.pid").write_text(str(os.getpid()))
"""


def _heed_signals() -> None:
    """Tests that a shell runs in the background, or under nohup, inherit what is ignored, which a launcher respects."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def launcher(folder: Path, body: str, grace_seconds: float, preface: str = PREFACE) -> subprocess.Popen[str]:
    """A launcher of two ranks in a process of its own, when both ranks and a child of each run."""
    command = program(folder, body, preface)
    (folder / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(folder / "launcher.py"), command[1], str(folder / "run"), str(grace_seconds)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=_heed_signals,
    )  # fmt: skip
    wait_until(lambda: len(noted_pids(folder / "run")) == 4)
    return process


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_gives_the_ranks_time_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    body = f"""
def stop(*_):
    (run / f"saved-{{rank}}").touch()
    sys.exit({STOPPED})
signal.signal(signal.SIGTERM, stop)
{READY}
others_wait()
"""
    process = launcher(tmp_path, body, 30)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == STOPPED, said
    assert f"stopping {number.name}: the ranks have 30 s for a checkpoint" in said
    assert said.endswith("ended True 1\n")
    assert len(list((tmp_path / "run").glob("saved-*"))) == 2
    wait_until(lambda: not any(alive(pid) for pid in noted_pids(tmp_path / "run")), 10)  # who is killed takes a moment


def test_ranks_that_do_not_stop_in_time_are_killed(tmp_path: Path) -> None:
    process = launcher(tmp_path, f"reporter.phase('step', 3)\n{DEAF}\n{READY}\nothers_wait()", 0.3)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 75, said
    assert "killing still running: rank 0, 1" in said
    wait_until(lambda: not any(alive(pid) for pid in noted_pids(tmp_path / "run")), 10)  # who is killed takes a moment


def test_a_run_that_is_stopped_while_it_starts_has_nothing_to_save(tmp_path: Path) -> None:
    process = launcher(tmp_path, f"{DEAF}\n{READY}\nothers_wait()", 0.3)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == STOPPED, said
    wait_until(lambda: not any(alive(pid) for pid in noted_pids(tmp_path / "run")), 10)  # who is killed takes a moment


@pytest.mark.slow
def test_a_rank_that_does_not_listen_yet_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It is still importing, say, and dies of SIGTERM; the other one would wait for it."""
    preface = PREFACE.replace("Reporter(place)\n", "Reporter(place) if place.rank else None\n")
    process = launcher(tmp_path, f"if rank:\n    {DEAF}\n{READY}\nothers_wait()", 1000, preface)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == STOPPED, said
    wait_until(lambda: not any(alive(pid) for pid in noted_pids(tmp_path / "run")), 10)  # who is killed takes a moment


def guard_of(pid: int) -> int:
    """The guard process of a launcher."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(one) for one in children if b"guard.py" in Path(f"/proc/{one}/cmdline").read_bytes())


@pytest.mark.quick(2)
@pytest.mark.parametrize("before", ["", DEAF, "STOP", "GUARD"])
def test_no_rank_outlives_a_launcher_that_is_killed(before: str, tmp_path: Path) -> None:
    """Nor do its children; a guard that was killed before has a successor."""
    process = launcher(tmp_path, f"{before if before == DEAF else ''}\n{READY}\nothers_wait()", 30)
    pids = noted_pids(tmp_path / "run")
    if before == "STOP":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    if before == "GUARD":
        os.kill(guard_of(process.pid), signal.SIGKILL)
        assert process.stdout is not None
        assert any(line.startswith("guard it ended with status -9") for line in process.stdout)
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in pids), seconds=10)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"cannot write to .*file"):
        supervise([sys.executable, "-c", ""], 1, tmp_path / "file" / "run", timeouts=QUICK)


def test_the_preface_needs_no_torch() -> None:
    code = f"import sys\nsys.modules['torch'] = None\n{PREFACE.partition('place =')[0]}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
