"""Kills a run's processes at random, again and again; the run must end as one that was never disturbed.

    PYTHONPATH=src python bench/soak.py --kills 100 --seconds 1500

A tiny model is trained on two processes by `shardwise train`, as a user starts it. Ranks are killed while they start,
in steps and in saves, and now and then the launcher, which is then started again. When the kills are done, or the
time for them is, the run is stopped with a checkpoint, and another run goes to the same step undisturbed. Exits 1 where
a byte of weights or moments differs, where a step that was committed is not gone on from, or where a process stays.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from shardwise.run.attempt import STOPPED, rank_file, read_progress
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.checkpoint.manifest import read_manifest
from shardwise.run.data.build import build
from shardwise.run.data.sources import standard_library

WORLD = 2
POLL_SECONDS = 0.005
START_LIMIT_SECONDS = 200.0
SHARE_OF_KILLS = 0.8  # of the time; the rest is for the run that nobody disturbs
LAUNCHER_EVERY = 10  # of so many kills one is the launcher's
MOMENTS = {"start": 0.25, "steps": 0.45, "save": 0.3}  # when a kill comes, and how often then
MOST_STEPS = 12  # of an attempt before a kill
STEPS_LIMIT_SECONDS = 20.0  # for them


def job(shards: Path) -> str:
    """Its schedule is constant: how far the run will come is not known before."""
    return yaml.safe_dump(
        {
            "model": "tiny",
            "cluster": f"laptop:{WORLD}",
            "strategy": {"dp": WORLD, "zero": 1},
            "training": {"global_batch": 8, "seq": 32, "precision": "fp32"},
            "run": {
                "data": {"shards": [str(shards)]},
                "schedule": {"kind": "constant"},
                "evaluation": {"batches": 0},
                "checkpoints": {"steps": 3, "seconds": None},
                "logging": {"tensorboard": False, "memory": 10**9},
                "restarts": 10**6,
            },
        }
    )


class Launcher:
    """`shardwise train` on a folder; `pid_of` its ranks."""

    def __init__(self, job_file: Path, folder: RunFolder, steps: int) -> None:
        command = [sys.executable, "-m", "shardwise", "train", str(job_file), "--run-folder", str(folder.path)]
        self.log = (folder.path.parent / f"{folder.path.name}.log").open("ab")
        self.process = subprocess.Popen(
            [*command, "--steps", str(steps), "--grace", "120s"], stdout=self.log, stderr=self.log
        )

    def pid_of(self, rank: int) -> int | None:
        wanted = f"RANK={rank}".encode()
        for child in self.children():
            try:
                if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    return child
            except OSError:
                continue
        return None

    def children(self) -> list[int]:
        try:
            pid = self.process.pid
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def ended(self, seconds: float) -> int:
        """Its exit status."""
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.log.close()


@dataclass
class Soak:
    """A run that is disturbed, and what was done to it."""

    job_file: Path
    folder: RunFolder
    chance: random.Random
    deadline: float
    killed: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    start_seconds: float = 5.0  # of an attempt, until its first step
    kept: int = 0  # the newest step that was committed when the last kill came
    restarts: int = 0

    def disturb(self, kills: int) -> None:
        """Kills, and at last stops the run with a checkpoint."""
        launcher = self._start()
        while self.killed.total() < kills and time.monotonic() < self.deadline:
            moment = self._wait_for_a_moment()
            if launcher.process.poll() is not None:
                self.problems.append(f"the launcher ended with status {launcher.process.returncode}")
                return
            if moment is None:
                break
            victim = "launcher" if self.chance.randrange(LAUNCHER_EVERY) == 0 else str(self.chance.randrange(WORLD))
            self.kept, attempt = self.newest(), self._attempt()
            if victim == "launcher":
                launcher = self._kill_launcher(launcher)
            else:
                pid = launcher.pid_of(int(victim))
                if pid is None:
                    continue
                os.kill(pid, signal.SIGKILL)
            self.killed[victim] += 1
            self.moments[moment] += 1
            self._until(lambda: self._attempt() > attempt, 60)  # noqa: B023 - it is called now
        self.restarts = self._attempt() - 1
        self._until(lambda: self._step() is not None, START_LIMIT_SECONDS)
        launcher.process.send_signal(signal.SIGTERM)
        status = launcher.ended(START_LIMIT_SECONDS)
        if status != STOPPED:
            self.problems.append(f"the run was stopped with status {status}")

    def newest(self) -> int:
        return max(self.folder.checkpoints.committed(), default=0)

    def _start(self) -> Launcher:
        return Launcher(self.job_file, self.folder, 10**6)

    def _kill_launcher(self, launcher: Launcher) -> Launcher:
        left = launcher.children()
        launcher.process.kill()
        launcher.process.wait()
        if not self._until(lambda: not any(_alive(pid) for pid in left), 10):
            self.problems.append("processes of a killed launcher stayed behind")
        launcher.log.close()
        return self._start()

    def _wait_for_a_moment(self) -> str | None:
        """Until the time has come for a kill, and what it comes in; None where it did not come in time."""
        moment = self.chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment == "start":
            time.sleep(self.chance.uniform(0, self.start_seconds))
            return moment
        began = time.monotonic()
        if not self._until(lambda: self._step() is not None, START_LIMIT_SECONDS):
            return None
        if (self._step() or self.kept) < self.kept:
            self.problems.append(f"step {self.kept} was committed, the run went on from {self._step()}")
        self.start_seconds = time.monotonic() - began
        wanted = (self._step() or 0) + self.chance.randrange(MOST_STEPS)
        self._until(lambda: (self._step() or 0) >= wanted, STEPS_LIMIT_SECONDS)
        if moment == "save":
            unfinished = Path(str(self.folder.checkpoints.path))
            self._until(lambda: any(unfinished.glob("step-*.part-*")), STEPS_LIMIT_SECONDS)
        time.sleep(self.chance.uniform(0, 0.05))
        return moment

    def _attempt(self) -> int:
        """The number of the newest attempt."""
        return max((int(one.name.rpartition("-")[2]) for one in self.folder.attempts.glob("attempt-*")), default=0)

    def _step(self) -> int | None:
        """The step at which rank 0 of the newest attempt is, once it trains."""
        path = rank_file(self.folder.attempts / f"attempt-{self._attempt():04d}", 0, "progress")
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            found = read_progress(handle)
        finally:
            os.close(handle)
        return found.step if found is not None and found.phase not in ("start", "failed") else None

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)
        return True


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed and when")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        build(standard_library()[:20], place / "corpus")
        (place / "job.yaml").write_text(job(place / "corpus"), encoding="utf-8")
        soak = Soak(
            place / "job.yaml", RunFolder(place / "disturbed"), random.Random(asked.seed),
            began + SHARE_OF_KILLS * asked.seconds,
        )  # fmt: skip
        soak.disturb(asked.kills)
        steps = soak.newest()
        whole = RunFolder(place / "undisturbed")
        problems = list(soak.problems)
        if not problems:
            left = max(10.0, began + asked.seconds - time.monotonic())
            status = Launcher(place / "job.yaml", whole, steps).ended(left)
            if status:
                problems.append(f"the undisturbed run ended with status {status}")
            else:
                problems += differences(soak.folder, whole, steps)
        if problems:
            print((place / "disturbed.log").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
    ranks = ", ".join(f"{soak.killed[str(rank)]} of rank {rank}" for rank in range(WORLD))
    when = ", ".join(f"{count} in {moment}" for moment, count in sorted(soak.moments.items()))
    seconds = time.monotonic() - began
    print(f"{soak.killed.total()} kills ({ranks}, {soak.killed['launcher']} of the launcher; {when}), ", end="")
    print(f"{soak.restarts} restarts, {steps} steps, {seconds:.0f} s: {'; '.join(problems) or 'not a bit differs'}")
    return 1 if problems else 0


def differences(disturbed: RunFolder, whole: RunFolder, step: int) -> list[str]:
    """Checkpoints of one step hold the same bytes in the same files, and the same numbers."""
    one, other = (read_manifest(folder.checkpoints.of_step(step)) for folder in (disturbed, whole))
    found = [f"{name} differs" for name in one.files if one.files[name] != other.files.get(name)]
    return found + (["the position differs"] if one.numbers != other.numbers else [])


if __name__ == "__main__":
    sys.exit(main())
