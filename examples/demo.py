"""The main job, shown: what `make demo` runs. Today it plans and prices jobs; training and comparing follow."""

from __future__ import annotations

import sys
import time

from shardwise.cli.main import main

STEPS = (
    (
        "The best way to train Llama-3 70B on 16 DGX H100, and why not the usual one",
        "plan --model llama3-70b --cluster dgx-h100:16 --global-batch 512 --seq 8192 --why-not tp=8,pp=1 --output -",
    ),
    (
        "A job that fits: Llama-3 70B on 64 DGX H100",
        "analyze --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --dp 16 --zero 1 "
        "--global-batch 1024 --seq 8192",
    ),
    (
        "The same model on 8 GPUs, before anything is launched",
        "analyze --model llama3-70b --cluster dgx-h100:1 --tp 8 --global-batch 64 --seq 8192",
    ),
    (
        "One formula behind it, with the numbers put in",
        "explain allreduce --topology hierarchical --n 64 --gpus-per-node 8 --size 1GiB "
        "--bandwidth 450GB/s,50GB/s --latency 2us,5us",
    ),
    (
        "This machine's own size of job: two processes of a laptop",
        "plan --model gpt2 --cluster laptop --global-batch 8 --seq 256 --precision fp32 --output -",
    ),
)


def run() -> int:
    for title, command in STEPS:
        print(f"\n\033[1m── {title}\033[0m\n$ shardwise {command}\n", flush=True)
        start = time.perf_counter()
        status = main(command.split())
        print(f"\n({time.perf_counter() - start:.2f} s)", flush=True)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(run())
