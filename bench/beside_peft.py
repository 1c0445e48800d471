"""LoRA on one GPU in turns: transformers with peft, the same with Liger's kernels, and this project.

    PYTHONPATH=src python bench/beside_peft.py [--turns 2] [--seq 4096] [--batch 2]

Llama-3 8B shapes with random weights, rank 16 on all linear layers, bf16, AdamW; each run is a process of its own, and
what is printed is the median step of each turn. What is not installed is left out with a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS, WARM_UP = 5, 2
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768}  # fmt: skip
OURS = {
    "shardwise": [], "shardwise, compiled": ["--compile"],
    "shardwise, FP8, compiled": ["--compile", "--precision", "fp8"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("turns", 2), ("seq", 4096), ("batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--theirs", nargs=2, metavar=("LIGER", "CHECKPOINTED"), help="one run of peft, in this process")
    given = parser.parse_args()
    if given.theirs:
        liger, checkpointed = (word == "yes" for word in given.theirs)
        print(json.dumps(theirs(given.batch, given.seq, liger, checkpointed)))
        return
    for turn in range(given.turns):
        for checkpointed in (False, True):
            for name, run in runs(given.batch, given.seq, checkpointed).items():
                kind = f"{name}, {'checkpointed' if checkpointed else 'nothing recomputed'}"
                print(f"turn {turn + 1}, {kind}: {run()}", flush=True)


def runs(batch: int, seq: int, checkpointed: bool) -> dict[str, Callable[[], str]]:
    shape = ["--batch", str(batch), "--seq", str(seq)]
    again = "yes" if checkpointed else "no"
    all_of_them: dict[str, Callable[[], str]] = {
        name: lambda liger=liger: shown([__file__, *shape, "--theirs", liger, again], batch * seq)  # type: ignore[misc]
        for name, liger in (("transformers and peft", "no"), ("the same with Liger", "yes"))
    }
    for name, options in OURS.items():
        command = ["-m", "shardwise", "bench", "step", "--model", "llama3-8b", "--cluster", "dgx-h200", "--gpus", "1"]
        command += ["--global-batch", str(batch), "--microbatch", str(batch), "--seq", str(seq), "--json"]
        command += ["--steps", str(STEPS), "--warmup", str(WARM_UP), "--set", "training.adapters.rank=16"]
        command += ["--recompute", "full" if checkpointed else "none", *(options or ["--precision", "bf16"])]
        all_of_them[name] = lambda command=command: shown(command, batch * seq)  # type: ignore[misc]
    return all_of_them


def shown(command: list[str], tokens: int) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    if done.returncode:
        return "not run: " + (done.stderr.strip().splitlines() or ["no reason was given"])[-1][:200]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    seconds, peak = found["seconds"], found["peak_bytes"]
    return f"{seconds * 1e3:.0f} ms, {tokens / seconds / 1e3:.1f}k tokens/s, {peak / 2**30:.1f} GiB"


def theirs(batch: int, seq: int, liger: bool, checkpointed: bool) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa"))
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    model.train()
    model.config.use_cache = False
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    taken = []
    for _ in range(WARM_UP + STEPS):
        tokens = torch.randint(SHAPE["vocab_size"], (batch, seq), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return {"seconds": statistics.median(taken[WARM_UP:]), "peak_bytes": torch.cuda.max_memory_allocated()}


if __name__ == "__main__":
    main()
