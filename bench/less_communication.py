"""What sending less does to training: plain synchronous data parallelism beside compression, and beside DiLoCo.

python bench/less_communication.py compression [--steps 300]
python bench/less_communication.py late [--steps 300]
python bench/less_communication.py diloco [--steps 320] [--inner 16] [--outer 1.0,0.0] [--emulate 2x1,200Mbit,1ms]

Two workers train the tiny model on the built-in corpus. Curves go to ``--out`` as CSV, and DiLoCo's as a picture.
``--outer`` are the outer learning rate and momentum; the 0.7 and 0.9 of the paper are for runs of many meetings.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.cost.traffic.execution import step_traffic
from shardwise.launch.emulate.network import EmulatedPool, why_not
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.layout.stages import rank_contents
from shardwise.spec.emulation import Emulation
from shardwise.spec.job import Job

PRELOAD = ("torch", "shardwise.engine.engine", "shardwise.training.loop", "shardwise.run.data.run_data")
COMPRESSIONS: dict[str, Any] = {
    "none": "none",
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "int8, no feedback": {"method": "int8", "error_feedback": False},
    "fp8": "fp8",
    "fp8, no feedback": {"method": "fp8", "error_feedback": False},
    "powersgd 4": {"method": "powersgd", "rank": 4},
    "powersgd 4, no feedback": {"method": "powersgd", "rank": 4, "error_feedback": False},
    "1bit": "1bit",
    "1bit, no feedback": {"method": "1bit", "error_feedback": False},
    "1bit-adam": {"method": "1bit-adam", "exact_steps": 1},
    "1bit-adam, no feedback": {"method": "1bit-adam", "exact_steps": 1, "error_feedback": False},
}
EXACT = 0.25  # of the steps, where a method begins with exact ones
LATE: dict[str, Any] = {
    "every step": "every-step",
    **{f"async, {steps} late": {"method": "async", "staleness": steps} for steps in (1, 2, 4, 8)},
}
NEAR = 0.02  # of the uncompressed loss
HELD_OUT_BATCHES = 8
ROWS = 32  # of a microbatch: what fits the cache of a core
MANY = 512  # sequences: with two workers DiLoCo needs batches whose halves are still much alike


@dataclass(frozen=True)
class Trained:
    """``losses`` on held-out data by the tokens before them; bytes that one worker sent in a step (that is not
    exact), seconds spent on sending."""

    losses: dict[int, float]
    bytes_per_step: float
    communication_seconds: float
    seconds: float

    @property
    def last(self) -> float:
        return list(self.losses.values())[-1]


Train = Callable[[Job, int], Trained]  # a job of two workers; the validation loss after every so many steps


def job_of(steps: int, sequences: int, beta2: float = 0.95, **strategy: Any) -> Job:
    """Few sequences: what is lost in a gradient shows soon. Many: workers' own gradients are much alike."""
    rows = min(sequences // 2, ROWS)
    return Job.from_dict(
        {
            "model": "tiny",
            "cluster": "laptop:2",
            "strategy": {"dp": 2, "microbatch": rows, **strategy},
            "training": {
                "global_batch": sequences, "seq": 64, "precision": "fp32",
                "optimization": {"learning_rate": 3e-3, "beta2": beta2},
            },
            "run": {"steps": steps, "schedule": {"warmup": min(20, steps - 1)}},
        }
    )  # fmt: skip


def planned_bytes(job: Job) -> float:
    return sum(one.bytes_sent for one in step_traffic(job, rank_contents(job, 0)) if one.dimension == "dp")


# -- one worker ---------------------------------------------------------------------------------------


def work(place: WorkerPlace, job: Job, folder: str, interval: int, threads: int) -> Trained:
    import torch

    from shardwise.engine.engine import Engine
    from shardwise.engine.mesh import process_group
    from shardwise.run.data.order import Loader
    from shardwise.run.data.run_data import mixtures_of
    from shardwise.training.loop import batch_of, evaluate

    torch.set_num_threads(threads)
    with process_group(place.rank, place.world, place.rendezvous_file):
        engine, losses = Engine(job), {}
        training, validation = mixtures_of(job, Path(folder))
        assert validation is not None
        share = (job.sequences, engine.rows)
        loader = Loader(training, *share, workers=1, prefetch=2)
        held_out = Loader(validation, *share, workers=1, prefetch=1)
        clock, steps, seconds = watched(engine), job.run.steps, 0.0
        losses[0] = evaluate(engine, held_out, HELD_OUT_BATCHES)
        spent = 0.0
        for step in range(steps):
            batch = batch_of(loader.take(step), engine.device)
            before, began = clock.seconds, time.perf_counter()
            for group in engine.optimizer.param_groups:
                rate = job.training.optimization.learning_rate
                group["lr"] = rate * job.run.schedule.share(step, steps)
            engine.step(batch)
            spent, seconds = spent + clock.seconds - before, seconds + time.perf_counter() - began
            if (step + 1) % interval == 0 or step + 1 == steps:
                losses[(step + 1) * job.tokens_per_step] = evaluate(engine, held_out, HELD_OUT_BATCHES)
        loader.close()
        held_out.close()
        sent = engine.data.compressed_bytes + sum(one.sent_bytes for one in (engine.outer, engine.late) if one)
        return Trained(losses, sent / (steps - job.strategy.compression.exact_steps), spent, seconds)


class Clock:
    """Adds up the time inside what it wraps; all of it is waiting for the other worker, or sending to it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def wrapping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return function(*arguments, **named)
            self._inside, began = True, time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds, self._inside = self.seconds + time.perf_counter() - began, False

        return timed


def watched(engine: Any) -> Clock:
    """A clock on everything that meets the other worker in a step."""
    clock = Clock()
    for part in engine.data.parts.values():
        part.finish = clock.wrapping(part.finish)
    engine.over_data = clock.wrapping(engine.over_data)
    engine.gradient_norm = clock.wrapping(engine.gradient_norm)
    if engine.outer is not None:
        engine.outer.after_step = clock.wrapping(engine.outer.after_step)
    if engine.late is not None:
        engine.late.exchange = clock.wrapping(engine.late.exchange)
    return clock


# -- compression --------------------------------------------------------------------------------------


def compressed_job(steps: int, compression: Any) -> Job:
    """The exact steps of a method that begins with them are a share of all."""
    if isinstance(compression, dict) and "exact_steps" in compression:
        compression = compression | {"exact_steps": round(EXACT * steps)}
    return job_of(steps, 16, compression=compression)


def compressions(train: Train, steps: int, out: Path) -> None:
    print(f"{'gradients':26} {'bytes/step':>11} {'planned':>11} {'loss':>8} {'of uncompressed':>16}")
    curves: dict[str, dict[int, float]] = {}
    for name, compression in COMPRESSIONS.items():
        job = compressed_job(steps, compression)
        found = train(job, max(1, steps // 10))
        curves[name] = found.losses
        off = found.last / list(curves["none"].values())[-1] - 1
        counted = "-" if name == "none" else f"{found.bytes_per_step:,.0f}"
        verdict = "within 2%" if abs(off) <= NEAR else ("better" if off < 0 else "worse")
        print(
            f"{name:26} {counted:>11} {planned_bytes(job):11,.0f} {found.last:8.4f} {off:+10.2%} {verdict}", flush=True
        )
    write_curves(out / "compression.csv", curves)


# -- late sums ----------------------------------------------------------------------------------------


def lateness(train: Train, steps: int, out: Path) -> None:
    """What gradients that move the weights some steps later do to the loss."""
    print(f"{'gradients':26} {'loss':>8} {'of synchronous':>16}")
    curves: dict[str, dict[int, float]] = {}
    for name, synchronise in LATE.items():
        curves[name] = train(job_of(steps, 16, synchronise=synchronise), max(1, steps // 10)).losses
        first, last = (list(curves[one].values())[-1] for one in ("every step", name))
        print(f"{name:26} {last:8.4f} {last / first - 1:+16.2%}", flush=True)
    write_curves(out / "late.csv", curves)


# -- DiLoCo -------------------------------------------------------------------------------------------


def diloco(train: Train, steps: int, sequences: int, inner: int, outer: tuple[float, float], out: Path) -> None:
    """The loss of N tokens of synchronous training, and after how many DiLoCo has it."""
    rate, momentum = outer
    seldom_met = {
        "method": "diloco", "inner_steps": inner, "outer_learning_rate": rate, "outer_momentum": momentum,
    }  # fmt: skip
    more = -(-round(1.1 * steps) // inner) * inner
    plain = train(job_of(steps, sequences, beta2=0.99), inner)
    seldom = train(job_of(more, sequences, beta2=0.99, synchronise=seldom_met), inner)
    tokens = list(plain.losses)[-1]
    reached = next((at for at, loss in seldom.losses.items() if at and loss <= plain.last), None)
    print(f"synchronous: loss {plain.last:.4f} after {tokens:,} tokens, {per_token(plain):.2f} µs/token on sending")
    when = "not reached" if reached is None else f"after {reached:,} tokens, {reached / tokens:.2f} of those"
    print(f"DiLoCo ({inner} inner steps): {when}; {seldom.last:.4f} at its end")
    print(f"  {per_token(seldom):.2f} µs/token on sending: {per_token(plain) / per_token(seldom):.1f} times less")
    print(f"  {plain.seconds:.1f} s for {steps} synchronous steps, {seldom.seconds:.1f} s for {more} of DiLoCo")
    curves = {"synchronous": plain.losses, f"DiLoCo, {inner} inner steps": seldom.losses}
    write_curves(out / "diloco.csv", curves)
    (out / "diloco.svg").write_text(picture(curves), encoding="utf-8")


def per_token(found: Trained) -> float:
    return 1e6 * found.communication_seconds / list(found.losses)[-1]


# -- what is kept -------------------------------------------------------------------------------------


def write_curves(path: Path, curves: dict[str, dict[int, float]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["run", "tokens", "validation_loss"])
        for name, losses in curves.items():
            rows.writerows([name, tokens, f"{loss:.5f}"] for tokens, loss in losses.items())


def picture(curves: dict[str, dict[int, float]]) -> str:
    """Validation loss by tokens."""
    width, height, left, bottom = 640, 360, 60, 40
    most = max(tokens for losses in curves.values() for tokens in losses)
    every = [loss for losses in curves.values() for loss in losses.values()]
    low, high = min(every), max(every)

    def at(tokens: int, loss: float) -> str:
        x = left + (width - left - 10) * tokens / most
        return f"{x:.1f},{10 + (height - bottom - 10) * (high - loss) / (high - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left},10 V{height - bottom} H{width - 10}" fill="none" stroke="#888"/>',
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">tokens (0 to {most:,})</text>',
        f'<text x="{left - 6}" y="20" text-anchor="end">{high:.2f}</text>',
        f'<text x="{left - 6}" y="{height - bottom}" text-anchor="end">{low:.2f}</text>',
    ]
    for number, (name, losses) in enumerate(curves.items()):
        colour = ("#1f77b4", "#d62728")[number % 2]
        points = " ".join(at(*one) for one in losses.items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{width - 20}" y="{30 + 18 * number}" text-anchor="end" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compression", "late", "diloco"))
    parser.add_argument("--steps", type=int, help="300, of diloco 320")
    parser.add_argument("--threads", type=int, default=1, help="of each of the two workers")
    parser.add_argument("--sequences", type=int, default=MANY, help="in a step of diloco")
    parser.add_argument("--inner", type=int, default=16)
    parser.add_argument("--outer", default="1.0,0.0", help="outer learning rate and momentum")
    parser.add_argument("--emulate", help="train across such a network, like 2x1,200Mbit,1ms")
    parser.add_argument("--out", type=Path, default=Path("runs/less_communication"))
    asked = parser.parse_args()
    missing = why_not() if asked.emulate else None
    if missing is not None:
        return print(f"not measured: {missing}")
    asked.out.mkdir(parents=True, exist_ok=True)
    pool = EmulatedPool(Emulation.parse(asked.emulate), PRELOAD) if asked.emulate else Pool(PRELOAD)
    with closing(pool), tempfile.TemporaryDirectory() as folder:

        def train(job: Job, interval: int) -> Trained:
            found: Trained = pool.run(work, 2, job, folder, interval, asked.threads, timeout_seconds=7200)[0]
            return found

        if asked.what == "diloco":
            rate, momentum = map(float, asked.outer.split(","))
            diloco(train, asked.steps or 320, asked.sequences, asked.inner, (rate, momentum), asked.out)
        else:
            {"compression": compressions, "late": lateness}[asked.what](train, asked.steps or 300, asked.out)
    return None


if __name__ == "__main__":
    main()
