"""Offload on a GPU: how much of its copies lies under kernels, and the seconds it adds, planned beside measured.

    PYTHONPATH=src python bench/offload_gpu.py

Every kind trains the same decoder as the case that offloads nothing. The measured exposed seconds are the difference of
their medians, the planned ones that of their predictions. Copies and kernels are those of one profiled step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from shardwise.cost.analysis import analyze
from shardwise.engine.engine import Engine
from shardwise.engine.world import joined
from shardwise.measure.reference import sample_batch
from shardwise.measure.step import cluster_name_here
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job

MODEL = {"name": "bench", "layers": 4, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "vocab": 8192,
         "activation": "swiglu", "norm": "rmsnorm", "norm_bias": False}  # fmt: skip
# Strategy fields; the stage of ZeRO is what the kind needs.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "optimizer": (0, {"optimizer": 1}),
    "optimizer, weights, gradients": (3, {"optimizer": 1, "weights": 1, "gradients": 1}),
    "optimizer, weights": (3, {"optimizer": 1, "weights": 1}),
    "activations": (0, {"activations": 1}),
    "a quarter of the activations": (0, {"activations": 0.25}),
}
WARM = 2
Span = tuple[float, float]


@dataclass(frozen=True)
class MeasuredOffload:
    """Of one step: its seconds, planned and measured; of a profiled one, spans of copies out and in, and of kernels."""

    step_seconds: float
    planned_seconds: float
    out: tuple[Span, ...]
    back: tuple[Span, ...]
    kernels: tuple[Span, ...]
    moved_bytes: float

    @property
    def copied_seconds(self) -> float:
        return _length((*self.out, *self.back))

    @property
    def hidden_share(self) -> float:
        hidden = sum(_common(span, self.kernels) for span in (*self.out, *self.back))
        return hidden / max(1e-9, self.copied_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="*", default=[2, 8], help="sequences, all in one microbatch")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=MODEL["layers"])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    asked = parser.parse_args()
    print(torch.cuda.get_device_name(0), torch.__version__, f"{asked.layers} layers, seq {asked.seq}, bf16")
    print(f"{'offloaded':30} {'tokens':>7} {'step':>9} {'without':>9} {'copies':>9} {'GB/s':>5} {'hidden':>7}"
          f" {'exposed: planned':>17} {'measured':>9}")  # fmt: skip
    with joined(0, 1, dist.HashStore(), device="cuda"):  # type: ignore[attr-defined]
        for batch in asked.batch:
            plain: dict[int, MeasuredOffload] = {}
            for name in asked.kinds:
                zero, offload = KINDS[name]
                if zero not in plain:
                    plain[zero] = measured(_job({}, zero, batch, asked), asked.steps)
                _print(name, batch * asked.seq, measured(_job(offload, zero, batch, asked), asked.steps), plain[zero])
    return 0


def _print(name: str, tokens: int, one: MeasuredOffload, plain: MeasuredOffload) -> None:
    planned, found = one.planned_seconds - plain.planned_seconds, one.step_seconds - plain.step_seconds
    out, back = (_length(spans) for spans in (one.out, one.back))
    kernels, begin = _length(one.kernels), min(span[0] for span in one.kernels)
    print(
        f"{name:30} {tokens:>7} {1e3 * one.step_seconds:6.1f} ms {1e3 * plain.step_seconds:6.1f} ms"
        f" {1e3 * one.copied_seconds:6.1f} ms {one.moved_bytes / max(1e-9, one.copied_seconds) / 1e9:5.1f}"
        f" {one.hidden_share:6.0%} {1e3 * planned:14.1f} ms {1e3 * found:6.1f} ms"
        f"   (out {1e3 * out:.1f}, in {1e3 * back:.1f}, kernels {1e3 * kernels:.1f} of"
        f" {1e3 * (max(span[1] for span in one.kernels) - begin):.1f} ms; planned steps"
        f" {1e3 * one.planned_seconds:.1f} and {1e3 * plain.planned_seconds:.1f})", flush=True,
    )  # fmt: skip


def measured(job: Job, steps: int) -> MeasuredOffload:
    """Steps follow each other as in training; a step begins where the one before has ended."""
    engine = Engine(job, device="cuda")
    batch = sample_batch(job, 0, 0).changed(lambda tensor: tensor.cuda())
    ends = []
    for _ in range(WARM + steps):
        engine.step(batch)
        ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        ends[-1].record()
    torch.cuda.synchronize()
    seconds = [one.elapsed_time(other) / 1e3 for one, other in zip(ends[WARM - 1 :], ends[WARM:])]
    moved = sum(engine.store.lanes.moved.values()) / (WARM + steps) if engine.store is not None else 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.step(batch)
        engine.step(batch)
        engine.forward_backward(batch)  # what a step leaves to the next one is under that
        torch.cuda.synchronize()
    out, back, kernels = _spans(profiled)
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    planned = analyze(job).predicted_seconds
    return MeasuredOffload(statistics.median(seconds), planned, out, back, kernels, 2 * moved)


def _spans(profiled: Any) -> tuple[tuple[Span, ...], ...]:
    """Copies out, copies in, and kernels, those that meet joined."""
    found: dict[str, list[Span]] = {"out": [], "in": [], "kernels": []}
    for event in profiled.events():
        if event.device_type != DeviceType.CUDA:
            continue
        span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        if event.name.startswith("Memcpy DtoH"):
            found["out"].append(span)
        elif event.name.startswith("Memcpy HtoD"):
            found["in"].append(span)
        elif not event.name.startswith("Mem"):
            found["kernels"].append(span)
    return tuple(found["out"]), tuple(found["in"]), _union(found["kernels"])


def _union(spans: Sequence[Span]) -> tuple[Span, ...]:
    together: list[Span] = []
    for start, end in sorted(spans):
        if together and start <= together[-1][1]:
            together[-1] = (together[-1][0], max(end, together[-1][1]))
        else:
            together.append((start, end))
    return tuple(together)


def _length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


def _common(span: Span, busy: Sequence[Span]) -> float:
    place, found = max(0, bisect_left(busy, (span[0], span[0])) - 1), 0.0
    while place < len(busy) and busy[place][0] < span[1]:
        found += max(0.0, min(span[1], busy[place][1]) - max(span[0], busy[place][0]))
        place += 1
    return found


def _job(offload: dict[str, Any], zero: int, batch: int, asked: Any) -> Job:
    training = {"global_batch": batch, "seq": asked.seq, "precision": "bf16", "graphs": False}
    strategy = {"microbatch": batch, "zero": zero, "offload": offload}
    one = cluster_from(cluster_name_here("cuda")).with_devices(1)
    model = {**MODEL, "layers": asked.layers}
    return Job.from_dict({"model": model, "cluster": one.to_dict(), "strategy": strategy, "training": training})


if __name__ == "__main__":
    sys.exit(main())
