"""Steps of one GPU that no calibration has seen, beside what is predicted: by the catalogue, and once calibrated.

    PYTHONPATH=src python bench/unseen_steps.py --calibrated cluster.yaml --out bench/results/unseen-steps-h200.json

Dense models and mixtures, sequences of 1k to 32k tokens, all kinds of recompute, compiled or not, bf16 and FP8, one or
several microbatches. ``cluster.yaml`` is what `shardwise calibrate` writes on the same machine; without it only the
catalogue's prediction is shown. A step that does not run is listed with the reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.api.given import JobArguments
from shardwise.api.inputs import job_from
from shardwise.cost.analysis import analyze
from shardwise.measure.step import cluster_name_here, measure_step
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

COMPILED = {"training.compile": True}
FULL = {"strategy.recompute": "full"}
SELECTIVE = {"strategy.recompute": "selective"}


def fp8(recipe: str) -> dict[str, Any]:
    return {"training.precision": recipe, **COMPILED}


# model, its layers (0: all), sequences, tokens of each, microbatch, other fields
CONFIGURATIONS: tuple[tuple[str, int, int, int, int, dict[str, Any]], ...] = (
    ("gpt2", 0, 16, 1024, 16, {}),
    ("gpt2-medium", 0, 8, 1024, 8, COMPILED),
    ("gpt3-760m", 0, 4, 2048, 4, COMPILED),
    ("qwen3-0.6b", 0, 4, 2048, 4, {}),
    ("llama3.2-1b", 0, 4, 2048, 4, {}),
    ("llama3.2-1b", 0, 1, 16384, 1, COMPILED),
    ("llama3.2-1b", 0, 1, 32768, 1, {**COMPILED, **FULL}),
    ("llama3.2-3b", 0, 2, 4096, 2, COMPILED),
    ("qwen3-4b", 12, 2, 4096, 2, COMPILED),
    ("mistral-7b", 6, 2, 8192, 2, COMPILED),
    ("llama3-8b", 8, 2, 4096, 2, {}),
    ("llama3-8b", 8, 4, 4096, 4, {**COMPILED, **FULL}),
    ("llama3-8b", 8, 4, 4096, 4, SELECTIVE),
    ("llama3-8b", 8, 1, 32768, 1, {**COMPILED, **FULL}),
    ("llama3-8b", 8, 8, 2048, 2, COMPILED),
    ("llama2-13b", 6, 4, 4096, 2, COMPILED),
    ("llama3-8b", 8, 2, 8192, 2, fp8("fp8")),
    ("llama3-8b", 8, 4, 4096, 4, fp8("fp8-rowwise")),
    ("qwen3-8b", 8, 4, 4096, 4, fp8("fp8-blockwise")),
    ("llama3-8b", 16, 4, 8192, 2, {**fp8("fp8"), **FULL}),
    ("qwen3-30b-a3b", 3, 4, 2048, 4, {}),
    ("qwen3-30b-a3b", 4, 8, 4096, 2, {}),
    ("mixtral-8x7b", 1, 4, 4096, 4, {}),
    ("deepseek-v2-lite", 4, 2, 4096, 2, {}),
)


@dataclass(frozen=True)
class Compared:
    """A measured step and its predictions; ``calibrated_error`` is None without a calibrated cluster."""

    name: str
    seconds: float
    catalogue_error: float
    calibrated_error: float | None
    peak_bytes: int
    memory_error: float
    graphs: str


def job_of(number: int, cluster: str) -> Job:
    model, layers, sequences, seq, microbatch, other = CONFIGURATIONS[number]
    fields = {"training.global_batch": sequences, "training.seq": seq, "strategy.microbatch": microbatch, **other}
    if layers:
        fields["model.layers"] = layers
    return job_from(JobArguments(model=model, cluster=cluster, gpus=1, overrides=fields), runs_here=True)[0]


def name_of(number: int) -> str:
    model, layers, sequences, seq, microbatch, other = CONFIGURATIONS[number]
    words = [model, *([f"{layers} layers"] if layers else []), f"{sequences} x {seq:,}"]
    words += [f"microbatch {microbatch}"] if microbatch < sequences else []
    return ", ".join([*words, *("compiled" if value is True else str(value) for value in other.values())])


def compared(number: int, calibrated: str | None, steps: int) -> Compared:
    job = job_of(number, cluster_name_here("cuda"))
    found = measure_step(job, None, steps=steps, warmup=5, on_progress=lambda text: None)
    error = None
    if calibrated is not None:
        error = analyze(job_of(number, calibrated)).predicted_seconds / found.median_seconds - 1
    return Compared(name_of(number), found.median_seconds, found.seconds_error, error, found.peak_bytes,
                    found.memory_error, found.graphs)  # fmt: skip


def line(one: Compared) -> str:
    later = "" if one.calibrated_error is None else f", calibrated {one.calibrated_error:+6.1%}"
    times = f"{1e3 * one.seconds:8.1f} ms, catalogue {one.catalogue_error:+6.1%}{later}"
    memory = f"{one.peak_bytes / 1e9:5.1f} GB, memory {one.memory_error:+6.1%}"
    return f"{one.name:60} {times}, {memory}, graphs {one.graphs}"


def summary(title: str, errors: Sequence[float]) -> str:
    worst = max(errors, key=abs)
    mean, bias = statistics.fmean(abs(one) for one in errors), statistics.fmean(errors)
    return f"{title}: mean {mean:.1%}, worst {worst:+.1%}, bias {bias:+.1%} of {len(errors)}"


def show(rows: Sequence[Compared]) -> None:
    print(summary("catalogue", [one.catalogue_error for one in rows]))
    calibrated = [one.calibrated_error for one in rows if one.calibrated_error is not None]
    if calibrated:
        print(summary("calibrated", calibrated))
    print(summary("memory", [one.memory_error for one in rows]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrated", help="cluster file of `shardwise calibrate`")
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no configuration after so many")
    options = parser.parse_args()
    rows: list[Compared] = []
    begun = time.monotonic()
    for number in range(len(CONFIGURATIONS)):
        if time.monotonic() - begun > options.seconds:
            print(f"out of time after {number} configurations")
            break
        try:
            rows.append(one := compared(number, options.calibrated, options.steps))
        except (SpecError, RuntimeError) as error:
            print(f"{name_of(number):60} {str(error).splitlines()[0][:120]}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.compiler.reset()
        print(line(one), flush=True)
    show(rows)
    if options.out is not None:
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name(0)}
        content = {"date": time.strftime("%Y-%m-%d"), **versions, "rows": [asdict(one) for one in rows]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
