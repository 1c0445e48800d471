"""Which modules of a network play which role: the table that tensor, context, expert and pipeline parallelism read.

A name may hold ``*`` for one word of a dotted path. Modules that no pattern names stay whole on every rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardwise.spec.model import Model


@dataclass(frozen=True)
class Patterns:
    """Roles of the modules of one family of networks, by their names; a star stands for any number."""

    layers: str  # decoder layers
    embedding: str  # token embedding
    norm: str  # norm before the head
    head: str  # language-model head
    regions: tuple[str, ...]  # modules with cut linear layers, whose first argument is the hidden states
    columns: dict[str, str] = field(default_factory=dict)
    """Linear layers cut by their outputs. The value names the model's attribute that counts the heads, or is empty
    where outputs divide freely."""
    rows: tuple[str, ...] = ()  # linear layers cut by their inputs
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns that hold several maps one behind the other; the named attributes of the model give their relative
    widths."""
    wide_norms: dict[str, str] = field(default_factory=dict)
    """RMS norms over the outputs of cut maps, with values as in `columns`."""
    head_vectors: tuple[str, ...] = ()
    """Parameters with an element per query head, cut as the heads are."""
    headless: tuple[str, ...] = ()
    """Modules of a region before its cut layers: the heads of all ranks contribute to their gradients."""
    flat: tuple[str, ...] = ()  # regions whose hidden states are rows of tokens, without a batch dimension
    position_embedding: str = ""  # learned position embedding

    # -- other networks than ours

    experts: str = ""
    """Modules with parameters stacked over experts along dimension 0; they map rows, expert numbers and weights to
    rows."""
    expert_features: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each such parameter: the dimension of an expert's inner features, and of how many equal blocks it is made
    (gate and up in one: two)."""
    attention: str = ""  # modules that mix tokens by their attribute `attend` (`models.dot_product`)
    hidden: str = ""  # name of the regions' argument for hidden states
    positions: str = ""  # name of the network's argument for positions [batch, seq]
    documents: str = ""  # name of the network's argument for the numbers of packed documents
    constants: dict[str, Any] = field(default_factory=dict)  # arguments given with every call
    divided: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By module, attributes read at run time that count what tensor parallelism cuts; they are divided too."""
    layer_lists: tuple[str, ...] = ()  # attributes with an element per layer; a stage keeps its own
    logit_cap: str = ""  # attribute c of the network's config: its head's x becomes c·tanh(x/c)
    refused: dict[str, str] = field(default_factory=dict)
    """By field of a strategy, why this network does not support it."""


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
    head_vectors=("layers.*.attention.sinks",),
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


# -- Parts whose parameters data parallelism gathers and reduces together: layers, experts, both ends


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and reduced together."""

    module: nn.Module
    expert: bool = False  # routed experts, which are divided over other ranks than the dense parts
    at_the_end: bool = False  # its backward pass directly follows its forward pass
    by_index: bool = False  # it looks up rows, so that its backward pass needs no parameters


def units_of(root: nn.Module, layers: Sequence[nn.Module], patterns: Patterns, experts_apart: bool) -> list[Unit]:
    """Units in the order of the forward pass, experts after the layer that they are in.

    The root owns the rest, including a tied embedding, which both ends of the network need.
    """
    units: list[Unit] = []
    ends = list(_ends(root, patterns))
    units += [Unit(module, by_index=True) for module, name in ends if name == patterns.embedding]
    for layer in layers:
        units.append(Unit(layer))
        if experts_apart:
            units += [
                Unit(module, expert=True)
                for name, module in layer.named_modules()
                if name.rpartition(".")[2] == "experts"
            ]
    units += [Unit(module, at_the_end=True) for module, name in ends if name == patterns.head]
    return units


def own_parameters(root: nn.Module, units: Sequence[Unit]) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """Parameters of each unit without those of units inside it, and the rest; each parameter once."""
    taken: set[int] = set()
    owned: dict[int, list[nn.Parameter]] = {}
    inner_first = sorted(range(len(units)), key=lambda number: not units[number].expert)
    for number in inner_first:
        mine = [parameter for parameter in units[number].module.parameters() if id(parameter) not in taken]
        taken.update(id(parameter) for parameter in mine)
        owned[number] = mine
    rest = [parameter for parameter in root.parameters() if id(parameter) not in taken]
    return [owned[number] for number in range(len(units))], rest


def find_layers(root: nn.Module) -> list[nn.Module]:
    """The blocks of a network without a table: members of its largest list of modules of one class."""
    lists = nn.ModuleList | nn.ModuleDict | nn.Sequential
    candidates = [list(module.children()) for module in root.modules() if isinstance(module, lists)]
    alike = [blocks for blocks in candidates if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    return max(
        alike,
        key=lambda blocks: sum(parameter.numel() for block in blocks for parameter in block.parameters()),
        default=[],
    )


def _ends(root: nn.Module, patterns: Patterns) -> Iterator[tuple[nn.Module, str]]:
    """Embedding and head, unless they share a parameter with anything else."""
    uses: dict[int, int] = {}
    for _, parameter in root.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for pattern in (patterns.embedding, patterns.head):
        for _, module in matching(root, pattern):
            parameters = list(module.parameters())
            if parameters and all(uses[id(parameter)] == 1 for parameter in parameters):
                yield module, pattern
