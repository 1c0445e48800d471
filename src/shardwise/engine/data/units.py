"""Parts of a network whose parameters data parallelism gathers and reduces together: layers, experts, both ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.engine.patterns import Patterns, matching


@dataclass(frozen=True)
class Unit:
    """``expert``: its parameters are those of routed experts, which other ranks hold than hold the dense parts.

    ``at_the_end``: its backward pass directly follows its forward pass. ``by_index``: it looks rows up, so that its
    backward pass needs no parameters.
    """

    module: nn.Module
    expert: bool = False
    at_the_end: bool = False
    by_index: bool = False


def units_of(root: nn.Module, layers: Sequence[nn.Module], patterns: Patterns, experts_apart: bool) -> list[Unit]:
    """In the order of the forward pass; experts come after the layer that they are in. The root owns
    the rest, a tied embedding included: both ends of the network need it.
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
        mine = [one for one in units[number].module.parameters() if id(one) not in taken]
        taken.update(id(one) for one in mine)
        owned[number] = mine
    return [owned[number] for number in range(len(units))], [one for one in root.parameters() if id(one) not in taken]


def find_layers(root: nn.Module) -> list[nn.Module]:
    """The blocks of a network without a table: members of the largest list of modules of one kind."""
    lists = nn.ModuleList | nn.ModuleDict | nn.Sequential
    candidates = [list(module.children()) for module in root.modules() if isinstance(module, lists)]
    alike = [blocks for blocks in candidates if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    return max(alike, key=lambda blocks: sum(one.numel() for block in blocks for one in block.parameters()), default=[])


def _ends(root: nn.Module, patterns: Patterns) -> Iterator[tuple[nn.Module, str]]:
    """Embedding and head, unless they share a parameter with anything else."""
    uses: dict[int, int] = {}
    for _, parameter in root.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for pattern in (patterns.embedding, patterns.head):
        for _, module in matching(root, pattern):
            parameters = list(module.parameters())
            if parameters and all(uses[id(one)] == 1 for one in parameters):
                yield module, pattern
