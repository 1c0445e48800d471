"""What a GPU holds at the peak of a step, allocation by allocation, beside the parts of the predicted memory.

    PYTHONPATH=src python bench/peak_memory.py 20 16 --most 24      # numbers of bench/unseen_steps.yaml's steps, from 0
    PYTHONPATH=src python bench/peak_memory.py 19 --configurations bench/unseen_steps_3.yaml

PyTorch records every allocation with the lines of Python that made it; the record is replayed up to its fullest moment.
What the same lines made counts together. Steps are not recorded as CUDA graphs, which reserve the same tensors.
"""

from __future__ import annotations

import argparse
import gc
import linecache
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from shardwise.cost.analysis import analyze
from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.measure.step import cluster_name_here
from unseen_steps import CONFIGURATIONS, Configuration, job_of, name_of

STEPS = 2
MOST_EVENTS = 2_000_000


def live_at_peak(events: Iterable[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """The most bytes that were allocated at once, and the allocations that were there then."""
    events = list(events)
    total = most = place = 0
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= event["size"]
        if total > most:
            most, place = total, number
    live: dict[int, dict[str, Any]] = {}
    for event in events[: place + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    return most, list(live.values())


def made_by(event: dict[str, Any]) -> str:
    """The innermost lines outside of PyTorch, or of compiled code, which says the shape."""
    words = []
    for frame in event.get("frames", ()):
        name, line = frame["filename"], frame["line"]
        if not name.endswith(".py") or ("/torch/" in name and "torchinductor" not in name):
            continue
        text = linecache.getline(name, line).strip()
        words.append(f"{name.rsplit('/', 1)[-1][-24:]}:{line} {text[:70]}")
        if len(words) == 2:
            break
    return " < ".join(words) or "(autograd)"


def peak_of(row: Configuration, most_rows: int) -> None:
    job = job_of(row, cluster_name_here("cuda"))
    parts = analyze(job).memory
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MOST_EVENTS)
    with process_group(0, 1, dist.HashStore(), device="cuda"):  # type: ignore[attr-defined]
        engine = Engine(job, device="cuda")
        engine.graphs.reason = "memory is recorded"
        built = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            text = torch.randint(job.model.vocab, (job.sequences, job.training.seq + 1), device="cuda")
            engine.step(Batch.of(text[:, :-1].contiguous(), text[:, 1:].contiguous()))
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        peak = torch.cuda.max_memory_allocated()
    found, live = live_at_peak(snapshot["device_traces"][0])
    planned = parts.total - parts.allowance
    print(f"## {name_of(row)}: peak {peak / 1e9:.3f} GB, of the record {found / 1e9:.3f}, "
          f"building {built / 1e9:.3f}, predicted {planned / 1e9:.3f} ({planned / peak - 1:+.1%})")  # fmt: skip
    print("predicted GB:", ", ".join(f"{one} {getattr(parts, one) / 1e9:.3f}" for one in parts.PARTS))
    total: Counter[tuple[str, int]] = Counter((made_by(one), one["size"]) for one in live)
    for (where, size), count in sorted(total.items(), key=lambda one: -one[0][1] * one[1])[:most_rows]:
        print(f"{count * size / 1e9:8.3f} GB {count:4} x {size / 1e6:10.3f} MB  {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="+", type=int)
    parser.add_argument("--most", type=int, default=24)
    parser.add_argument("--configurations", type=Path, default=CONFIGURATIONS, help="other steps, as YAML")
    given = parser.parse_args()
    rows = yaml.safe_load(given.configurations.read_text())
    for number in given.numbers:
        try:
            peak_of(rows[number], given.most)
        except Exception:
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
