"""Which modules of a network play which role: the table that tensor, context, expert and pipeline parallelism read.

A name may hold ``*`` for one word of a dotted path. Modules that no pattern names stay whole on every rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardwise.spec.model import Model


@dataclass(frozen=True)
class Patterns:
    """Roles of the modules of one family of networks.

    ``regions`` take hidden states as their first argument and contain cut linear layers; ``columns`` are cut by their
    outputs (the value names the attribute of the job's model that counts the heads, "" where they divide freely),
    ``rows`` by their inputs. ``fused`` are columns that hold several maps one behind the other, as wide as the named
    attributes of the job's model are to each other. ``wide_norms`` are root-mean-square norms over the outputs of cut
    maps, with the same values. ``headless`` modules of a region precede its cut layers: heads of all ranks reach
    their gradients. ``flat`` are regions whose hidden states are rows of tokens, without a batch.

    What follows ``experts`` is for other networks than ours. ``attention`` modules mix tokens by their attribute
    ``attend`` (`models.dot_product`). ``experts`` hold parameters stacked along dimension 0 and map rows, the numbers
    of their experts and weights to rows; ``expert_features`` says which dimension of each runs over the features inside
    an expert, and of how many equal blocks it is made (gate and up in one are two). ``hidden``, ``positions`` and
    ``documents`` are names of arguments: of the regions' hidden states, and of the network's positions [batch, seq] and
    numbers of packed documents. ``constants`` are given with every call.

    Attributes that a network reads while it runs are changed with it: ``divided`` names by module those that count what
    tensor parallelism cuts, ``layer_lists`` those with an element for each layer, of which a stage keeps its own.
    ``logit_cap`` names an attribute c of the network's config, which turns its head's x into c·tanh(x/c). ``refused``
    gives the reason why this network does not support a field of a strategy.
    """

    layers: str
    embedding: str
    norm: str
    head: str
    regions: tuple[str, ...]
    columns: dict[str, str] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wide_norms: dict[str, str] = field(default_factory=dict)
    headless: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    position_embedding: str = ""
    experts: str = ""
    expert_features: dict[str, tuple[int, int]] = field(default_factory=dict)
    attention: str = ""
    hidden: str = ""
    positions: str = ""
    documents: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    divided: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layer_lists: tuple[str, ...] = ()
    logit_cap: str = ""
    refused: dict[str, str] = field(default_factory=dict)


DECODER = Patterns(
    layers="layers.*",
    embedding="embedding",
    position_embedding="position_embedding",
    norm="norm",
    head="head",
    regions=("layers.*.attention", "layers.*.mlp", "layers.*.mlp.shared"),
    columns={
        "layers.*.attention.query": "",
        "layers.*.attention.query_up": "",
        "layers.*.attention.key_value_up": "",
        "layers.*.attention.key": "key_value_heads",
        "layers.*.attention.value": "key_value_heads",
        "layers.*.mlp.gate": "",
        "layers.*.mlp.up": "",
        "layers.*.mlp.shared.gate": "",
        "layers.*.mlp.shared.up": "",
    },
    rows=("layers.*.attention.output", "layers.*.mlp.down", "layers.*.mlp.shared.down"),
    headless=(
        "layers.*.attention.query_down",
        "layers.*.attention.query_down_norm",
        "layers.*.attention.key_value_down",
        "layers.*.attention.key_value_down_norm",
    ),
    experts="layers.*.mlp.experts",
)


def decoder_patterns(model: Model) -> Patterns:
    """The table of our own decoder, with what only some models have."""
    if not model.qk_norm_whole:
        return DECODER
    norms = {"layers.*.attention.query_norm": "", "layers.*.attention.key_norm": "key_value_heads"}
    return replace(DECODER, wide_norms=norms)


def matching(root: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose name fits the pattern, with their names."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    for name, module in root.named_modules():
        if pattern and expression.fullmatch(name):
            yield name, module


def replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)


def change_attribute(module: nn.Module, path: str, change: Callable[[Any], Any]) -> None:
    """Changes what a network reads while it runs; a config on the path is copied first, since others read it too."""
    owner: Any = module
    *holders, name = path.split(".")
    for holder in holders:
        held = getattr(owner, holder)
        if not isinstance(held, nn.Module):
            held = copy.copy(held)
            setattr(owner, holder, held)
        owner = held
    setattr(owner, name, change(getattr(owner, name)))
