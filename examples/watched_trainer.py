"""A Hugging Face `Trainer`, priced before its first step and measured beside the prediction.

python examples/watched_trainer.py, or torchrun --nproc-per-node 2 examples/watched_trainer.py for two processes
"""

from __future__ import annotations

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, logging

from shardwise.integrations.huggingface import ShardwiseCallback


def main() -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(256, (256, 64))]
    arguments = TrainingArguments(
        output_dir="runs/watched-trainer", max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
    # On CPUs a cluster has to be named; `laptop` is a placeholder for what `shardwise calibrate` measures.
    ShardwiseCallback(cluster=f"laptop:{os.environ.get('WORLD_SIZE', '1')}").attach(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
