"""Loss on real text, FP8 beside bf16: a decoder of 13M parameters reads Python sources byte by byte.

    PYTHONPATH=src python bench/fp8_text.py bf16 fp8 --seeds 20 --compile --out both.json
    PYTHONPATH=src python bench/fp8_text.py --compare *.json   # of several processes, one for each recipe

The text is the source of the standard library and of PyTorch, as installed: tens of megabytes. All recipes start from
the same weights and see the same batches; the learning rate warms up and falls to zero along a straight line, so that
the last weights are no snapshot of a moving trajectory. The last losses are means of the last 20 steps; the held-out
ones are of a million bytes from all over the text that are not trained on. A single run tells little: two runs of one
seed that differ in rounding alone (bf16 and bf16-fp32-grads) are as far apart as any. So there are several seeds, and
the mean of their differences from bf16 stands beside its standard error. A recipe is built and compiled once; every
seed sets its weights and states back in place.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.offload.store import MASTER
from shardwise.models.decoder import initial_value
from shardwise.spec.job import Job

CLUSTER = {"levels": [{"size": 1, "link": "nvlink-4"}]}
MODEL = {"name": "bytes", "hidden": 512, "layers": 4, "heads": 4, "ffn": 1408, "vocab": 256, "activation": "swiglu",
         "norm": "rmsnorm", "positions": "rope"}  # fmt: skip
SMALL = {"hidden": 128, "layers": 2, "heads": 4, "ffn": 384}  # for a CPU
WARM_UP, LAST = 50, 20  # steps
HELD_OUT = 2**20  # bytes
PART, EVERY = 2**14, 50  # of so many parts of so many bytes one is held out
MOST_BYTES = 64_000_000


def source_text() -> Tensor:
    """Sorted files, so that it is the same wherever the same versions are installed."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
    data, seen = bytearray(), set()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if path not in seen and ("site-packages" not in path.parts or root != roots[0]):
                seen.add(path)
                data += path.read_bytes()
            if len(data) > MOST_BYTES:
                break
    return torch.frombuffer(data, dtype=torch.uint8)


def divided(data: Tensor) -> tuple[Tensor, Tensor]:
    """What is held out, and the rest."""
    parts = torch.split(data, PART)
    held_out = [one for number, one in enumerate(parts) if number % EVERY == EVERY - 1]
    return torch.cat(held_out), torch.cat([one for number, one in enumerate(parts) if number % EVERY != EVERY - 1])


def rate_at(step: int, steps: int, highest: float) -> float:
    if step < WARM_UP:
        return highest * (step + 1) / WARM_UP
    return highest * (steps - step) / max(1, steps - WARM_UP)


def batch_from(data: Tensor, sequences: int, seq: int, random: torch.Generator) -> Batch:
    """By starts that are the same on every device, on that of ``data``."""
    starts = torch.randint(len(data) - seq - 1, (sequences, 1), generator=random).to(data.device)
    rows = data[starts + torch.arange(seq + 1, device=data.device)].long()
    return Batch.of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


class Recipe:
    """An engine of one precision that trains from any seed."""

    def __init__(self, precision: str, given: argparse.Namespace, device: str) -> None:
        model = {**MODEL, "max_seq": given.seq, **(SMALL if device == "cpu" else {})}
        job = Job.from_dict({
            "model": model, "cluster": {**CLUSTER, "device": "h200-sxm" if device == "cuda" else "cpu"},
            "strategy": {"microbatch": given.batch},
            "training": {"precision": precision, "seq": given.seq, "global_batch": given.batch,
                         "compile": given.compile},
        })  # fmt: skip
        self.precision, self.given = precision, given
        self.engine = Engine(job, device=device)

    def restart(self, seed: int) -> None:
        """All that a new engine of this seed would have, in the same memory: recorded steps stay valid."""
        engine, optimizer = self.engine, self.engine.optimizer
        for one in engine.parameters:
            for name, state in optimizer.state[one.parameter].items():
                if name != MASTER:
                    state.zero_()
            value = initial_value(one.name, one.part.shape, seed, engine.job.model, device=engine.device)
            optimizer.write(one.parameter, MASTER, value)
        for group in optimizer.param_groups:
            group["step"].zero_()
        if engine.delayed is not None:
            engine.delayed.history.zero_()
        engine.on_weights_loaded()

    def trained(self, seed: int, data: Tensor, held_out: Tensor) -> dict[str, Any]:
        given, engine, begun = self.given, self.engine, time.monotonic()
        self.restart(seed)
        random = torch.Generator().manual_seed(seed)
        losses = []
        for step in range(given.steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = rate_at(step, given.steps, given.rate)
            losses.append(engine.step(batch_from(data, given.batch, given.seq, random)).loss)
        random = torch.Generator().manual_seed(12345)
        with torch.compiler.set_stance("force_eager"):  # no second compilation for so few batches
            unseen = [engine.evaluate(batch_from(held_out, given.batch, given.seq, random))
                      for _ in range(given.held_out // (given.batch * given.seq))]  # fmt: skip
        found = [float(one) for one in torch.stack(losses).cpu()]
        last, after = statistics.fmean(found[-LAST:]), float(torch.stack(unseen).mean())
        print(f"{self.precision} seed {seed}: last {last:.4f}, held out {after:.4f}, {time.monotonic() - begun:.1f} s, "
              f"{_reserved():.1f} GB, CUDA graphs {engine.graphs.reason or 'used'}", flush=True)  # fmt: skip
        return {"precision": self.precision, "seed": seed, "steps": given.steps, "rate": given.rate,
                "text_bytes": len(data), "last": last, "held_out": after, "losses": found}  # fmt: skip


def _reserved() -> float:
    return torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0


def compare(rows: list[dict[str, Any]]) -> None:
    """Every recipe beside bf16 of the same seed."""
    plain = {one["seed"]: one for one in rows if one["precision"] == "bf16"}
    for one in sorted(rows, key=lambda one: (one["precision"], one["seed"])):
        beside = plain.get(one["seed"])
        line = f"{one['precision']:14} seed {one['seed']}, {one['steps']} steps, {one['text_bytes'] / 1e6:.0f} MB: "
        for name in ("last", "held_out"):
            apart = "" if beside is None else f" ({one[name] / beside[name] - 1:+.2%})"
            line += f"{name.replace('_', ' ')} {one[name]:.4f}{apart}  "
        print(line)
    for precision in sorted({one["precision"] for one in rows} - {"bf16"}):
        both = [(one, plain[one["seed"]]) for one in rows if one["precision"] == precision and one["seed"] in plain]
        for name in ("last", "held_out") if both else ():
            off = [one[name] / beside[name] - 1 for one, beside in both]
            spread = statistics.stdev(off) / math.sqrt(len(off)) if len(off) > 1 else math.nan
            print(f"{precision}: {name.replace('_', ' ')} loss {statistics.fmean(off):+.2%} of bf16's on average, "
                  f"standard error {spread:.2%}, {len(off)} seeds")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("precisions", nargs="*")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=4e-4, help="the highest")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, metavar="BYTES")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after so many")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs="*", type=Path)
    given = parser.parse_args()
    if given.compare is not None:
        compare([row for path in given.compare for row in json.loads(path.read_text())])
        return
    rows, begun = [], time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    held_out, data = (one.to(device) for one in divided(source_text()))
    with process_group(0, 1, dist.HashStore(), device=device):  # type: ignore[attr-defined]
        recipes = [Recipe(precision, given, device) for precision in given.precisions]
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            for recipe in recipes:
                if time.monotonic() - begun > given.seconds:
                    break
                rows.append(recipe.trained(seed, data, held_out))
                if given.out is not None:
                    given.out.write_text(json.dumps(rows))
    compare(rows)


if __name__ == "__main__":
    main()
