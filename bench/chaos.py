"""Faults without end on emulated nodes: is every committed step kept, are the weights right, what does it cost?

    PYTHONPATH=src python bench/chaos.py                                        # a few faults in a few minutes
    PYTHONPATH=src python bench/chaos.py --minutes 20 --faults 60 --out bench/results/chaos

A model is trained on virtual nodes of this machine (as root; nothing leaves it), as `shardwise train --emulate` does,
with `restarts.shrink`. Meanwhile processes are killed and stopped, nodes cut off for moments or for longer, links
slowed down, and nodes lost and found. Then the run is stopped with a checkpoint, and another one goes to the same step
undisturbed.

Exits 1 where a step that was committed is not gone on from, where weights differ from the undisturbed run's, where the
steps per second outside of restarts and cuts are less than 90% of the undisturbed run's (of as many devices as were
there), or where fewer faults than asked for were done in the time. It ends by itself, and leaves nothing behind, also
if it is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.api.execution import ready_run, trained
from shardwise.api.given import job_arguments
from shardwise.api.run_options import RunOptions, RunPlace
from shardwise.cost.campaign import HOUR, Campaign
from shardwise.launch.emulate.network import Network, emulated
from shardwise.launch.outcome import DONE, STOPPED, Event, Outcome
from shardwise.launch.run import Launch
from shardwise.run.attempt import RankProgress, rank_file, read_progress
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.checkpoint.manifest import read_manifest
from shardwise.run.data.build import build
from shardwise.run.data.sources import standard_library
from shardwise.training.checkpoint.full_tensors import full_tensors

LEAST_THROUGHPUT = 0.90  # of the undisturbed run's, outside of restarts
MOST_DIFFERENCE = 1e-3  # of a tensor's largest weight: other layouts round otherwise
POLL_SECONDS = 0.02
SAVED_SECONDS = 3.0  # between two checkpoints
HEALTHY_SECONDS = (1.0, 6.0)  # between two faults
SHORT_CUT_SECONDS, SLOW_SECONDS = 1.5, 3.0
AGAIN_SECONDS = 600.0  # for a run that has to go on after a fault; a machine with other work is slow
WEIGHTS = {"kill": 7, "stop": 3, "cut": 2, "short cut": 3, "slow link": 5, "lost node": 2}  # how often each comes
FAST, SLOW = (125e6, 1e-4), (25e6, 2e-3)  # a link: bytes/s, and seconds one way


def job(shards: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Its schedule does not depend on how far the run will come; a large epsilon keeps rounding from growing."""
    return {
        "model": "tiny",
        "cluster": f"laptop:{asked.nodes}",
        "strategy": {"dp": asked.nodes},
        "training": {
            "global_batch": 16, "seq": 64, "precision": "fp32",
            "optimization": {"learning_rate": 1e-4, "epsilon": 1e-3},
        },
        "run": {
            "data": {"shards": [str(shards)]},
            "schedule": {"kind": "constant"},
            "evaluation": {"batches": 0},
            "emulate": {"nodes": asked.nodes, "rate": FAST[0], "delay": FAST[1]},
            "checkpoints": {"seconds": SAVED_SECONDS},
            "logging": {"tensorboard": False, "memory": 10**9},
            "timeouts": {"start": 300, "step": asked.step_limit, "checkpoint": 60},
            "restarts": {"most": 10**6, "shrink": True, "wait": 2},
        },
    }  # fmt: skip


@dataclass
class Seen:
    """What happened to one fault; moments are of the monotonic clock."""

    kind: str
    at: float
    kept_step: int  # committed before it
    detected: float | None = None  # the launcher said so
    again: float | None = None  # the first step after it
    resumed_step: int | None = None


@dataclass
class Timeline:
    """Steps and attempts of a run, by a thread that looks at its files; `notes` gets the launcher's events."""

    folder: RunFolder
    world: int
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # when, which, by how many ranks
    failed: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    attempt: int = 0
    ranks: int = 0
    _closed: threading.Event = field(default_factory=threading.Event)

    def notes(self, event: Event) -> None:
        self.said.append(f"{event.kind}: {event.text}")
        if event.kind == "failed":
            self.failed.append(time.monotonic())
        if event.kind == "changing":
            self.changed.append(time.monotonic())

    def watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            found = max((int(one.name.rpartition("-")[2]) for one in self.folder.attempts.glob("attempt-*")), default=0)
            self.attempt = found
            self.ranks = len(list(self._place.glob("rank-*.progress")))
            progress = self.progress()
            if progress is None or progress.phase not in ("data", "step"):
                continue
            if not self.steps or self.steps[-1][1] != progress.step:
                self.steps.append((time.monotonic(), progress.step, self.ranks))

    def close(self) -> None:
        self._closed.set()

    @property
    def _place(self) -> Path:
        return self.folder.attempts / f"attempt-{self.attempt:04d}"

    def progress(self) -> RankProgress | None:
        """Of rank 0 of the newest attempt."""
        try:
            handle = os.open(rank_file(self._place, 0, "progress"), os.O_RDONLY)
        except OSError:
            return None
        try:
            return read_progress(handle)
        finally:
            os.close(handle)

    @property
    def step(self) -> int:
        return self.steps[-1][1] if self.steps else 0

    def committed(self) -> int:
        return max(self.folder.checkpoints.committed(), default=0)


class Over(Exception):
    """The time for faults is, or a run does not go on."""


@dataclass
class Chaos:
    """Disturbs a run, from a thread beside its launcher."""

    network: Network
    line: Timeline
    chance: random.Random
    deadline: float
    kinds: list[str]
    seen: list[Seen] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def disturb(self, faults: int) -> None:
        """Then the run is asked to stop."""
        try:
            self._until(lambda: self.line.step > 5, AGAIN_SECONDS, "the run did not begin")
            kinds = [kind for kind in self.kinds for _ in range(WEIGHTS[kind])]
            bag: list[str] = []
            while len(self.seen) < faults and time.monotonic() < self.deadline:
                bag = bag or self.chance.sample(kinds, len(kinds))
                time.sleep(self.chance.uniform(*HEALTHY_SECONDS))
                self._one(bag.pop())
            time.sleep(1.0)
        except Over as error:
            self.problems.append(str(error))
        except BaseException as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self.network.heal()
            os.kill(os.getpid(), signal.SIGTERM)

    def _one(self, kind: str) -> None:
        attempt, failed = self.line.attempt, len(self.line.failed)
        one = Seen(kind, time.monotonic(), self.line.committed())
        getattr(self, f"_{kind.replace(' ', '_')}")()
        if kind not in ("short cut", "slow link"):
            self._until(lambda: len(self.line.failed) > failed, AGAIN_SECONDS, f"a {kind} was not noticed")
            self.network.heal() if kind == "cut" else None
        if kind == "lost node":
            self._goes_on(attempt + 1)
            one.again = self.line.steps[-1][0]
            self._train_a_little()
            self.network.heal()
            self._until(lambda: self.line.attempt > attempt + 1, AGAIN_SECONDS, "the run did not grow again")
        if len(self.line.failed) > failed:
            one.detected = self.line.failed[failed]
            self._goes_on(attempt + 1)
            one.again = one.again or self.line.steps[-1][0]
            one.resumed_step = next(step for at, step, _ in self.line.steps if at > one.detected)
            if one.resumed_step < one.kept_step:
                self.problems.append(f"{kind}: step {one.kept_step} was committed, {one.resumed_step} gone on from")
        elif kind in ("short cut", "slow link"):
            count = len(self.line.steps)
            self._train_a_little()
            one.again = self.line.steps[count][0]
        self.seen.append(one)
        tell(f"{len(self.seen):3d} {kind:9s} at step {self.line.step}{told_times(one)}")

    # -- faults ----------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        self._signal(self.chance.randrange(self.line.world), signal.SIGKILL)

    def _stop(self) -> None:
        self._signal(self.chance.randrange(self.line.world), signal.SIGSTOP)

    def _cut(self) -> None:
        self.network.partition(*self._pair())

    def _short_cut(self) -> None:
        self.network.partition(*self._pair())
        time.sleep(SHORT_CUT_SECONDS)
        self.network.heal()

    def _slow_link(self) -> None:
        self.network.reshape(rate=SLOW[0], delay=SLOW[1])
        time.sleep(SLOW_SECONDS)
        self.network.reshape(rate=FAST[0], delay=FAST[1])

    def _lost_node(self) -> None:
        node = self.chance.randrange(self.network.emulation.nodes)
        for other in range(self.network.emulation.nodes):
            if other != node:
                self.network.partition(node, other)
        self._signal(node, signal.SIGKILL)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _pair(self) -> tuple[int, int]:
        one, other = self.chance.sample(range(self.network.emulation.nodes), 2)
        return one, other

    def _signal(self, rank: int, number: signal.Signals) -> None:
        wanted, parent = f"RANK={rank}".encode(), os.getpid()
        for task in Path(f"/proc/{parent}/task").iterdir():
            for child in (task / "children").read_text().split():
                try:
                    if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                        os.kill(int(child), number)
                except OSError:
                    continue

    def _train_a_little(self) -> None:
        wanted = self.line.step + 3
        self._until(lambda: self.line.step >= wanted, AGAIN_SECONDS, "the run makes no steps")

    def _goes_on(self, attempt: int) -> None:
        """Until an attempt, or a later one, has done its first step."""
        self._until(lambda: self.line.attempt >= attempt, AGAIN_SECONDS, "the run was not started again")
        count = len(self.line.steps)
        self._until(lambda: len(self.line.steps) > count + 1, AGAIN_SECONDS, "the run does not go on after a restart")

    def _until(self, condition: Callable[[], bool], seconds: float, problem: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise Over(f"{problem} within {seconds:g} s")
            time.sleep(POLL_SECONDS)


# -- runs --------------------------------------------------------------------------------------------------


def trained_run(
    described: dict[str, Any], folder: Path, steps: int, begin: Callable[[Timeline, Network], None]
) -> tuple[Outcome | None, Timeline]:
    """As `shardwise train`; ``begin`` is called with the timeline and the network before the ranks start."""
    line = Timeline(RunFolder(folder), described["run"]["emulate"]["nodes"])
    options = RunOptions(steps=steps, run_folder=folder, grace="120s")
    ready = ready_run(options.over(job_arguments(described, {})), options, RunPlace(), note=lambda text: None)
    watching = threading.Thread(target=line.watch, daemon=True)

    def supervised(launch: Launch) -> Outcome:
        assert launch.job.run.emulate is not None
        with emulated(launch.job.run.emulate) as network:
            watching.start()
            begin(line, network)
            return replace(launch, network=network).supervised(line.notes)

    try:
        return trained(ready, supervised).outcome, line
    finally:
        line.close()


def largest_difference(one: RunFolder, other: RunFolder, step: int) -> float:
    """Of all weights, relative to the largest of their tensor."""
    found = 0.0
    places = [folder.checkpoints.of_step(step) for folder in (one, other)]
    manifests = [read_manifest(place) for place in places]
    keys = [key for key in manifests[0].tensors if key.startswith("weight/")]
    tensors = [full_tensors(place, manifest, keys) for place, manifest in zip(places, manifests)]
    for key in keys:
        mine, theirs = (each[key].read() for each in tensors)
        found = max(found, float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)))
    return found


# -- figures -----------------------------------------------------------------------------------------------


def restart_windows(line: Timeline, seen: list[Seen]) -> list[tuple[float, float]]:
    """From a fault, or a change of the layout, to the end of the first step after it; a short cut stops all steps."""
    begins = [one.at for one in seen if one.detected is not None] + line.changed
    begins += [at for at in line.failed if not any(one.at <= at and (one.again or at) >= at for one in seen)]
    found = [(one.at, one.again) for one in seen if one.kind == "short cut" and one.again and one.detected is None]
    for begin in sorted(begins):
        later = [at for at in (*line.failed, *line.changed) if at >= begin]
        after = [at for at, _, _ in line.steps if later and at > later[0]][:2]
        if len(after) == 2:  # the first step begins, and is done
            found.append((begin, after[1]))
    return found


def steps_outside(line: Timeline, windows: list[tuple[float, float]]) -> tuple[float, float]:
    """Steps, and seconds that as many of the planned devices as were there had for them."""
    steps = seconds = 0.0
    for (before, _, _), (after, _, ranks) in zip(line.steps, line.steps[1:]):
        if any(before < end and after > begin for begin, end in windows):
            continue
        steps += 1
        seconds += (after - before) * ranks / line.world
    return steps, seconds


def figures(chaos: Chaos, undisturbed: Timeline, difference: float, asked: argparse.Namespace) -> dict[str, Any]:
    line, seen = chaos.line, chaos.seen
    usual = (undisturbed.steps[-1][0] - undisturbed.steps[3][0]) / (len(undisturbed.steps) - 4)  # the first are slow
    windows = restart_windows(line, seen)
    restarts = [one for one in windows if any(one[0] <= at <= one[1] for at in (*line.failed, *line.changed))]
    steps, seconds = steps_outside(line, windows)
    found = [one for one in seen if one.detected is not None and one.again is not None]
    detect = [one.detected - one.at for one in found if one.detected is not None]
    restart = [one.again - one.detected for one in found if one.again is not None and one.detected is not None]
    whole = line.steps[-1][0] - line.steps[0][0]
    useful = max(step for _, step, _ in line.steps) * usual
    model = Campaign(
        tokens=useful, tokens_per_second=1.0, devices=line.world,
        device_hours_per_interruption=whole / max(1, len(restarts)) * line.world / HOUR,
        restart_seconds=statistics.fmean(end - begin for begin, end in restarts) if restarts else 0.0,
        checkpoint_interval=SAVED_SECONDS,
    )  # fmt: skip
    return {
        "faults": dict(Counter(one.kind for one in seen)),
        "minutes": (seen[-1].at - seen[0].at) / 60 if seen else 0.0,
        "restarts": len(restarts),
        "detect_seconds": quantiles(detect),
        "restart_seconds": quantiles(restart),
        "by_kind": {
            kind: quantiles([one.detected - one.at for one in found if one.kind == kind and one.detected is not None])
            for kind in WEIGHTS
            if any(one.kind == kind for one in found)
        },
        "step_seconds_undisturbed": usual,
        "throughput_outside_restarts": steps / seconds * usual if seconds else 0.0,
        "goodput": useful / whole,
        "goodput_of_the_model": model.goodput,
        "largest_difference_of_weights": difference,
        "steps": line.step,
        "nodes": asked.nodes,
        "load_average": os.getloadavg()[0],
        "seen": [asdict(one) for one in seen],
        "problems": chaos.problems,
    }


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": statistics.median(values), "most": max(values)}


def verdicts(found: dict[str, Any], asked: argparse.Namespace) -> list[str]:
    """What is wrong."""
    problems = list(found["problems"])
    done = sum(found["faults"].values())
    if done < asked.faults:
        problems.append(f"{done} faults of {asked.faults} in the time")
    if found["throughput_outside_restarts"] < LEAST_THROUGHPUT:
        problems.append(f"less than {LEAST_THROUGHPUT:.0%} of the undisturbed throughput outside of restarts")
    if not found["largest_difference_of_weights"] <= MOST_DIFFERENCE:
        problems.append("the weights differ from the undisturbed run's")
    return problems


def page(found: dict[str, Any], problems: list[str]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["faults"].items())
    detect, restart = found["detect_seconds"], found["restart_seconds"]
    lines = [
        f"{sum(found['faults'].values())} faults in {found['minutes']:.1f} minutes on {found['nodes']} nodes: {kinds}",
        f"{found['restarts']} restarts, {found['steps']} steps, no committed step lost"
        if not any("committed" in one for one in problems)
        else f"{found['restarts']} restarts, {found['steps']} steps",
    ]
    if detect:
        lines.append(f"to detect: {detect['median']:.2f} s (median), {detect['most']:.2f} s at most; "
                     f"from there to the next step: {restart['median']:.2f} s, {restart['most']:.2f} s")  # fmt: skip
    for kind, one in found["by_kind"].items():
        lines.append(f"  {kind}: detected after {one['median']:.2f} s, at most {one['most']:.2f} s")
    lines += [
        f"throughput outside of restarts: {found['throughput_outside_restarts']:.1%} of the undisturbed run's "
        f"(at least {LEAST_THROUGHPUT:.0%}; {1e3 * found['step_seconds_undisturbed']:.0f} ms a step; "
        f"load of this machine at the end: {found['load_average']:.1f})",
        f"goodput: {found['goodput']:.1%}; the planner's model for these faults: {found['goodput_of_the_model']:.1%}",
        f"largest difference of a weight: {found['largest_difference_of_weights']:.1e} of its tensor's largest",
        "; ".join(problems) or "ok",
    ]
    return "\n".join(lines)


def told_times(one: Seen) -> str:
    if one.detected is None:
        return ", no restart"
    again = "" if one.again is None else f", going on after {one.again - one.detected:.1f} s from {one.resumed_step}"
    return f", detected after {one.detected - one.at:.1f} s{again}"


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="for faults (default 4)")
    parser.add_argument("--faults", type=int, default=12, help="to be done in that time (default 12)")
    parser.add_argument("--nodes", type=int, default=2, help="of one rank each (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of which faults come, and when")
    parser.add_argument("--kinds", nargs="+", choices=WEIGHTS, help="of faults (default: all)")
    parser.add_argument("--step-limit", type=float, default=6.0, help="seconds until a step is stuck (default 6)")
    parser.add_argument("--out", help="where the figures go as well: OUT.json and OUT.txt")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    # Whatever goes wrong, this ends; ranks, keepers and nodes end with their launcher.
    end = threading.Timer(60 * (3 * asked.minutes + 15), lambda: os._exit(3))
    end.daemon = True
    end.start()
    with tempfile.TemporaryDirectory() as name:
        build(standard_library()[:20], Path(name) / "corpus")
        described = job(Path(name) / "corpus", asked)
        disturbances: list[Chaos] = []

        def begin(line: Timeline, network: Network) -> None:
            deadline = time.monotonic() + 60 * asked.minutes
            chaos = Chaos(network, line, random.Random(asked.seed), deadline, asked.kinds or list(WEIGHTS))
            disturbances.append(chaos)
            threading.Thread(target=chaos.disturb, args=(asked.faults,), daemon=True).start()

        outcome, line = trained_run(described, Path(name) / "disturbed", 10**6, begin)
        (chaos,) = disturbances
        if outcome is None or outcome.status not in (DONE, STOPPED):
            chaos.problems.append(
                f"the run ended with status {outcome and outcome.status}: {outcome and outcome.failure}"
            )
        steps = line.committed()
        tell(f"an undisturbed run goes to step {steps}")
        _, undisturbed = trained_run(described, Path(name) / "undisturbed", steps, lambda line, network: None)
        difference = largest_difference(line.folder, undisturbed.folder, steps)
    found = figures(chaos, undisturbed, difference, asked)
    problems = verdicts(found, asked)
    text = page(found, problems)
    print(text)
    if problems:
        tell("\n".join(line.said[-30:]))
    if asked.out:
        Path(f"{asked.out}.json").write_text(json.dumps({**found, "problems": problems}, indent=1) + "\n")
        Path(f"{asked.out}.txt").write_text(text + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
