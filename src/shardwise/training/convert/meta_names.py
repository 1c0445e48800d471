"""Llama under the names that Meta published it with, which TorchTitan keeps; rope turns neighbouring numbers there.

``consolidated.00.pth`` of the published models, and the checkpoints of TorchTitan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.training.checkpoint.whole import Lazy
from shardwise.training.convert.weights import Weights, complete

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_ENDS = {"tok_embeddings.weight": "embedding.weight", "norm.weight": "norm.weight", "output.weight": "head.weight"}
_INSIDE = {
    "attention_norm": "attention_norm", "ffn_norm": "mlp_norm", "attention.wq": "attention.query",
    "attention.wk": "attention.key", "attention.wv": "attention.value", "attention.wo": "attention.output",
    "feed_forward.w1": "mlp.gate", "feed_forward.w2": "mlp.down", "feed_forward.w3": "mlp.up",
}  # fmt: skip
_CONSTANTS = ("rope.freqs", "freqs_cis")


def has_meta_names(stored: Mapping[str, Lazy]) -> bool:
    return "tok_embeddings.weight" in stored


def from_meta(model: Model, stored: Mapping[str, Lazy], origin: str, step: int = 0) -> Weights:
    """The same weights by our names, with the rows of queries and keys in the order of rope here."""
    found = {}
    for name, one in stored.items():
        if name in _CONSTANTS:
            continue
        match = _LAYER.fullmatch(name)
        inner = _INSIDE.get(match[2]) if match else None
        if name not in _ENDS and inner is None:
            problem = f"in {origin} is not part of a Llama in Meta's naming"
            raise SpecError(name, problem, "convert it with its own tools")
        ours = _ENDS[name] if match is None else f"layers.{match[1]}.{inner}.weight"
        found[ours] = _turned(one, model, name) if inner in ("attention.query", "attention.key") else one
    return complete(model, found, origin, step)


def _turned(one: Lazy, model: Model, name: str) -> Lazy:
    """Of each head the rows 0, 2, 4, ... and then 1, 3, 5, ...: a pair is turned as one number and that half on."""
    if one.shape[0] % model.head_size or model.head_size % 2:
        raise SpecError(
            name, f"has {one.shape[0]} rows, not a whole number of heads of {model.head_size}", "name the right --model"
        )

    def read() -> Tensor:
        pairs = torch.unflatten(one.read(), 0, (-1, model.head_size // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    return Lazy(one.shape, one.dtype, read)
