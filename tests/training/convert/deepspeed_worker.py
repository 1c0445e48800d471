"""A rank of DeepSpeed: trains a small Llama for two steps, saves it, and what DeepSpeed itself makes of the files.

python -m torch.distributed.run --nproc-per-node 2 deepspeed_worker.py STAGE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
import torch._dynamo  # before ``zero.Init`` replaces the constructors of tensors, whose signatures it checks
import transformers
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def main(stage: int, folder: Path) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3):
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
    engine, *_ = deepspeed.initialize(model=network, config=settings, model_parameters=network.parameters())
    tokens = torch.arange(8)[None] + engine.global_rank
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder / "saved")
    if engine.global_rank == 0:
        torch.save(get_fp32_state_dict_from_zero_checkpoint(folder / "saved"), folder / "whole.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
