"""One step with long sequences on this machine's GPU: its time and memory beside what is planned.

    PYTHONPATH=src python bench/long_context.py --model llama3-8b --seq 350000 training.adapters.rank=16 \
        training.base_precision=nf4

Layers are recomputed, their inputs leave for host memory, and MLPs run in pieces. ``--layers`` keeps only the first
ones, where the host has no memory for the inputs of all.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

from shardwise.api.given import arguments_of
from shardwise.api.inputs import job_from
from shardwise.cost.analysis import analyze
from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.measure.step import cluster_name_here
from shardwise.spec.job import Job

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("fields", nargs="*", help="further fields of the job, as training.adapters.rank=16")
    given = parser.parse_args()
    fields: dict[str, Any] = {"strategy.recompute": "full", "strategy.offload.activations": 1.0}
    fields |= {"strategy.microbatch": 1, "training.global_batch": 1, "training.seq": given.seq}
    fields |= {} if given.layers is None else {"model.layers": given.layers}
    fields |= dict(field.split("=", 1) for field in given.fields)
    cluster = cluster_name_here("cuda")
    job = job_from(arguments_of({"model": given.model, "cluster": cluster, "gpus": 1, **fields}), runs_here=True)[0]
    planned = analyze(job)
    print(f"{job.model.name}, {job.model.layers} layers, 1 x {given.seq:,}", *given.fields, flush=True)
    allowance = planned.memory.allowance
    print(
        f"planned  {planned.predicted_seconds:8.1f} s  {(planned.memory.total - allowance) / GIB:7.2f} GiB", flush=True
    )
    seconds, loss = one_step(job)
    allocated, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    print(f"measured {seconds:8.1f} s  {allocated:7.2f} GiB, reserved {reserved:.2f} GiB, loss {loss:.3f}")


def one_step(job: Job) -> tuple[float, float]:
    """Seconds and loss of the first step, on random tokens; kernels are built, and host memory is taken, within it."""
    with process_group(0, 1, dist.HashStore(), device="cuda"):  # type: ignore[attr-defined]
        engine = Engine(job, device="cuda")
        text = torch.randint(job.model.vocab, (1, job.training.seq + 1), device="cuda")
        torch.cuda.synchronize()
        begins = time.perf_counter()
        loss = float(engine.step(Batch.of(text[:, :-1].contiguous(), text[:, 1:].contiguous())).loss)
        torch.cuda.synchronize()
        return time.perf_counter() - begins, loss


if __name__ == "__main__":
    main()
