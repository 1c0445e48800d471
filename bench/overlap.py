"""Overlap of tensor- and expert-parallel communication on one GPU: two ranks over NCCL, which takes them for two hosts.

    PYTHONPATH=src python bench/overlap.py

Prints, for every layout, the losses of a few steps beside those of one rank, and of one profiled step how much of the
communication's kernels lies under other kernels. Messages go over the loopback network and two processes share the GPU
in turns: order and equality are what this shows, not speed. Exits 1 where losses differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.measure.reference import sample_batch
from shardwise.spec.job import Job

DENSE = {"layers": 4, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "vocab": 4096, "max_seq": 4096}
EXPERTS = {**DENSE, "ffn": 4096, "moe": {"experts": 8, "top_k": 2, "ffn": 4096, "shared_ffn": 4096}}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp": (DENSE, {"tp": 2}),
    "tp, overlapped": (DENSE, {"tp": 2, "overlap": {"tp": True}}),
    "ep": (EXPERTS, {"dp": 2, "ep": 2}),
    "ep, overlapped": (EXPERTS, {"dp": 2, "ep": 2, "overlap": {"ep": True}}),
}
WORLD, STEPS = 2, 2
Span = tuple[float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--trace", help="a folder for the Chrome trace of rank 0's profiled step")
    asked = parser.parse_args()
    differ = False
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.layouts:
            model, strategy = LAYOUTS[name]
            with process_group(0, 1, f"{folder}/{name}-alone", device="cuda"):
                meant = _losses(Engine(_job(model, {}, 1, asked.seq), device="cuda"))
            torch.cuda.empty_cache()
            found = _on_one_gpu(f"{folder}/{name}", _job(model, strategy, WORLD, asked.seq), asked.trace, name)
            worst = max(abs(one / other - 1) for one, other in zip(found[0][0], meant))
            differ |= worst > 1e-5
            for rank, (losses, sent, hidden, lines) in enumerate(found):
                print(
                    f"{name:16} rank {rank}: losses {losses} (one rank {meant}, {worst:.1e} off);"
                    f" communication {sent * 1e3:.1f} ms, {hidden / max(sent, 1e-9):.0%} under kernels", flush=True,
                )  # fmt: skip
                if rank == 0 and "overlapped" in name:
                    print("\n".join(lines), flush=True)
    return int(differ)


def _job(model: dict[str, Any], strategy: dict[str, Any], devices: int, seq: int) -> Job:
    training = {"global_batch": 2, "seq": seq, "precision": "fp32", "graphs": False}
    strategy = {"dp": 1, "microbatch": 1, **strategy}
    return Job.from_dict({"model": model, "cluster": f"laptop:{devices}", "strategy": strategy, "training": training})


def _losses(engine: Engine) -> list[float]:
    share = (engine.mesh.rank("dp"), engine.mesh.size("dp"))
    batches = [sample_batch(engine.job, step, 0, "cuda").share(*share) for step in range(STEPS)]
    return [float(engine.step(batch).loss) for batch in batches]


def _on_one_gpu(meeting: str, job: Job, trace: str | None, name: str) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, meeting, answers, job, trace, name)) for rank in range(WORLD)]
    for one in ranks:
        one.start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for one in ranks:
        one.join()
    return [found[rank] for rank in range(WORLD)]


def _rank(rank: int, meeting: str, answers: Any, job: Job, trace: str | None, name: str) -> None:
    # NCCL refuses two ranks of one host on one GPU, and knows hosts by this (NCCL_MULTI_RANK_GPU_ENABLE: 2.30 on).
    os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0")
    with process_group(rank, WORLD, meeting, device="cuda"):
        engine = Engine(job, device="cuda")
        losses = _losses(engine)
        batch = sample_batch(job, 0, 0, "cuda").share(engine.mesh.rank("dp"), engine.mesh.size("dp"))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            engine.step(batch)
            torch.cuda.synchronize()
        if trace and rank == 0:
            profiled.export_chrome_trace(str(Path(trace) / f"{name.replace(', ', '-')}.json"))
        answers.put((rank, (losses, *_under_kernels(profiled))))


def _under_kernels(profiled: Any) -> tuple[float, float, list[str]]:
    """Seconds of the communication's kernels, those under other kernels, and a few of both in their order."""
    sent: list[Span] = []
    computed: list[tuple[float, float, str]] = []
    for event in profiled.events():
        if event.device_type != DeviceType.CUDA:
            continue
        span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        if event.name.startswith("ncclDevKernel"):
            sent.append(span)
        elif not event.name.startswith(("Mem", "nccl")):
            computed.append((*span, event.name))
    lines: list[str] = []
    hidden, begun = 0.0, min((start for start, _ in sent), default=0.0)
    for start, end in sorted(sent):
        under = [(max(start, a), min(end, b), n) for a, b, n in computed if a < end and b > start]
        hidden += sum(b - a for a, b, _ in under)
        if len(lines) < 8 and under:
            names = ", ".join(dict.fromkeys(n[:40] for _, _, n in under[:3]))
            lines.append(
                f"    communication {1e3 * (start - begun):8.2f} to {1e3 * (end - begun):8.2f} ms: beside"
                f" {1e3 * sum(b - a for a, b, _ in under):.2f} ms of {names}"
            )
    return sum(end - start for start, end in sent), hidden, lines


if __name__ == "__main__":
    sys.exit(main())
