"""A Hugging Face model in a plain PyTorch loop, before and after: `python examples/own_model.py [strategy]`.

The strategy is one of STRATEGIES below (default: tensor and sequence parallel). `plain` is the loop as everybody writes
it, in one process; `parallel` is the same loop on two, and its changed lines are marked. Both print the same losses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from shardwise.engine.mesh import process_group
from shardwise.launch.pool import Pool, WorkerPlace

STRATEGIES = {
    "tp": shardwise.Strategy(tp=2),
    "zero": shardwise.Strategy(dp=2, zero=3),
    "pp": shardwise.Strategy(pp=2),
    "cp": shardwise.Strategy(cp=2),
}
SEQUENCES, SEQ, STEPS = 8, 64, 5


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=1000, max_position_embeddings=256, pad_token_id=None,
        )
    )  # fmt: skip


def batches() -> Iterator[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(1000, (SEQUENCES, SEQ), generator=random)
        yield {"input_ids": tokens, "labels": tokens}


def plain() -> list[float]:
    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel(strategy: shardwise.Strategy) -> list[float]:
    model, losses = make_model(), []
    moves = shardwise.Optimization(learning_rate=3e-4, decay=0.0)  # changed
    training = shardwise.Training(global_batch=SEQUENCES, seq=SEQ, precision="fp32", optimization=moves)  # changed
    trained = shardwise.parallelize(model, strategy, training=training)  # changed
    for batch in batches():
        loss = trained.step(trained.share(batch)).loss  # changed; backward, clipping and the optimizer are in it
        losses.append(loss.item())
    return losses


def on_a_rank(place: WorkerPlace, strategy: shardwise.Strategy) -> list[float]:
    """One of two processes; with `torchrun` this is `torch.distributed.init_process_group`."""
    torch.set_num_threads(1)
    with process_group(place.rank, place.world, place.rendezvous_file):
        return parallel(strategy)


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "tp"
    if name not in STRATEGIES:
        print(f"choose one of {', '.join(STRATEGIES)}")
        return 2
    one = plain()
    with Pool() as pool:
        two = pool.run(on_a_rank, 2, STRATEGIES[name])[0]
    print(f"step  one process  two processes ({name})")
    for step, (alone, together) in enumerate(zip(one, two), 1):
        print(f"{step:4}  {alone:11.6f}  {together:11.6f}")
    worst = max(abs(alone - together) / alone for alone, together in zip(one, two))
    print(f"largest relative difference {worst:.1e}")
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
