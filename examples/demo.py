"""The main job, shown: what `make demo` runs. Plans large jobs, then measures this machine, plans a job for it, trains
what was planned, compares, and writes a report."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from shardwise.cli.main import main
from shardwise.run.metrics.lines import read_lines, summarise

FOLDER = Path("runs/demo")
CLUSTER = FOLDER / "cluster.yaml"
JOB = FOLDER / "plan.yaml"
LEARNT = 0.7  # the validation loss at the end, of that at the beginning
DOES_NOT_FIT = 1  # the exit status that scripts see

TOO_LARGE = "analyze --model llama3-70b --cluster dgx-h100:1 --tp 8 --global-batch 64 --seq 8192"
STEPS = (
    (
        "The best way to train Llama-3 70B on 16 DGX H100, and why not the usual one",
        "plan --model llama3-70b --cluster dgx-h100:16 --global-batch 512 --seq 8192 --why-not tp=8,pp=1 --out -",
    ),
    (
        "A job that fits: Llama-3 70B on 64 DGX H100",
        "analyze --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --dp 16 --zero 1 "
        "--global-batch 1024 --seq 8192",
    ),
    (
        "The same model on 8 GPUs, before anything is launched",
        TOO_LARGE,
    ),
    (
        "One formula behind it, with the numbers put in",
        "explain allreduce --topology hierarchical --gpus 64 --gpus-per-node 8 --size 1GiB "
        "--bandwidth 450GB/s,50GB/s --latency 2us,5us",
    ),
    (
        "This machine, measured: what two processes compute and send at once becomes a cluster to plan with",
        f"calibrate --processes 2 --out {CLUSTER}",
    ),
    (
        "Its own size of job: how to split a small model over the two processes",
        f"plan --model tiny --cluster {CLUSTER} --global-batch 16 --seq 128 --precision fp32 "
        "--set training.optimization.learning_rate=3e-3 --set run.steps=150 --set run.schedule.warmup=10 "
        f"--out {JOB}",
    ),
    (
        "That plan, trained on real text: the sources of Python's own library",
        f"train {JOB} --run-folder {FOLDER} --profile steps=100:103",
    ),
    (
        "Where the time of those steps went, beside what was predicted, and why",
        f"compare {FOLDER}",
    ),
    (
        "All of it in pictures, in one file: open it in a browser",
        f"report {FOLDER} --out {FOLDER}/report.html",
    ),
)
NEXT = f"""Next:
  open {FOLDER}/report.html in a browser
  . .venv/bin/activate       # `shardwise` is in this environment
  shardwise plan --model llama3-70b --cluster dgx-h100:8 --global-batch 512 --seq 8192    # 64 H100
  shardwise ui               # the same on a page with controls"""


def run() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for title, command in STEPS:
        print(f"\n\033[1m── {title}\033[0m\n$ shardwise {command}\n", flush=True)
        start = time.perf_counter()
        status = main(command.split())
        print(f"\n({time.perf_counter() - start:.2f} s)", flush=True)
        if status != expected_status(command):
            print(f"\nended with status {status}", flush=True)
            return status or 1
    status = check()
    print(f"\n{NEXT}")
    return status


def expected_status(command: str) -> int:
    return DOES_NOT_FIT if command == TOO_LARGE else 0


def check() -> int:
    """Whether the model has learnt what it should have."""
    found = summarise(read_lines(FOLDER / "metrics.jsonl"))
    if found.first_validation is None or found.last_validation is None:
        print("\nno validation loss was recorded")
        return 1
    share = found.last_validation / found.first_validation
    verdict = "learnt" if share < LEARNT else "NOT learnt"
    print(f"\n{verdict}: the validation loss is {share:.0%} of its first value (below {LEARNT:.0%} is asked for)")
    return 0 if share < LEARNT else 1


if __name__ == "__main__":
    sys.exit(run())
