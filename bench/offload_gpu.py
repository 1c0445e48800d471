"""Offload on a GPU: how much of its copies lies under kernels, and the seconds it adds, planned beside measured.

    PYTHONPATH=src python bench/offload_gpu.py --batch 2 4 8

Every kind trains the same decoder as the case that offloads nothing, in turns with it. The measured exposed seconds are
the difference of their medians, the planned ones that of their predictions. Copies and kernels are those of two steps
in the middle of some that are profiled; a profile much longer or shorter than as many measured steps is marked.
``--traces`` has a file for each row: its copies, those that follow each other joined, and its gaps without a kernel.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import statistics
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardwise.cost.analysis import analyze
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.measure.reference import sample_batch
from shardwise.measure.step import cluster_name_here
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job

MODEL = {"name": "bench", "heads": 16, "kv_heads": 16, "vocab": 8192, "activation": "swiglu", "norm": "rmsnorm",
         "norm_bias": False}  # fmt: skip
# Strategy fields; the stage of ZeRO is what the kind needs.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "optimizer": (0, {"optimizer": 1}),
    "optimizer, weights": (3, {"optimizer": 1, "weights": 1}),
    "optimizer, weights, gradients": (3, {"optimizer": 1, "weights": 1, "gradients": 1}),
    "a quarter of the activations": (0, {"activations": 0.25}),
    "half of the activations": (0, {"activations": 0.5}),
    "activations": (0, {"activations": 1}),
}
FIRST, WARM, ROUNDS = 2, 1, 2  # steps before all others, before those of a turn; turns
PROFILED, SKIPPED, COUNTED = 4, 1, 2  # steps: all, those before the ones that count, and these
TOLERANCE = 0.1  # of the length of a profile
STUCK_SECONDS = 25
Span = tuple[float, float]


@dataclass(frozen=True)
class StepProfile:
    """Spans in seconds of some profiled steps: copies out and in, and kernels, of which those that meet are joined."""

    out: tuple[Span, ...]
    back: tuple[Span, ...]
    kernels: tuple[Span, ...]

    @property
    def length(self) -> float:
        return self.kernels[-1][1] - self.kernels[0][0]

    def middle(self, step_seconds: float) -> StepProfile:
        """The steps that count: others like them come before and after, so that it does not matter where they begin."""
        begin = self.kernels[0][0] + SKIPPED * step_seconds
        window = begin, begin + COUNTED * step_seconds
        return StepProfile(*(clipped(spans, window) for spans in (self.out, self.back, self.kernels)))

    @property
    def copied_seconds(self) -> float:
        return length((*self.out, *self.back))

    @property
    def hidden_share(self) -> float:
        hidden = sum(common(span, self.kernels) for span in (*self.out, *self.back))
        return hidden / max(1e-9, self.copied_seconds)


@dataclass(frozen=True)
class OffloadRow:
    """One kind of offload and the same steps without it."""

    name: str
    layers: int
    tokens: int
    step_seconds: float
    plain_seconds: float
    planned_seconds: float
    planned_plain_seconds: float
    moved_bytes: float  # of a step, both directions
    memory_bytes: int
    loss_difference: float  # relative, after as many steps
    profiled: StepProfile

    @property
    def exposed_seconds(self) -> float:
        return self.step_seconds - self.plain_seconds

    @property
    def planned_exposed_seconds(self) -> float:
        return self.planned_seconds - self.planned_plain_seconds

    @property
    def profile_is_whole(self) -> bool:
        return abs(self.profiled.length / (PROFILED * self.step_seconds) - 1) < TOLERANCE

    def figures(self) -> dict[str, Any]:
        middle = self.profiled.middle(self.step_seconds)
        figures = {
            "offloaded": self.name, "layers": self.layers, "tokens": self.tokens, "step_ms": 1e3 * self.step_seconds,
            "plain_ms": 1e3 * self.plain_seconds, "exposed_ms": 1e3 * self.exposed_seconds,
            "planned_exposed_ms": 1e3 * self.planned_exposed_seconds, "hidden_share": middle.hidden_share,
            "out_ms": 1e3 * length(middle.out) / COUNTED, "in_ms": 1e3 * length(middle.back) / COUNTED,
            "kernels_ms": 1e3 * length(middle.kernels) / COUNTED, "planned_step_ms": 1e3 * self.planned_seconds,
            "moved_GB": self.moved_bytes / 1e9, "memory_GB": self.memory_bytes / 1e9,
            "profiled_ms": 1e3 * self.profiled.length / PROFILED, "profile_is_whole": self.profile_is_whole,
            "loss_difference": self.loss_difference,
        }  # fmt: skip
        return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}

    def line(self) -> str:
        one = self.figures()
        warning = "" if self.profile_is_whole else "  NOT ALL OF IT WAS PROFILED"
        start = (
            f"{self.name:30} {self.layers:>6} {self.tokens:>6} {one['hidden_share']:7.0%} {self.loss_difference:8.0e}"
        )
        return start + "".join(f" {one[f'{name}_ms']:>{len(name) + 1}.1f}" for name in COLUMNS) + warning


COLUMNS = ("step", "plain", "exposed", "planned_exposed", "out", "in", "kernels", "profiled")
HEADER = (f"{'offloaded':30} {'layers':>6} {'tokens':>6} {'hidden':>7} {'loss off':>8} "
          + " ".join(f"{name:>{len(name) + 1}}" for name in COLUMNS) + "   (ms a step)")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="of each, in a turn")
    parser.add_argument("--batch", type=int, nargs="*", default=[2, 8], help="sequences, all in one microbatch")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--layers", type=int, nargs="*", default=[4])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", nargs="*", help="instead of all of these, some, as LAYERSxBATCH:KIND")
    parser.add_argument("--cluster", help="to plan with, such as a calibrated file; by default the catalogue's")
    parser.add_argument("--out", type=Path, help="rows as JSON")
    parser.add_argument("--traces", type=Path, help="a folder")
    asked = parser.parse_args()
    device = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    print(f"{device}; layers of {asked.hidden} and {asked.ffn}, seq {asked.seq}, bf16\n{HEADER}", flush=True)
    rows: list[OffloadRow] = []
    with process_group(0, 1, dist.HashStore(), device="cuda"):  # type: ignore[attr-defined]
        for (layers, batch), kinds in _wanted(asked).items():
            plain = Trained(_job({}, 0, layers, batch, asked))  # ZeRO changes nothing on one device
            for name in kinds:
                faulthandler.dump_traceback_later(STUCK_SECONDS, repeat=True)
                rows.append(measured(name, plain, layers, batch, asked))
                print(rows[-1].line(), flush=True)
                if asked.traces:
                    lines = [HEADER, rows[-1].line(), *timeline(rows[-1].profiled.middle(rows[-1].step_seconds))]
                    where = (
                        f"{name.replace(', ', '-').replace(' ', '-')}-{layers}x{batch}x{asked.seq}-{asked.hidden}.txt"
                    )
                    (asked.traces / where).write_text("\n".join(lines) + "\n")
                if asked.out:
                    asked.out.write_text(
                        json.dumps({"device": device, "rows": [one.figures() for one in rows]}, indent=1)
                    )
    faulthandler.cancel_dump_traceback_later()
    return 0


def _wanted(asked: Any) -> dict[tuple[int, int], list[str]]:
    """Kinds of offload by layers and batch."""
    if not asked.rows:
        return {(layers, batch): asked.kinds for layers in asked.layers for batch in asked.batch}
    found: dict[tuple[int, int], list[str]] = {}
    for row in asked.rows:
        sizes, kind = row.split(":")
        layers, batch = map(int, sizes.split("x"))
        found.setdefault((layers, batch), []).append(kind)
    return found


class Trained:
    """The first steps of a job, all on the same tokens, and their losses."""

    def __init__(self, job: Job) -> None:
        self.engine, self.losses = Engine(job, device="cuda"), list[torch.Tensor]()
        self.tokens = sample_batch(job, 0, 0).changed(lambda tensor: tensor.cuda())
        for _ in range(FIRST):
            self.step()

    def step(self) -> None:
        self.losses.append(self.engine.step(self.tokens).loss)

    def timed(self, steps: int) -> list[float]:
        """Steps follow each other as in training; a step begins where the one before has ended."""
        ends = []
        for _ in range(WARM + steps):
            self.step()
            ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            ends[-1].record()
        torch.cuda.synchronize()
        return [one.elapsed_time(other) / 1e3 for one, other in zip(ends[WARM - 1 :], ends[WARM:])]

    def differs(self, other: Trained) -> float:
        """In the last loss that both have."""
        last = min(len(self.losses), len(other.losses)) - 1
        return abs(float(self.losses[last] / other.losses[last]) - 1)

    @property
    def state_bytes(self) -> int:
        states = [tensor for of_one in self.engine.optimizer.state.values() for tensor in of_one.values()]
        return sum(one.nbytes for one in (*(held.parameter for held in self.engine.parameters), *states))


def measured(name: str, plain: Trained, layers: int, batch: int, asked: Any) -> OffloadRow:
    zero, offload = KINDS[name]
    job = _job(offload, zero, layers, batch, asked)
    one = Trained(job)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for trained, found in zip((plain, one), seconds):
            found += trained.timed(asked.steps)
    off, store = one.differs(plain), one.engine.store
    assert store is not None
    store.lanes.moved.clear()
    torch.cuda.reset_peak_memory_stats()
    profiled = _profiled(one)
    memory = torch.cuda.max_memory_allocated() - plain.state_bytes
    moved = sum(store.lanes.moved.values()) / (1 + PROFILED)
    planned, without = (analyze(each).predicted_seconds for each in (job, plain.engine.job))
    del one, store, trained
    gc.collect()
    torch.cuda.empty_cache()
    plain_step, step = (statistics.median(each) for each in seconds)
    return OffloadRow(name, layers, batch * asked.seq, step, plain_step, planned, without, moved, memory, off, profiled)


def _profiled(one: Trained) -> StepProfile:
    """The first profile of a process begins late, so that another one comes before it."""
    with profile(activities=[ProfilerActivity.CUDA]):
        one.step()
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            one.step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        return spans_of(json.loads(Path(file.name).read_text())["traceEvents"])


def spans_of(events: Iterable[Mapping[str, Any]]) -> StepProfile:
    """Of a Chrome trace, whose times are microseconds; ranges that the host has marked are no kernels."""
    found: dict[str, list[Span]] = {"out": [], "in": [], "kernels": []}
    for event in events:
        span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) if "dur" in event else None
        kind, name = event.get("cat"), str(event.get("name"))
        if span is None:
            continue
        if kind == "kernel":
            found["kernels"].append(span)
        elif kind == "gpu_memcpy" and "DtoH" in name:
            found["out"].append(span)
        elif kind == "gpu_memcpy" and "HtoD" in name:
            found["in"].append(span)
    return StepProfile(tuple(sorted(found["out"])), tuple(sorted(found["in"])), union(found["kernels"]))


def union(spans: Iterable[Span], gap: float = 0.0) -> tuple[Span, ...]:
    """Those that overlap, meet, or have at most a ``gap`` between them, joined."""
    together: list[Span] = []
    for start, end in sorted(spans):
        if together and start <= together[-1][1] + gap:
            together[-1] = (together[-1][0], max(end, together[-1][1]))
        else:
            together.append((start, end))
    return tuple(together)


def clipped(spans: Iterable[Span], window: Span) -> tuple[Span, ...]:
    """What of them is in the window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return tuple((start, end) for start, end in cut if start < end)


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def common(span: Span, busy: Sequence[Span]) -> float:
    """Seconds of a span under spans of which none meet each other, in order."""
    place, found = max(0, bisect_left(busy, (span[0], span[0])) - 1), 0.0
    while place < len(busy) and busy[place][0] < span[1]:
        found += max(0.0, min(span[1], busy[place][1]) - max(span[0], busy[place][0]))
        place += 1
    return found


def timeline(one: StepProfile, gap: float = 0.0003) -> list[str]:
    """Copies in a row, and times without a kernel that are longer than the ``gap``, in milliseconds from the start."""
    begin = one.kernels[0][0]
    idle = [(before[1], after[0]) for before, after in zip(one.kernels, one.kernels[1:]) if after[0] - before[1] > gap]
    kinds = (("out", union(one.out, gap)), ("in", union(one.back, gap)), ("no kernel", idle))
    lines = [(start, end, name) for name, spans in kinds for start, end in spans]
    return [f"{1e3 * (start - begin):9.2f} {1e3 * (end - start):8.2f}  {name}" for start, end, name in sorted(lines)]


def _job(offload: dict[str, Any], zero: int, layers: int, batch: int, asked: Any) -> Job:
    training = {"global_batch": batch, "seq": asked.seq, "precision": "bf16", "graphs": False, "compile": asked.compile}
    strategy = {"microbatch": batch, "zero": zero, "offload": offload}
    one = cluster_from(asked.cluster or cluster_name_here("cuda")).with_devices(1)
    model = {**MODEL, "layers": layers, "hidden": asked.hidden, "ffn": asked.ffn}
    return Job.from_dict({"model": model, "cluster": one.to_dict(), "strategy": strategy, "training": training})


if __name__ == "__main__":
    sys.exit(main())
