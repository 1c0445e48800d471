"""One training step of the engine against stock PyTorch doing the same, on two gloo processes.

    PYTHONPATH=src python bench/engine.py

Both train the same decoder on the same data: forward, backward, clipping by the norm of all gradients, AdamW, and the
loss of the whole batch. Their steps alternate; a step lasts as long as its slowest rank, and the medians are compared.
Exits 1 where the engine is slower than it has to be, or where the two compute something else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.optim.optimizer import decays
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.models import Decoder, initialise
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

WORLD = 2
WARM_UP = 2  # the first steps build buckets and the like
MODEL = Model(
    layers=6,
    hidden=384,
    heads=6,
    ffn=1024,
    vocab=1024,
    max_seq=64,
    activation="swiglu",
    norm="rmsnorm",
    norm_bias=False,
)
TOKENS = 32  # on each rank: few, as where a large cluster divides a batch, so that communication counts
TRAINING = Training(global_batch=WORLD, seq=TOKENS, precision="fp32")
# Case, the stage of the engine, how many times faster than stock PyTorch a step has to be.
CASES = (("zero 0 against DistributedDataParallel", 0, 1.0), ("zero 3 against fully_shard", 3, 1.3))
Step = Callable[[], Tensor]
Times = tuple[list[float], list[float], float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    missed = 0
    with Pool(preload=("torch", "torch.distributed", "torch.distributed.fsdp")) as pool:
        for name, zero, needed in CASES:
            found: list[Times] = pool.run(timed, WORLD, zero, steps)
            stock, engine = (
                statistics.median(max(ranks) for ranks in zip(*(one[side] for one in found))) for side in (0, 1)
            )
            ratio, apart = stock / engine, max(one[2] for one in found)
            missed += ratio < needed or apart > 1e-3
            verdict = "ok" if ratio >= needed else "MISSED"
            print(
                f"{name}: {1e3 * engine:.0f} ms against {1e3 * stock:.0f} ms a step, "
                f"{ratio:.2f} times as fast (needed {needed:g}): {verdict}; losses within {apart:.0e}"
            )
    return 1 if missed else 0


def timed(place: WorkerPlace, zero: int, steps: int) -> Times:
    """Seconds of each step of stock PyTorch and of the engine on this rank, and how far their losses are apart."""
    torch.set_num_threads(1)
    with process_group(place.rank, place.world, place.rendezvous_file):
        tokens = torch.randint(MODEL.vocab, (1, TOKENS), generator=torch.Generator().manual_seed(place.rank))
        both = (stock_step(zero, tokens), engine_step(zero, tokens))
        seconds: tuple[list[float], list[float]] = ([], [])
        apart = 0.0
        for number in range(WARM_UP + steps):
            losses = []
            # Who goes first changes, since what runs after the other finds its caches cold.
            for side in (0, 1) if number % 2 else (1, 0):
                dist.barrier()
                start = time.perf_counter()
                losses.append(both[side]())
                if number >= WARM_UP:
                    seconds[side].append(time.perf_counter() - start)
            apart = max(apart, abs(float(losses[0] / losses[1]) - 1))
        return *seconds, apart


def stock_step(zero: int, tokens: Tensor) -> Step:
    decoder = Decoder(MODEL)
    initialise(decoder, 0, MODEL)
    module: Any = decoder
    if zero == 0:
        module = nn.parallel.DistributedDataParallel(decoder)
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in decoder.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(decoder, mesh=mesh)
    settings = TRAINING.optimization
    several = list(decoder.named_parameters())
    groups = [
        {"params": [one for name, one in several if decays(name, one)], "weight_decay": settings.decay},
        {"params": [one for name, one in several if not decays(name, one)], "weight_decay": 0.0},
    ]
    betas = settings.beta1, settings.beta2
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.epsilon, fused=True)

    def step() -> Tensor:
        loss = module(tokens, tokens) / TOKENS
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        whole: Tensor = loss.detach() / WORLD
        dist.all_reduce(whole)
        return whole

    return step


def engine_step(zero: int, tokens: Tensor) -> Step:
    strategy = Strategy(dp=WORLD, zero=zero)  # type: ignore[arg-type]
    engine = Engine(Job(model=MODEL, cluster=cluster_from(f"laptop:{WORLD}"), strategy=strategy, training=TRAINING))
    batch = Batch.of(tokens, tokens)
    return lambda: engine.step(batch).loss


if __name__ == "__main__":
    sys.exit(main())
