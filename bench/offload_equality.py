"""Offloaded optimizer states on a GPU: are the weights those of the same steps without offload, to the last bit?

    CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONPATH=src python bench/offload_equality.py

Steps on the same tokens with kernels that add in a fixed order, with nothing that waits between them. A difference that
is gone when every chunk is waited for is a race; one that is gone with the same kernel is rounding. The last rows run
the kernels that training runs, which add in any order: by how much losses differ without any offload.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.offload.streamed import StreamedUpdate
from shardwise.engine.optim.updates import Update
from shardwise.measure.reference import sample_batch
from shardwise.measure.step import cluster_name_here
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job

MODEL = {"name": "bench", "heads": 16, "kv_heads": 16, "vocab": 8192, "activation": "swiglu", "norm": "rmsnorm",
         "norm_bias": False, "layers": 4, "hidden": 2048, "ffn": 8192}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    offload: dict[str, float]
    whole_masters: bool = False
    own_kernel: bool = True
    waits: bool = False
    in_order: bool = True
    zero: int = 0


STATES = {"optimizer": 1.0}
CASES = (
    Case("plain", {}),
    Case("plain, again", {}),
    Case("plain, fp32 masters", {}, whole_masters=True),
    Case("offloaded", STATES),
    Case("offloaded, again", STATES),
    Case("offloaded, all waited for", STATES, waits=True),
    Case("plain, fp32 masters, PyTorch's kernel", {}, whole_masters=True, own_kernel=False),
    Case("offloaded, PyTorch's kernel", STATES, own_kernel=False),
    Case("plain, ZeRO-3", {}, zero=3),
    Case("weights offloaded too, ZeRO-3", {"optimizer": 1.0, "weights": 1.0}, zero=3),
    Case("plain, any order", {}, in_order=False),
    Case("plain, any order, again", {}, in_order=False),
    Case("plain, any order, a third time", {}, in_order=False),
    Case("offloaded, any order", STATES, in_order=False),
    Case("offloaded, any order, again", STATES, in_order=False),
)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    digest: str  # of all weights after the last step
    weights: list[torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many")
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}; {asked.batch} x {asked.seq}, {asked.precision}")
    print(f"{'':39} {'weights':10} {'off by':>8} {'last loss':>11}  first step whose loss is not the first case's")
    found: dict[str, Outcome] = {}
    with process_group(0, 1, dist.HashStore(), device="cuda"):  # type: ignore[attr-defined]
        for case in CASES[: asked.cases]:
            one = found[case.name] = outcome(case, asked)
            base = next(iter(found.values()))
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one.weights, base.weights))
            differs = [number for number, pair in enumerate(zip(one.losses, base.losses)) if pair[0] != pair[1]]
            first = f"{differs[0]}: {one.losses[differs[0]]:.7f}" if differs else "none"
            print(f"{case.name:39} {one.digest[:10]} {off:8.0e} {one.losses[-1]:11.7f}  {first}", flush=True)
            one.weights[:] = one.weights if one is base else []
    return 0


def outcome(case: Case, asked: Any) -> Outcome:
    torch.use_deterministic_algorithms(case.in_order, warn_only=True)
    # Filling memory would be kernels of their own, and change what runs beside what.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # No other kernel of attention has a backward pass that adds in order.
    attention = sdpa_kernel(SDPBackend.MATH) if case.in_order else nullcontext()
    with changed(case), attention:
        job = job_of(case, asked)
        torch.manual_seed(0)
        engine = Engine(job, device="cuda")
        tokens = sample_batch(job, 0, 0).changed(lambda tensor: tensor.cuda())
        losses = [engine.step(tokens).loss for _ in range(asked.steps)]
        torch.cuda.synchronize()
        weights = [engine.optimizer.read(one.parameter, "master").cuda().clone() for one in engine.parameters]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return Outcome([float(one) for one in losses], digest(weights), weights)


def digest(weights: list[torch.Tensor]) -> str:
    """Of every bit and where it is, to compare processes with each other."""
    total = 0
    for one in weights:
        bits = one.flatten().view(torch.int32).long()
        total = 31 * total + int((bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum())
    return f"{total % 2**64:016x}"


@contextmanager
def changed(case: Case) -> Iterator[None]:
    """What a case has others than a job can have."""
    whole = patch.object(Job, "whole_masters", property(lambda job: True))
    other = patch.object(Update, "in_one_pass", property(lambda update: False))
    waits = patch.object(StreamedUpdate, "_chunk", waited_for(StreamedUpdate._chunk))
    asked = ((whole, case.whole_masters), (other, not case.own_kernel), (waits, case.waits))
    used = [one for one, is_used in asked if is_used]
    for one in used:
        one.start()
    try:
        yield
    finally:
        for one in used:
            one.stop()


def waited_for(chunk: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        torch.cuda.synchronize()
        chunk(*arguments)
        torch.cuda.synchronize()

    return run


def job_of(case: Case, asked: Any) -> Job:
    training = {"global_batch": asked.batch, "seq": asked.seq, "precision": asked.precision, "graphs": False}
    cluster = cluster_from(cluster_name_here("cuda")).with_devices(1).to_dict()
    strategy = {"microbatch": asked.batch, "zero": case.zero, "offload": case.offload}
    return Job.from_dict({"model": MODEL, "cluster": cluster, "strategy": strategy, "training": training})


if __name__ == "__main__":
    sys.exit(main())
