"""Pipeline stages of a user's own network: absent modules are skipped.

The network's own forward pass runs in every stage. Where the embedding was, hidden states go through instead of tokens;
where norm and head were, they come out. Layers keep their names, so that parameters do too.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwise.engine.patterns import Patterns, change_attribute, matching, replace_module


class PassedBy(nn.Module):
    """Stands where a part was that other ranks have; ``seen`` is what went through last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return hidden


class Nothing(nn.Module):
    """Stands where learned positions were: the first stage has added them."""

    def forward(self, positions: Tensor) -> float:
        return 0.0


def twin(module: nn.Module) -> nn.Module:
    """A second network with the same parameters and buffers, from which other parts can be taken away."""
    shared: dict[int, Any] = {id(one): one for one in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, shared)


def keep_part(root: nn.Module, patterns: Patterns, layers: range, *, first: bool, last: bool) -> Patterns:
    """Takes away what belongs to other stages; the table of what is left."""
    container = root.get_submodule(patterns.layers.removesuffix(".*"))
    for number, name in enumerate(list(container._modules)):
        if number not in layers:
            del container._modules[name]  # not by index, which would give the others new names
    for path in patterns.layer_lists:
        change_attribute(root, path, lambda several: [several[layer] for layer in layers])
    gone: dict[str, type[nn.Module]] = {}
    if not first:
        gone |= {patterns.embedding: PassedBy, patterns.position_embedding: Nothing}
    if not last:
        gone |= {patterns.norm: PassedBy, patterns.head: PassedBy}
    for pattern, stand_in in gone.items():
        for name, _ in list(matching(root, pattern)):
            replace_module(root, name, stand_in())
    if not first:
        patterns = replace(patterns, embedding="", position_embedding="")
    return patterns if last else replace(patterns, norm="", head="")
