"""The golden jobs, and the script that writes what `analyze --json` says of them (`make golden`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"
TOLERANCE = 1e-9  # relative, on numbers

JOBS = {
    "dense-3d": "--model gpt3-175b --cluster dgx-a100:128 --tp 8 --pp 8 --global-batch 1536 --seq 2048 "
    "--set strategy.overlap.tp=true --recompute full",
    "gqa-headline": "--model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --dp 16 --zero 1 --global-batch 1024 "
    "--seq 8192 --scaling",
    "moe-deduplicated": "--model mixtral-8x22b --cluster dgx-h100:16 --tp 2 --pp 4 --ep 8 --zero 1 --global-batch 512 "
    "--seq 4096 --dispatch deduplicated --precision fp8",
    "mla-experts": "--model deepseek-v3 --cluster hgx-h800:256 --pp 16 --ep 64 --zero 1 --global-batch 15360 "
    "--seq 4096 --schedule dualpipe --stage-layers balanced --precision fp8 --recompute selective",
    "tpu-torus": "--model palm-540b --cluster tpu-v4:12x16x16 --tp 12 --global-batch 2048 --seq 2048 --zero 3 --no-sp",
    "bare-ring": "--params 7e9 --layers 32 --hidden 4096 --heads 32 --topology ring --gpus 64 --bandwidth 50GB/s "
    "--latency 5us --tp 8 --global-batch 64 --attention unfused --dropout",
    "bare-mesh": "--model llama2-7b --topology mesh --shape 8x16 --bandwidth 25GB/s --latency 1us --tp 8 "
    "--global-batch 128 --no-sp --ranks",
    "bare-hierarchical": "--model llama2-13b --topology hierarchical --gpus 64 --bandwidth 450GB/s,50GB/s "
    "--latency 2us,5us --device a100-80gb --tp 4 --pp 2 --global-batch 256 --schedule zb-h1 --optimizer muon",
    "zero3-offload": "--model llama2-70b --cluster dgx-a100:8 --zero 3 --shard-group 8 --global-batch 64 --seq 4096 "
    "--recompute full --set strategy.offload.optimizer=1 --set strategy.offload.activations=0.5 --optimizer adam8bit",
    "context-ring": "--model llama3-405b --cluster grand-teton-h100:512 --tp 8 --cp 16 --pp 16 --global-batch 128 "
    "--seq 131072 --zero 2 --stage-layers balanced",
    "context-ulysses": "--model qwen2.5-72b --cluster gb200-nvl72:2 --tp 2 --cp 4 --pp 2 --context-method ulysses "
    "--gpus-per-node 64 --global-batch 64 --seq 65536 --schedule interleaved --interleave 4 --set training.tokens=1T",
    "two-datacenters": "--model llama3-8b --cluster two-datacenters --global-batch 4M-tokens --seq 8192 --zero 1",
}  # fmt: skip


def analysis(name: str) -> Any:
    """What `shardwise analyze` says of a golden job today."""
    from cli.running import run_json

    return run_json("analyze", *JOBS[name].split())


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.stem not in JOBS:
            path.unlink()
    for name in JOBS:
        (FOLDER / f"{name}.json").write_text(json.dumps(analysis(name), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
