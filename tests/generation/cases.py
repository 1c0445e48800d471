"""What the tests of generation share: folders, prompts, tokens with and without the cache, tokens of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.families import saved
from models.shapes import tokens
from shardwise.generation.decoding import Collected, NextToken, generated_tokens
from shardwise.generation.ranks import PromptList, loaded, on_rank, opened_weights
from shardwise.generation.request import GenerationRequest

LENGTHS = (11, 4, 1)
PROMPTS = tuple(tuple(row[:length].tolist()) for row, length in zip(tokens(3, 11), LENGTHS))
NEW = 12


def folder_of(case: str, path: Path) -> tuple[Any, GenerationRequest]:
    """The library's model, and a request for the folder that it was saved to."""
    return saved(case, path), GenerationRequest(str(path), max_new_tokens=NEW)


def model_of(request: GenerationRequest) -> NextToken:
    return loaded(opened_weights(request), 1, "cpu")


def tokens_of(model: NextToken, request: GenerationRequest, prompts: Any = PROMPTS, **changes: Any) -> list[list[int]]:
    request, collected = replace(request, **changes), Collected(prompts)
    for step in generated_tokens(model, prompts, request):
        assert not torch.is_inference_mode_enabled()  # what a caller does with a step is its own
        collected.add(step)
    return [list(one.tokens) for one in collected.results(request.stop)]


@torch.no_grad()
def theirs(model: Any, new: int = NEW, **settings: Any) -> list[list[int]]:
    """What the transformers library generates greedily, each prompt by itself."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids), **settings}
        made = model.generate(ids, max_new_tokens=new, **settings)
        found.append(made[0, len(prompt) :].tolist())
        settings.pop("attention_mask")
    return found


def tokens_on_rank(request: GenerationRequest) -> list[list[int]]:
    """By the rank that this process is."""
    found, _ = on_rank(request, PromptList(PROMPTS), lambda event: None, leads=True)
    return [list(one.tokens) for one in found]
