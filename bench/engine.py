"""One training step of the engine against stock PyTorch doing the same, on two gloo processes.

    PYTHONPATH=src python bench/engine.py

Both train the same decoder on the same data; their steps alternate, and the medians are compared. Exits 1 where the
engine is slower than it has to be.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.engine.data import apply_data
from shardwise.engine.mesh import build_mesh
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.world import joined
from shardwise.launch.pool import Place, Pool
from shardwise.models import Decoder, initialise
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

WORLD = 2
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
# Case, the stage of the engine, how many times faster than stock PyTorch a step has to be.
CASES = (("zero 0 against DistributedDataParallel", 0, 1.0), ("zero 3 against fully_shard", 3, 1.3))
Step = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    missed = 0
    with Pool(preload=("torch", "torch.distributed", "torch.distributed.fsdp")) as pool:
        for name, zero, needed in CASES:
            stock, engine = (max(times) for times in zip(*pool.run(timed, WORLD, zero, steps)))
            ratio = stock / engine
            missed += ratio < needed
            verdict = "ok" if ratio >= needed else "MISSED"
            print(
                f"{name}: {1e3 * engine:.0f} ms against {1e3 * stock:.0f} ms a step, "
                f"{ratio:.2f} times as fast (needed {needed:g}): {verdict}"
            )
    return 1 if missed else 0


def timed(place: Place, zero: int, steps: int) -> tuple[float, float]:
    """Median seconds of a step of stock PyTorch and of the engine on this rank."""
    torch.set_num_threads(1)
    with joined(place.rank, place.world, place.meeting_file):
        both = (stock_step(zero), engine_step(zero))
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(steps + 2):
            for step, measured in zip(both, seconds):
                dist.barrier()
                start = time.perf_counter()
                step()
                if number >= 2:  # the first ones build buckets and the like
                    measured.append(time.perf_counter() - start)
        return statistics.median(seconds[0]), statistics.median(seconds[1])


def network() -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    module = Decoder(MODEL)
    initialise(module, 0, MODEL)
    tokens = torch.randint(0, MODEL.vocab, (1, TOKENS))
    return module, tokens, tokens


def stock_step(zero: int) -> Step:
    decoder, tokens, labels = network()
    module: Any = decoder
    if zero == 0:
        module = nn.parallel.DistributedDataParallel(decoder)
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in decoder.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(decoder, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        (module(tokens, labels) / TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(zero: int) -> Step:
    module, tokens, labels = network()
    data = apply_data(module, build_mesh(Strategy(dp=WORLD, zero=zero)))  # type: ignore[arg-type]
    data.start()
    optimizer = build_optimizer(module.named_parameters(), Training(precision="fp32"), masters=data.masters)

    def step() -> None:
        data.before_microbatch(last=True)
        (module(tokens, labels) / (TOKENS * WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()
        data.after_step()

    return step


if __name__ == "__main__":
    sys.exit(main())
