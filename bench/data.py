"""What the loader gives, against what a step takes: tokens a second of one rank; and of `data build`, per core.

    PYTHONPATH=src python bench/data.py

A loader makes batches of mapped pairs, of a mixture of pairs, and of pairs of short documents, packed. Beside it stands
what a rank consumes: a tiny model's step on this machine, measured, and an 8B model on one H100, at its peak, which no
step reaches. Exits 1 where one of the loaders gives less.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from shardwise.cost.compute.flops import flops_per_token
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.run.data.build import build
from shardwise.run.data.order import Loader, Mixture, Stream, rows_of
from shardwise.run.data.sources import standard_library
from shardwise.run.data.token_files import PairWriter, open_pair
from shardwise.spec.job import Job
from shardwise.training.loop import batch_of

TINY_SEQ, LARGE_SEQ, VOCAB = 128, 8192, 512
LARGE = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:1",
    "strategy": {"dp": 8, "zero": 3},
    "training": {"global_batch": 8, "seq": LARGE_SEQ, "precision": "bf16"},
}
TINY = {
    "model": "tiny",
    "cluster": "laptop:1",
    "training": {"global_batch": 8, "seq": TINY_SEQ, "precision": "fp32"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default 2)")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print_build(folder)
        mixtures = mixtures_of_kinds(folder)
        tiny, large = tiny_demand(mixtures["mapped pair", TINY_SEQ], folder, seconds), large_demand()
        missed = False
        for (kind, seq), mixture in mixtures.items():
            given, wanted = loaded(mixture, seq, seconds), tiny if seq == TINY_SEQ else large
            verdict = "ok" if given >= wanted else "MISSED"
            missed |= given < wanted
            print(
                f"{kind}, sequences of {seq:,}: {given:,.0f} tokens/s, {given / wanted:.1f} times a step's: {verdict}"
            )
    return 1 if missed else 0


def mixtures_of_kinds(folder: Path) -> dict[tuple[str, int], Mixture]:
    random = np.random.default_rng(0)
    names = {"long": 20_000, "other": 20_000, "short": 100}  # tokens of a document
    for name, length in names.items():
        with PairWriter(folder / name, np.uint16) as writer:
            for _ in range(4_000_000 // length):
                writer.add(random.integers(0, VOCAB, length))
    kinds = {"mapped pair": ["long"], "mixture of three": ["long", "other", "short"], "packed documents": ["short"]}
    return {
        (kind, seq): Mixture(
            [Stream(open_pair(folder / name), seq, VOCAB, seed) for seed, name in enumerate(members)],
            [float(number) for number in range(1, len(members) + 1)],
            seed=0,
        )
        for seq in (TINY_SEQ, LARGE_SEQ)
        for kind, members in kinds.items()
    }


def loaded(mixture: Mixture, seq: int, seconds: float) -> float:
    """Tokens a second that a loop which does nothing else would get."""
    sequences = max(1, 8192 // seq)
    loader = Loader(mixture, sequences)
    try:
        loader.take(0)
        began, step = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            step += 1
            loader.take(step)
        return step * sequences * seq / (time.perf_counter() - began)
    finally:
        loader.close()


def tiny_demand(mixture: Mixture, folder: Path, seconds: float) -> float:
    """Tokens a second of a tiny model's step on one core of this machine, which finds its batch in memory."""
    job = Job.from_dict(TINY)
    with process_group(0, 1, str(folder / "meeting")):
        engine = Engine(job)
        batch = batch_of(rows_of(mixture, 0, job.sequences), engine.device)
        engine.step(batch)
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            engine.step(batch)
            steps += 1
        found = steps * job.tokens_per_step / (time.perf_counter() - began)
    print(f"a tiny model takes {found:,.0f} tokens/s")
    return found


def large_demand() -> float:
    job = Job.from_dict(LARGE)
    peak = job.cluster.device.peak_flops(job.training.recipe.compute)
    found = peak / flops_per_token(job.model, LARGE_SEQ)
    print(f"llama3-8b takes at most {found:,.0f} tokens/s on one {job.cluster.device.name}")
    return float(found)


def print_build(folder: Path) -> None:
    began = time.process_time()
    found = build(standard_library(), folder / "built")
    seconds = time.process_time() - began
    print(f"data build, bytes: {found.tokens / seconds:,.0f} tokens/s of a core ({found.tokens:,} tokens)")


if __name__ == "__main__":
    sys.exit(main())
