"""ZeRO-1, 2 and 3 and hybrid sharding: `fully_shard` per layer, with control over gathering, reducing and freeing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from shardwise.engine import torch_private
from shardwise.engine.collectives.choose import GradientSums
from shardwise.engine.data.fsdp_collectives import Unfinished, install
from shardwise.engine.data.units import Unit
from shardwise.engine.fp8.apply import gather_in_fp8
from shardwise.engine.fp8.gathers import GatherScales
from shardwise.engine.mesh import Mesh
from shardwise.engine.offload.shards import OffloadedGradients, OffloadedWeights, await_updates
from shardwise.engine.offload.states import StoredStates
from shardwise.engine.optim.precision import Precision
from shardwise.layout.sharding import gathers_in_fp8, last_weights_stay, sharding_of


class Sharded:
    """Parameters of ``root`` divided over the ranks of the mesh; each of ``units`` is gathered and reduced by itself.

    ZeRO-1: parameters are gathered once a step, gradients stay whole and are reduced with the last microbatch.
    ZeRO-2: gradients are reduced with every microbatch, unless they accumulate locally or no other rank has a part of
    them, as of experts that as many ranks divide as there are copies. ZeRO-3: parameters are freed after every use,
    unless they are kept. Hybrid: the all-reduce between shard groups comes with the last microbatch, whatever happens
    inside them. ``prefetch`` units are gathered ahead of the one that computes.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        mesh: Mesh,
        precision: Precision,
        prefetch: int,
        sums: GradientSums,
    ) -> None:
        strategy = mesh.strategy
        self.mesh, self.scaling = mesh, precision.scaling
        self.fp8_scales: GatherScales | None = None  # of weights that are gathered in FP8
        self._reduced_always: set[Any] = set()  # the other units with the last microbatch
        self.keeps_parameters = strategy.zero < 3 or strategy.keep_parameters
        self.in_pipeline = strategy.pp > 1
        self.units: list[Any] = [*(unit.module for unit in units), root]
        self._set_to: tuple[bool, bool, bool] | None = None
        self._staying = _last_layer(units) if last_weights_stay(strategy.pp, sharding_of(strategy)) else set()
        self.masters: dict[nn.Parameter, Tensor] = {}  # the shards themselves are fp32
        for unit in sorted(units, key=lambda one: not one.expert):  # inner modules first
            self._shard(unit, mesh, precision)
        self._shard(Unit(root, at_the_end=True), mesh, precision, root=True)
        _loss_through_head(root, units)
        self.unfinished = Unfinished()
        self.reductions = [one for module in self.units for one in install(module, self.unfinished, sums)]
        self.passes = _passes(root, units)
        _prefetch(*self.passes, units, prefetch)
        self.weights: OffloadedWeights | None = None
        self.gradients: OffloadedGradients | None = None
        if mesh.device == "cpu":
            torch_private.gather_in_background(root)

    def _shard(self, unit: Unit, mesh: Mesh, precision: Precision, root: bool = False) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute if precision.has_masters else None,
            reduce_dtype=precision.gradient if precision.has_masters else None,
            # Only what enters the whole network: inside, tables of angles and the like keep their own format.
            cast_forward_inputs=root,
        )
        again = not (self.keeps_parameters or unit.at_the_end or unit.module in self._staying)
        groups = ("expert_replicate", "expert_shard") if unit.expert else ("replicate", "shard")
        ranks = mesh.sharding(*groups)
        if sharding_of(mesh.strategy).reduced_to_shards(ranks.size(ranks.ndim - 1)):
            self._reduced_always.add(unit.module)
        sharded = fully_shard(unit.module, mesh=ranks, reshard_after_forward=again, mp_policy=policy)
        if ranks.size() > 1:  # alone, FSDP would divide by the 1
            # Sums, not means: the loss was divided by the tokens of the whole batch. A factor alone would make FSDP use
            # a scaling reduction, which gloo does not have.
            sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if unit.by_index:
            sharded.set_unshard_in_backward(False)

    def offload(self, stored: StoredStates, stay: AbstractSet[nn.Parameter]) -> None:
        """Weights and gradients that are ``stored`` leave the device; not the gradients of those that ``stay``."""
        if stored.weights:
            self.weights = OffloadedWeights(*self.passes, stored)
            torch_private.copy_gradients_by_kernels()
        elif stored.streamed is not None and self.fp8_scales is None:  # which are found from all shards at once
            await_updates(self.units, stored.streamed)
        if stored.gradients:
            self.gradients = OffloadedGradients(self.units, stored, stay)
            for reduction in self.reductions:
                if any(stored.has_gradients(one.sharded_param) for one in reduction.fsdp_parameters):
                    reduction.unfinished = None  # what leaves has to be complete

    def start(self) -> None:
        """Call once the parameters have memory; the shards are the masters."""
        if self.scaling and gathers_in_fp8(self.mesh.strategy, self.scaling) and self.fp8_scales is None:
            self.fp8_scales = gather_in_fp8(self.units[-1], self.mesh.group("shard"))

    def before_step(self) -> None:
        """Call once weights have their values of the step."""
        if self.fp8_scales is not None:
            self.fp8_scales.find()

    def before_microbatch(self, last: bool) -> None:
        """Call before the forward pass; ``last``: of the step."""
        self._set(True, last or not self.keeps_parameters, last)

    def after_step(self) -> None:
        """Frees the gradients; the shards that the optimizer has updated are gathered by the next forward pass."""
        for parameter in self.units[-1].parameters():
            parameter.grad = None
        for reduction in self.reductions:
            reduction.total = None
        if self.weights is not None:
            self.weights.settle()
        if self.gradients is not None:
            self.gradients.stored.summed.clear()

    def after_evaluation(self) -> None:
        """Does what a backward pass would have done: the next step gathers by itself, and no more than planned."""
        for unit in self.units:
            unit.reshard()
            for group in torch_private.parameter_groups(unit):
                torch_private.forget_forward_passes(group)

    def before_input_gradients(self) -> None:
        """Deferred weight gradients need inputs and output gradients but no weights, which may be freed."""
        self._set(False, not self.keeps_parameters, False)

    def after_weight_gradients(self, last: bool) -> None:
        """What FSDP's hooks would do if they waited for the weight gradients (pytorch#144530)."""
        self.before_microbatch(last)
        self.unfinished.will_finish = True
        for unit in reversed(self.units):
            for group in torch_private.parameter_groups(unit):
                _complete(group)
                group.post_backward()
        torch_private.finish_backward(self.units[-1])
        self.unfinished.finish()

    def _set(self, reduce: bool, reshard: bool, last: bool) -> None:
        if self._set_to == (reduce, reshard, last):
            return
        self._set_to = (reduce, reshard, last)
        for unit in self.units:
            unit.set_requires_gradient_sync(reduce and (last or unit in self._reduced_always), recurse=False)
            # Between the shard groups once; in a pipeline each time, since a pass may bring only some gradients of a
            # tied embedding, and FSDP cannot add tensors of different sizes.
            unit.set_requires_all_reduce(last or self.in_pipeline, recurse=False)
            unit.set_reshard_after_backward(reshard, recurse=False)
        self.units[-1].set_is_last_backward(last)


def _complete(group: Any) -> None:
    """Zeros for missing gradients: hybrid sharding accumulates all of them in one tensor between microbatches.

    Two input-gradient passes in a row leave those of norms for one reduction and none for the next.
    """
    for one in group.fsdp_params:
        if one.sharded_param.requires_grad and one.unsharded_accumulated_grad is None:
            parameter = one.unsharded_param
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _last_layer(units: Sequence[Unit]) -> set[nn.Module]:
    """With the experts inside it."""
    layers = [number for number, unit in enumerate(units) if not (unit.expert or unit.at_the_end or unit.by_index)]
    return {unit.module for unit in units[layers[-1] :] if not unit.at_the_end} if layers else set()


def _passes(root: nn.Module, units: Sequence[Unit]) -> tuple[list[Any], list[Any]]:
    """What each pass gathers, in order. The backward pass reverses layers only: it reaches a layer before the experts
    inside it."""
    layers: list[list[Any]] = []
    for unit in units:
        if unit.expert:
            layers[-1].append(unit.module)
        else:
            layers.append([unit.module])
    forward = [root, *(module for layer in layers for module in layer)]
    needless = {unit.module for unit in units if unit.by_index}
    return forward, [root, *(module for layer in reversed(layers) for module in layer if module not in needless)]


def _prefetch(forward: Sequence[Any], backward: Sequence[Any], units: Sequence[Unit], depth: int) -> None:
    """Every unit starts the all-gathers of the next ``depth`` units."""
    if depth == 0:
        return
    inside = {unit.module for unit in units if unit.expert}
    for place, module in enumerate(forward):
        following = forward[place + 1 : place + 1 + depth]
        module.set_modules_to_forward_prefetch(following)
        if module in inside:
            module.register_forward_pre_hook(_ahead_in_forward_only(following), prepend=True)
    for place, module in enumerate(backward[:-1]):
        module.set_modules_to_backward_prefetch(backward[place + 1 : place + 1 + depth])


def _ahead_in_forward_only(following: Sequence[Any]) -> Callable[[Any, Any], None]:
    """A recomputed layer calls its experts in the backward pass, which has already freed what follows."""

    def choose(module: Any, _: Any) -> None:
        in_backward = torch_private.current_graph_task_id() >= 0
        module.set_modules_to_forward_prefetch([] if in_backward else list(following))

    return choose


def _loss_through_head(root: nn.Module, units: Sequence[Unit]) -> None:
    """A loss that reads the head's weight instead of calling the head: FSDP's hooks must run all the same."""
    head, loss = getattr(root, "head", None), getattr(root, "loss_function", None)
    if loss is None or all(unit.module is not head for unit in units):
        return
    assert head is not None

    def summed_loss(hidden: Tensor, labels: Tensor, shares: Tensor | None) -> Tensor:
        total: Tensor = loss(hidden, head.weight, head.bias, labels, shares)
        return total

    head.summed_loss = summed_loss
    register_fsdp_forward_method(head, "summed_loss")
    root.loss_function = lambda hidden, weight, bias, labels, shares: head.summed_loss(hidden, labels, shares)  # type: ignore[assignment]
