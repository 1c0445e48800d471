"""A training step on one GPU in turns: transformers, compiled, with each of its attentions, and this project, compiled.

    PYTHONPATH=src python bench/beside_transformers.py gemma2-9b:6:2x8192 gpt-oss-20b:4:2x4096 [--turns 2]

A case is a model of the catalogue (or a folder with a config.json), cut to some layers, with random weights. Theirs
keeps weights and moments in bf16, which is less work than our fp32 masters and moments. Each run is a process of its
own; what is printed is the median step. What fails is a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 5, 3
ATTENTIONS = ("sdpa", "flash_attention_2", "flex_attention", "eager")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="MODEL:LAYERS:BATCHxSEQ")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--attentions", nargs="+", default=ATTENTIONS, choices=ATTENTIONS)
    parser.add_argument("--theirs", metavar="ATTENTION", help="one run of transformers, in this process")
    given = parser.parse_args()
    if given.theirs:
        print(json.dumps(theirs(*parts_of(given.cases[0]), given.theirs)))
        return
    for case in given.cases:
        for turn in range(given.turns):
            for name, command in runs(case, given.attentions):
                print(f"{case}, turn {turn + 1}, {name}: {shown(command)}", flush=True)


def parts_of(case: str) -> tuple[str, int, int, int]:
    model, layers, batch = case.rsplit(":", 2)
    rows, seq = batch.split("x")
    return model, int(layers), int(rows), int(seq)


def runs(case: str, attentions: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    model, layers, rows, seq = parts_of(case)
    for attention in attentions:
        yield f"transformers, {attention}", [__file__, case, "--theirs", attention]
    command = ["-m", "shardwise", "bench", "step", "--model", model, "--cluster", "dgx-h200", "--gpus", "1", "--json"]
    command += ["--set", f"model.layers={layers}", "--seq", str(seq), "--global-batch", str(rows)]
    command += ["--microbatch", str(rows), "--steps", str(STEPS), "--warmup", str(WARM_UP), "--precision", "bf16"]
    yield "shardwise", [*command, "--compile"]


def shown(command: list[str]) -> str:
    try:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        return "not done within 240 s"
    if done.returncode:
        return "not run: " + (done.stderr.strip().splitlines() or ["no reason was given"])[-1][:200]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return f"{found['seconds'] * 1e3:.0f} ms, {found['peak_bytes'] / 2**30:.1f} GiB"


def theirs(name: str, layers: int, rows: int, seq: int, attention: str) -> dict[str, float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardwise.interop.huggingface import hf_config_from_model, model_from_hf_config
    from shardwise.spec import presets
    from shardwise.spec.model import Model

    folder = Path(name)
    model = model_from_hf_config(folder) if folder.is_dir() else presets.load("model", Model, name)
    described = hf_config_from_model(replace(model, layers=layers, mtp_layers=0, published_parameters=None))
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        network: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    network.train()
    compiled: Any = torch.compile(network)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    taken = []
    for _ in range(WARM_UP + STEPS):
        tokens = torch.randint(model.vocab, (rows, seq), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        compiled(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return {"seconds": statistics.median(taken[WARM_UP:]), "peak_bytes": torch.cuda.max_memory_allocated()}


if __name__ == "__main__":
    main()
