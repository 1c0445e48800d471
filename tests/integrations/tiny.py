"""A small Llama and examples for it, for every framework alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

SEQ, VOCAB = 16, 64
CLUSTER = "laptop:1"


def network(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    words = {"vocab_size": VOCAB, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**words, **sizes, **heads, **changes}))


class Examples(Dataset[dict[str, torch.Tensor]]):
    """``count`` examples of ``seq`` tokens."""

    def __init__(self, count: int = 64, seq: int = SEQ) -> None:
        self.tokens = torch.randint(VOCAB, (count, seq), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}
