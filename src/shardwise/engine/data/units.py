"""Parts of a network whose parameters data parallelism gathers and reduces together: layers, experts, both ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.engine.patterns import Patterns, matching


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and reduced together."""

    module: nn.Module
    expert: bool = False
    """Routed experts, which are divided over other ranks than the dense parts."""
    at_the_end: bool = False
    """Its backward pass directly follows its forward pass."""
    by_index: bool = False
    """It looks up rows, so that its backward pass needs no parameters."""


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
