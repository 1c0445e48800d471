"""`--on hosts.txt`: which ranks go where; ranks on two hosts, over a real sshd, end together however one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.running import run as shardwise
from launch.running import PREFACE, QUICK, alive, program, wait_until
from launch.targets.ssh_hosts import SshHosts, ssh_hosts
from launch.test_torchrun import job
from shardwise.cli.on_target import without_option
from shardwise.launch.local import supervise
from shardwise.launch.outcome import STOPPED, Event, Outcome
from shardwise.launch.targets import hosts as over_ssh
from shardwise.launch.targets.agent import installed, require_same
from shardwise.launch.targets.host_target import start_on
from shardwise.launch.targets.hosts import Host, placed, read_hosts
from shardwise.launch.targets.registry import TargetRequest, target_named
from shardwise.spec import SpecError
from shardwise.spec.wiring import Wiring


def refusal(*arguments: str) -> str:
    found = shardwise(*arguments)
    assert (found.status, found.out) == (2, "") and found.err.count("\n") == 1, found
    return found.err.strip()


# -- files of hosts ----------------------------------------------------------------------------------------


def test_files_as_others_write_them() -> None:
    text = "# DeepSpeed\nworker-1 slots=8\n\nroot@worker-2  slots=8 max_slots=8  # Open MPI\nworker-3:4\nworker-4\n"
    assert read_hosts(text) == [
        Host("worker-1", 8), Host("root@worker-2", 8), Host("worker-3", 4), Host("worker-4")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "hosts.txt: names no host; write one in a line: `host slots=8`"),
        ("a slots=8\nb slot=8", "hosts.txt, line 2: 'slot' is not a setting of a host; use slots"),
        ("a slots=0", "hosts.txt, line 1: '0' slots; use 1 to 4,096"),
        ("a slots=many", "hosts.txt, line 1: 'many' slots; use 1 to 4,096"),
        ("a b", "hosts.txt, line 1: 'a b' is not a host and its slots"),
        ("-oProxyCommand=x", "hosts.txt, line 1: '-oProxyCommand=x' is not a host"),
        ("a slots=1\na slots=2", "hosts.txt, line 2: a is there twice; add its slots up in one line"),
    ],
    ids=str,
)
def test_what_a_file_may_not_say(text: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        read_hosts(text, "hosts.txt")
    assert str(error.value).startswith(said)


@given(st.integers(1, 6), st.integers(1, 8), st.lists(st.one_of(st.none(), st.integers(1, 8)), min_size=1, max_size=6))
def test_every_rank_has_one_host_and_no_host_more_than_its_slots(
    nodes: int, devices: int, slots: list[int | None]
) -> None:
    hosts = [Host(f"h{number}", one) for number, one in enumerate(slots)]
    try:
        found = placed(hosts, nodes * devices, devices)
    except SpecError as error:
        assert str(error).startswith("on: ")
        return
    assert [rank for _, ranks in found for rank in ranks] == list(range(nodes * devices))
    assert len({len(ranks) for _, ranks in found}) == 1 and [one for one, _ in found] == hosts[: len(found)]
    assert all(len(ranks) <= (host.slots or devices) for host, ranks in found)


def test_too_few_hosts() -> None:
    with pytest.raises(SpecError, match="on: 1 host with room for 8 ranks each, 16 ranks need 2"):
        placed([Host("a", 8)], 16, 8)
    with pytest.raises(SpecError, match="on: 16 ranks on hosts of 3 slots; give every host 8 slots, or another"):
        placed([Host("a", 3), Host("b", 8)], 16, 8)


def test_targets_that_there_are_not(tmp_path: Path) -> None:
    small = ("--model", "tiny", "--cluster", "laptop:2", "--dp", "2", "--seq", "32", "--global-batch", "4")
    for verb in ("train", "verify"):
        assert refusal(verb, *small, "--on", "slrum") == (
            "shardwise: error: --on: 'slrum' is not a launch target; "
            "name a file of hosts, or slurm, ray, kubernetes, skypilot"
        )
        gone = str(tmp_path / "hosts.txt")
        assert "--on: there is no file of hosts '/" in refusal(verb, *small, "--on", gone)
    (tmp_path / "hosts.txt").write_text("a slots=2\n")
    for other in (("--rehearse", "2"), ("--emulate", "2x1,1Gbit,1ms"), ("--print-torchrun",)):
        assert "--on: cannot be combined with" in refusal("train", *small, "--on", gone, *other)


def test_an_option_is_taken_out() -> None:
    given = ["--on", "a.txt", "--on=b", "--steps", "3", "--only", "x"]
    assert without_option(given, "--on") == ["--steps", "3", "--only", "x"]


def test_what_differs_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a")
    here = installed(tmp_path, tmp_path / "job.yaml")
    require_same(here, dict(here), "b", tmp_path)
    with pytest.raises(SpecError, match=r"b: torch is 1\.0 there, .* here; make it the same on all hosts"):
        require_same(here, {**here, "torch": "1.0"}, "b", tmp_path)
    with pytest.raises(SpecError, match=r"b: the code of shardwise is 0 there"):
        require_same(here, {**here, "the code of shardwise": "0"}, "b", tmp_path)
    with pytest.raises(SpecError, match=rf"b: does not see {tmp_path}; the run's folder must be on storage that all"):
        require_same(here, {**here, "the job file": "missing"}, "b", tmp_path)


# -- two hosts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as found:
        yield found


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    if "two_hosts" in request.fixturenames:
        monkeypatch.setenv(over_ssh.SSH, request.getfixturevalue("two_hosts").ssh)


# Like `PREFACE`, but in a folder that all hosts share: a rank's own is only on its host.
SHARED = (
    PREFACE.replace("run = place.folder.parent", "run = Path(sys.argv[1])")
    + """
import json, socket
addresses = os.popen("ip -4 -br addr show eth0").read().split()
def note(**facts):
    (run / f"rank-{rank}-{attempt}").write_text(json.dumps({"pid": os.getpid(), **facts}))
"""
)


def launched(
    hosts: SshHosts, folder: Path, body: str, meanwhile: Callable[[Any], None] = lambda target: None, **settings: Any
) -> tuple[Outcome, list[Event]]:
    """The outcome of a program on both hosts; ``meanwhile`` runs beside it, with the target."""
    folder.mkdir(exist_ok=True)
    command, events = [*program(folder, body, SHARED), str(folder)], list[Event]()
    wanted = job("laptop:2", dp=2)
    wanted = replace(wanted, cluster=replace(wanted.cluster, wiring=settings.pop("wiring", None)))
    with start_on(TargetRequest(target_named(str(hosts.file)), wanted)) as target:
        beside = threading.Thread(target=meanwhile, args=(target,), daemon=True)
        target.agents = [agent.facts["process"] for agent in target.connected]  # type: ignore[attr-defined]
        target.clients = [agent.process.pid for agent in target.connected]  # type: ignore[attr-defined]
        beside.start()
        given = {"timeouts": QUICK, "restarts": 0, "start": target.start, **settings}
        outcome = supervise(command, 2, folder / "run", on_event=events.append, **given)
    return outcome, events


def notes(folder: Path, attempt: int = 1) -> list[dict[str, Any]]:
    """What both ranks have noted, once they have."""
    paths = [folder / f"rank-{rank}-{attempt}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths))
    return [json.loads(path.read_text()) for path in paths]


def nobody_left(folder: Path, attempt: int = 1) -> None:
    for one in notes(folder, attempt):
        wait_until(lambda pid=one["pid"]: not alive(pid), 30)  # type: ignore[misc]


def test_ranks_on_two_hosts_and_their_logs(two_hosts: SshHosts, tmp_path: Path) -> None:
    body = """
note(address=addresses[2].partition("/")[0],
     place=[place.rank, place.world, place.local_rank, place.ranks_here, place.address], attempt=place.attempt)
print(f"from rank {rank} \\u00e9")
"""
    outcome, events = launched(two_hosts, tmp_path / "run", body)
    assert outcome.status == 0, outcome.failure
    first = two_hosts.addresses[0]
    for rank, one in enumerate(notes(tmp_path / "run")):
        assert one["place"] == [rank, 2, 0, 1, first]
        assert (one["address"], one["attempt"]) == (two_hosts.addresses[rank], "attempt-0001")
        log = outcome.attempts[0].folder / f"rank-{rank}.log"
        assert log.read_text(encoding="utf-8") == f"from rank {rank} é\n"
    assert [event.kind for event in events] == ["started"]
    nobody_left(tmp_path / "run")


@pytest.mark.slow
def test_ranks_go_to_the_hosts_in_the_order_of_the_wiring(two_hosts: SshHosts, tmp_path: Path) -> None:
    body = """note(address=addresses[2].partition("/")[0], host=os.environ["SHARDWISE_HOST"])"""
    order = two_hosts.addresses[::-1]
    outcome, _ = launched(two_hosts, tmp_path / "run", body, wiring=Wiring(hosts=order))
    assert outcome.status == 0, outcome.failure
    assert [(one["address"], one["host"]) for one in notes(tmp_path / "run")] == [(one, one) for one in order]


def test_a_killed_rank_is_named_and_all_start_again(two_hosts: SshHosts, tmp_path: Path) -> None:
    body = """
note()
reporter.phase("step", 7)
if attempt == 1 and rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 1:
    others_wait()
"""
    outcome, _ = launched(two_hosts, tmp_path / "run", body, restarts=1)
    assert outcome.status == 0 and len(outcome.attempts) == 2
    assert str(outcome.attempts[0].failure) == "rank 1 (step, step 7): killed by SIGKILL"
    nobody_left(tmp_path / "run")


@pytest.mark.slow
def test_a_mistake_is_passed_on(two_hosts: SshHosts, tmp_path: Path) -> None:
    body = """
from shardwise.spec import SpecError
from shardwise.spec.wiring import Wiring
note()
if rank == 1:
    reporter.failed(SpecError("run.data", "is wrong", "fix it"))
    sys.exit(2)
others_wait()
"""
    outcome, _ = launched(two_hosts, tmp_path / "run", body, restarts=3)
    assert (outcome.status, len(outcome.attempts)) == (2, 1)
    assert outcome.failure is not None and outcome.failure.reason == "run.data: is wrong; fix it"
    nobody_left(tmp_path / "run")


@pytest.mark.parametrize("what", ["agents", pytest.param("clients", marks=pytest.mark.slow)])
def test_a_killed_agent_or_connection_ends_everything(two_hosts: SshHosts, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "run"

    def kill(target: Any) -> None:
        notes(folder)
        os.kill(getattr(target, what)[1], signal.SIGKILL)

    body = 'note()\nreporter.phase("step", 3)\nothers_wait()'
    outcome, _ = launched(two_hosts, folder, body, kill)
    assert outcome.status == 1
    assert outcome.failure is not None and outcome.failure.rank == 1
    assert outcome.failure.reason.startswith(f"host lost: {two_hosts.addresses[1]}: the connection ended (status ")
    nobody_left(folder)


@pytest.mark.slow
def test_a_stop_is_passed_on(two_hosts: SshHosts, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    body = """
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
reporter.phase("step", 0)
note()
while not stopped:
    time.sleep(0.05)
sys.exit(76)
"""

    def stop(target: Any) -> None:
        notes(folder)
        time.sleep(1)  # the agents tell of the ranks' phase twice a second
        os.kill(os.getpid(), signal.SIGUSR1)

    outcome, _ = launched(two_hosts, folder, body, stop)
    assert (outcome.status, outcome.stopped, outcome.failure) == (STOPPED, True, None)
    nobody_left(folder)


@pytest.mark.slow
def test_a_silent_rank_is_found(two_hosts: SshHosts, tmp_path: Path) -> None:
    body = """
note()
reporter.phase("step", 5)
if rank == 1:
    time.sleep(1.2)
    os.kill(os.getpid(), signal.SIGSTOP)
others_wait()
"""
    quick = type(QUICK)(start=60, step=4, checkpoint=60)
    outcome, _ = launched(two_hosts, tmp_path / "run", body, timeouts=quick)
    assert outcome.failure is not None and (outcome.failure.rank, outcome.failure.cause) == (1, "silent")
    nobody_left(tmp_path / "run")


LAUNCHER = """
import sys
from pathlib import Path
from launch.test_torchrun import job
from shardwise.launch.local import supervise
from shardwise.launch.targets.host_target import start_on
from shardwise.launch.targets.registry import TargetRequest, target_named
with start_on(TargetRequest(target_named(sys.argv[1]), job("laptop:2", dp=2))) as target:
    supervise(sys.argv[3:], 2, Path(sys.argv[2]) / "run", restarts=0, start=target.start)
"""


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing(two_hosts: SshHosts, tmp_path: Path) -> None:
    command = [*program(tmp_path, "note()\nothers_wait()", SHARED), str(tmp_path)]
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(two_hosts.file), str(tmp_path), *command])
    notes(tmp_path)
    launcher.kill()
    launcher.wait()
    nobody_left(tmp_path)


@pytest.mark.slow
def test_a_cut_cable_ends_both_sides(two_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"

    def cut(target: Any) -> None:
        notes(folder)
        two_hosts.cut(1)

    try:
        outcome, _ = launched(two_hosts, folder, 'note()\nreporter.phase("step", 3)\nothers_wait()', cut)
        assert outcome.failure is not None and outcome.failure.reason.startswith(f"host lost: {two_hosts.addresses[1]}")
        nobody_left(folder)  # though its agent could not be told
    finally:
        two_hosts.mend(1)


def test_hosts_that_cannot_be_used_are_named(
    two_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = TargetRequest(target_named(str(two_hosts.file)), job("laptop:2", dp=2))
    monkeypatch.setattr(over_ssh, "installed", lambda *paths: {"Python": "2.7"})
    with pytest.raises(SpecError, match=rf"{two_hosts.addresses[0]}: Python is .* there, 2\.7 here"), start_on(request):
        pass
    monkeypatch.undo()
    monkeypatch.setenv(over_ssh.SSH, f"{two_hosts.ssh} -p 1")
    lost = rf"{two_hosts.addresses[0]}: the connection ended \(status 255\)"
    with pytest.raises(SpecError, match=lost) as error, start_on(request):
        pass
    assert "must work" in str(error.value)


SMALL = ("--model", "tiny", "--cluster", "laptop:2", "--dp", "2", "--seq", "32", "--global-batch", "4")


@pytest.mark.slow
def test_train_on_hosts_equals_train_here_also_after_a_failure(two_hosts: SshHosts, tmp_path: Path) -> None:
    small = (*SMALL, "--precision", "fp32", "--steps", "8", "--set", "run.checkpoints.steps=3")
    assert shardwise("train", *small, "--run-folder", str(tmp_path / "here")).status == 0
    killed = threading.Thread(target=_kill_a_rank_at_step, args=(tmp_path / "there", 4), daemon=True)
    killed.start()
    on = ("--on", str(two_hosts.file))
    found = shardwise("train", *small, "--run-folder", str(tmp_path / "there"), *on, "--profile", "steps=7:8")
    assert found.status == 0, found.err
    assert "restart 1 of 3 from step 3" in found.err
    losses = [_losses(tmp_path / name / "metrics.jsonl") for name in ("here", "there")]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    verified = shardwise("verify", *SMALL, *on, "--steps", "1")
    assert verified.status == 0, verified.err


def _losses(path: Path) -> dict[int, float]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


def _kill_a_rank_at_step(folder: Path, step: int) -> None:
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and f'"step": {step}' in metrics.read_text(), 200)
    for entry in Path("/proc").iterdir():
        ours = entry.name.isdecimal() and str(folder).encode() in _read(entry / "cmdline")
        if ours and b"\0RANK=1\0" in _read(entry / "environ"):
            os.kill(int(entry.name), signal.SIGKILL)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
