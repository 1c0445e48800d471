"""The model families of Hugging Face, a file for each line of them: where each `Model` field stands in their
``config.json``, and what they call their tensors.

One table per ``model_type``. A field that the family always has the same way is ``fixed``; every other names
its key and the value the `transformers` library takes when the key is absent.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.families import (
    apertus,
    cohere,
    deepseek,
    dots,
    ernie,
    exaone,
    gemma,
    glm,
    gpt,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    llama_4,
    minimax,
    olmo,
    phi,
    qwen,
    seed,
    smollm,
    squared,
    stability,
)
from shardwise.interop.keys import Family

# A model is written as the first family that can express it.
_LINES = (
    llama, phi, olmo, qwen, deepseek, glm, dots, minimax, gemma, gpt, gpt_oss, smollm, seed, granite, hunyuan, ernie,
    llama_4, cohere, squared, stability, exaone, apertus,
)  # fmt: skip

FAMILIES: dict[str, Family] = {family.model_type: family for line in _LINES for family in line.FAMILIES}
ALIASES = {"kimi_k2": "deepseek_v3"}


def family_of(model_type: Any) -> Family | None:
    """The family of a ``model_type``, or None if there is none."""
    return FAMILIES.get(ALIASES.get(model_type, model_type)) if isinstance(model_type, str) else None
