"""Weights, gradients and optimizer states of one device under ZeRO, hybrid sharding and offload.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): with N-way data parallelism stage 1 divides the
optimizer states by N, stage 2 the gradients too, stage 3 the parameters too. Activations are never divided.
Less communication (compression, seldom synchronisation) keeps and moves some extra bytes for each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add
from typing import Any, Literal, NamedTuple

from shardwise.collectives.arrays import maximum, minimum, select
from shardwise.layout.sharding import Sharding
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload
from shardwise.spec.training import OPTIMIZERS, RECIPES, Recipe

ParameterGroup = Literal["dense", "experts"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state on one device, and what offload moved off it."""

    weights: Any
    gradients: Any
    optimizer: Any
    offloaded: Any = 0.0  # what offload moved to the host
    stored: Any = 0.0  # the optimizer states among it

    @property
    def total(self) -> Any:
        return self.weights + self.gradients + self.optimizer

    def __float__(self) -> float:
        return float(self.total)

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*map(add, vars(self).values(), vars(other).values()))


def state_bytes(
    matrices: Any,
    others: Any = 0.0,
    *,
    precision: str | Recipe = "bf16",
    optimizer: str = "adamw",
    zero: Any = 0,
    shards: Any = 1,
    gradients_sharded: Any = None,
    offload: Any = None,
    sums_once: Any = False,
) -> StateBytes:
    """Bytes for ``matrices`` + ``others`` parameters whose states ZeRO divides over ``shards`` devices.

    ``others`` (embeddings, head, norms) are separate because Muon keeps other states for them, and because they stay
    wide where matrices have FP8 or FP4 forms.
    """
    recipe = RECIPES[precision] if isinstance(precision, str) else precision
    states, offload = OPTIMIZERS[optimizer], offload or Offload()
    parameters = matrices + others
    weights = matrices * (recipe.weight + recipe.copies) + others * recipe.plain_weight
    master, gradient_shard, lasting = recipe.master, recipe.gradient, 0.0
    if recipe.fp32_shards:
        # The shards are the masters; what is gathered from them for a step counts as weights until ZeRO-3 drops it.
        weights = select(zero >= 3, 4 * parameters, weights)
        master = select(zero >= 3, 0, select(zero >= 1, 4, recipe.master))
        gradient_shard = select(sums_once, recipe.gradient, 4)
        lasting = parameters * select(zero >= 1, master, 0) / shards  # what is gathered stays on the device
    weights = weights / select(zero >= 3, shards, 1)
    sharded = zero >= 2 if gradients_sharded is None else gradients_sharded
    whole = select(zero >= 2, max(recipe.gradient, recipe.whole_gradient), recipe.gradient)
    gradients = parameters * select(sharded, gradient_shard / shards, whole)
    kept = parameters * master + matrices * states.matrices + others * states.others
    optimizer_bytes = kept / select(zero >= 1, shards, 1)
    stored = (optimizer_bytes - lasting) * offload.optimizer
    return StateBytes(
        weights * (1 - offload.weights),
        gradients * (1 - offload.gradients),
        optimizer_bytes - stored,
        weights * offload.weights + gradients * offload.gradients + stored,
        stored,
    )


def rank_state_bytes(contents: RankContents, sharding: Sharding, precision: str | Recipe, optimizer: str) -> StateBytes:
    """States of one device of a pipeline rank."""
    groups = group_states(contents, sharding, precision, optimizer)
    return groups["dense"] + groups["experts"] + StateBytes(0.0, 0.0, sharding.kept_bytes * contents.total)


def group_states(
    contents: RankContents, sharding: Sharding, precision: str | Recipe, optimizer: str
) -> dict[ParameterGroup, StateBytes]:
    """States of the dense parts and of the experts, which are divided over different devices."""
    recipe = RECIPES[precision] if isinstance(precision, str) else precision
    shared: dict[str, Any] = {"optimizer": optimizer, "zero": sharding.stage(recipe)}
    shared |= {name: getattr(sharding, name) for name in ("offload", "sums_once")}
    of_dense, of_experts = (
        {"shards": shards, "gradients_sharded": sharding.reduced_to_shards(shards)}
        for shards in (sharding.shards, sharding.expert_shards)
    )
    if recipe.trained_copies:  # beside their originals
        copied = replace(recipe, weight=4, copies=0, gradient=2, master=0, fp32_shards=False)
        narrow = {**shared, "optimizer": "adamw-bf16-moments" if optimizer == "adamw" else optimizer}
        dense = state_bytes(contents.layer_matrices, precision=recipe, **shared, **of_dense)
        dense = dense + state_bytes(0.0, contents.others, precision=copied, **narrow, **of_dense)
    else:
        dense = state_bytes(contents.layer_matrices, contents.others, precision=recipe, **shared, **of_dense)
    experts = state_bytes(contents.experts, precision=recipe.of_experts, **shared, **of_experts)
    frozen = frozen_bytes(contents.frozen_matrices, contents.frozen_others, recipe, sharding, sharding.shards)
    of_frozen = frozen_bytes(contents.frozen_experts, 0.0, recipe.of_experts, sharding, sharding.expert_shards)
    reference = frozen_bytes(contents.reference, 0.0, recipe, sharding, sharding.shards)
    return {"dense": dense + frozen + reference, "experts": experts + of_frozen}


def frozen_bytes(matrices: Any, others: Any, recipe: Recipe, sharding: Sharding, shards: Any) -> StateBytes:
    """Bytes of weights that are not trained, divided only by ZeRO-3; without masters, in the format of the passes."""
    divided = select(sharding.zero >= 3, shards, 1)
    each, other = recipe.weight + recipe.copies, recipe.plain_weight
    if recipe.base is not None:
        each, other = recipe.base, recipe.frozen_plain
    elif recipe.fp32_shards and recipe.copies:  # this engine keeps only what is multiplied, or what is gathered
        each = select((sharding.zero >= 3) & (shards > 1), recipe.weight, recipe.copies)
    weights = (matrices * each + others * other) / divided
    leaving = weights * sharding.offload.weights
    gradients = 0.0
    if recipe.frozen_gradients:
        has_gradients = (sharding.zero >= 3) & (shards > 1)
        held = select(sharding.reduced_to_shards(shards), shards, 1)
        gradients = select(has_gradients, matrices * recipe.gathered / held, 0.0)
    return StateBytes(weights - leaving, gradients, 0.0, leaving)


def updated_parameters(contents: RankContents, sharding: Sharding) -> Any:
    """Parameters whose optimizer states a device keeps."""
    return contents.dense / sharding.shards + contents.experts / sharding.expert_shards


def square_roots(job: Job, contents: RankContents, sharding: Sharding) -> Any:
    """Bytes of the square roots of second moments that torch's AdamW holds for all parameters that a device updates.

    In the format of the moments (torch/optim/adam.py, _multi_tensor_adam: `torch._foreach_sqrt`). Tensors that are
    neither plain nor parameters, such as FSDP2's DTensors, are updated one by one (optimizer.py,
    _default_to_fused_or_foreach).
    """
    how = job.stack.adamw
    if how in ("in place", "one by one") or sharding.offload.optimizer:
        return 0.0
    roots = updated_parameters(contents, sharding) * OPTIMIZERS[job.training.optimizer].root
    if job.recipe.trained_copies:
        roots = roots - contents.others / sharding.shards * OPTIMIZERS[job.training.optimizer].root / 2
    return roots if how == "foreach" else roots * (sharding.zero == 0)


class UpdateCopies(NamedTuple):
    """Gradients that an update copies."""

    elements: Any  # at a time
    each: Any  # bytes of all copies of an element

    @property
    def bytes(self) -> Any:
        return self.elements * self.each


def update_copies(job: Job, contents: RankContents, sharding: Sharding) -> UpdateCopies:
    """Copies of gradients that DeepSpeed makes where the device updates (0.19.8, the files that its stack names).

    ZeRO flattens a shard of gradients and casts it to the format of the masters: experts that are divided over other
    devices than the rest form a group of their own, and ZeRO-3 has groups of `Stack.update_elements`. Under ZeRO-1 and
    2, gradients accumulated in fp32 are flat already. Without ZeRO all are cast, then flattened.
    """
    recipe = job.recipe
    if not job.stack.update_elements or sharding.offload.optimizer or not recipe.master:
        return UpdateCopies(0.0, 0.0)
    dense, experts = contents.dense / sharding.shards, contents.experts / sharding.expert_shards
    shard = select(sharding.shards == sharding.expert_shards, dense + experts, maximum(dense, experts))
    cast = recipe.master if recipe.gradient < recipe.master else 0
    copied = recipe.gradient + cast
    whole = 2 * cast * (job.strategy.pp == 1)  # under a pipeline another optimizer updates (bf16_optimizer.py)
    each = select(sharding.zero == 0, whole, select((sharding.zero < 3) & (recipe.gradient >= 4), 0, copied))
    group = select(sharding.zero == 3, minimum(job.stack.update_elements, shard), shard)
    return UpdateCopies(select(sharding.zero == 0, contents.total, group), each)
