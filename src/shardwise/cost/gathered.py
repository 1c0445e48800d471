"""Whole layers that sharded data parallelism holds for a moment: gathered parameters, gradients on their way."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardwise.collectives.arrays import maximum, select
from shardwise.cost.passing import Moment
from shardwise.cost.states import Sharding
from shardwise.layout.stages import RankContents
from shardwise.spec.training import Recipe


def gathered_bytes(
    contents: RankContents, sharding: Sharding, recipe: Recipe, moment: Moment = "together", *, tied: bool = False
) -> Any:
    """Whole layers that sharded data parallelism holds for a moment.

    ZeRO-3 gathers the layer in use and prefetches the next; ZeRO-2 and 3 hold one layer's whole gradient until
    it is reduced (FSDP2: one unit in use, one in flight). Embedding and head stay gathered between the passes: FSDP2
    does not reshard its root, which backward would gather again at once.
    """
    unit = divided_units(contents, sharding, tied=tied)
    if recipe.fp32_shards:
        return gathered_at(unit, sharding, recipe, moment) + _travelling(unit, sharding, moment)
    gradient = unit.layer * recipe.gradient if sharding.gradients_sharded else 0.0
    parameters = (select(sharding.keep_parameters, unit.layers, 2 * unit.layer) + unit.ends) * recipe.gathered
    return (sharding.zero >= 2) * gradient + (sharding.zero == 3) * parameters


def divided_units(contents: RankContents, sharding: Sharding, *, tied: bool) -> Units:
    """What is gathered and reduced together. Experts that no other device holds are whole already."""
    alone = sharding.offload.weights + sharding.offload.gradients > 0  # then they come and go by units all the same
    dense, experts = (alone | (shards > 1) for shards in (sharding.shards, sharding.expert_shards))
    layers = contents.layer_matrices * dense + contents.experts * experts
    ends = contents.others * dense
    both_ends = contents.has_embedding * contents.has_head * (not tied)
    return units(layers, contents.layers, ends, contents.has_embedding, both_ends)


class Units(NamedTuple):
    """Parameters that FSDP gathers and reduces together: of all layers, of one, and of an end of the model."""

    layers: Any
    layer: Any
    ends: Any
    end: Any
    has_embedding: Any


def units(layers: Any, number: Any, ends: Any, has_embedding: Any, both_ends: Any) -> Units:
    return Units(layers, layers / maximum(1, number), ends, ends / select(both_ends, 2, 1), has_embedding)


def gathered_at(unit: Units, sharding: Sharding, recipe: Recipe, moment: Moment) -> Any:
    """Whole parameters and gradients that FSDP holds.

    At the loss the head, the last layer on its way, and what the pass before has left. In a layer itself and the next,
    and what was reduced before it and is waited for.
    """
    parameters = unit.end + unit.layer if moment == "loss" else 2 * unit.layer
    parameters = select(sharding.keep_parameters, unit.layers + unit.ends, parameters) * recipe.gathered
    gathered = (sharding.zero == 3) * parameters
    if moment == "loss":
        return gathered + left_over(unit, sharding, recipe)
    reduced = maximum(unit.layer, unit.end) * recipe.gradient if sharding.gradients_sharded else 0.0
    return gathered + (sharding.zero >= 2) * reduced


def _travelling(unit: Units, sharding: Sharding, moment: Moment) -> Any:
    """fp32 shards of one layer that come to be gathered, and in the backward pass of one whose gradients leave."""
    share = sharding.offload.weights + (sharding.offload.gradients if moment == "layer" else 0.0)
    return 4 * share * unit.layer / sharding.shards


def left_over(unit: Units, sharding: Sharding, recipe: Recipe) -> Any:
    """The last whole gradient that a backward pass reduces, which FSDP lets go with the first of the next pass."""
    if not sharding.gradients_sharded:
        return 0.0
    last = select(unit.has_embedding, unit.end, unit.layer)
    return (sharding.zero >= 2) * last * recipe.gradient
