"""ZeRO-1, 2 and 3 and hybrid sharding: `fully_shard` per layer, with control over gathering, reducing and freeing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from shardwise.engine import torch_private
from shardwise.engine.collectives.communicator import GradientSums
from shardwise.engine.collectives.reductions import SCRATCH, Pending, all_gather, on_gloo
from shardwise.engine.fp8.apply import GatherScales, gather_in_fp8
from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.offload.shards import OffloadedGradients, OffloadedWeights, await_updates
from shardwise.engine.offload.states import StoredStates
from shardwise.engine.optim.precision import Precision
from shardwise.engine.parameters import local
from shardwise.engine.patterns import Unit
from shardwise.engine.profiler_ranges import sent, wait_for
from shardwise.layout.sharding import gathers_in_fp8, last_weights_stay, sharding_of


class Sharded:
    """Parameters of ``root`` divided over the ranks of the mesh; each of ``units`` is gathered and reduced by itself.

    ZeRO-1: parameters are gathered once a step, gradients stay whole and are reduced with the last microbatch.
    ZeRO-2: gradients are reduced with every microbatch, unless they accumulate locally or the shard group is a single
    rank (experts, if expert parallelism already spreads them over all copies). ZeRO-3: parameters are freed after every
    use, unless the strategy keeps them. Hybrid: the all-reduce between shard groups comes with the last microbatch,
    whatever happens inside the groups. ``prefetch`` units are gathered ahead of the one that computes.
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
        self._reduced_always: set[Any] = set()  # units whose gradients every microbatch reduces, not only the last
        self.keeps_parameters = strategy.zero < 3 or strategy.keep_parameters
        self.in_pipeline = strategy.pp > 1
        self.units: list[Any] = [*(unit.module for unit in units), root]
        self._set_to: tuple[bool, bool, bool] | None = None
        self._staying = _last_layer(units) if last_weights_stay(strategy.pp, sharding_of(strategy)) else set()
        self.masters: dict[nn.Parameter, Tensor] = {}  # the shards themselves are fp32
        for unit in sorted(units, key=lambda unit: not unit.expert):  # inner modules first
            self._shard(unit, mesh, precision)
        self._shard(Unit(root, at_the_end=True), mesh, precision, root=True)
        _loss_through_head(root, units)
        self.unfinished = Unfinished()
        self.reductions = [reduction for module in self.units for reduction in install(module, self.unfinished, sums)]
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
            # Cast only the inputs of the whole network: inside it, rotary tables and the like keep their own format.
            cast_forward_inputs=root,
        )
        again = not (self.keeps_parameters or unit.at_the_end or unit.module in self._staying)
        groups = ("expert_replicate", "expert_shard") if unit.expert else ("replicate", "shard")
        ranks = mesh.sharding(*groups)
        if sharding_of(mesh.strategy).reduced_to_shards(ranks.size(ranks.ndim - 1)):
            self._reduced_always.add(unit.module)
        # Weights that stay whole and are never updated are neither divided nor gathered.
        frozen = {parameter for parameter in unit.module.parameters() if not parameter.requires_grad}
        ignored = frozen if mesh.strategy.zero < 3 else set()
        sharded = fully_shard(
            unit.module, mesh=ranks, reshard_after_forward=again, mp_policy=policy, ignored_params=ignored
        )
        if ranks.size() > 1:  # for a single rank FSDP would really divide, by 1
            # Sums, not means: the loss was divided by the tokens of the whole batch. A factor alone would make FSDP use
            # a scaling reduction, which gloo does not have.
            sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if unit.by_index:
            sharded.set_unshard_in_backward(False)

    def offload(self, stored: StoredStates, stay: AbstractSet[nn.Parameter]) -> None:
        """Moves ``stored`` weights and gradients off the device, but not the gradients of parameters in ``stay``."""
        if stored.weights:
            self.weights = OffloadedWeights(*self.passes, stored)
            torch_private.copy_gradients_by_kernels()
        elif stored.streamed is not None and self.fp8_scales is None:  # whose scales need all updated shards at once
            await_updates(self.units, stored.streamed)
        if stored.gradients:
            self.gradients = OffloadedGradients(self.units, stored, stay)
            for reduction in self.reductions:
                if any(stored.has_gradients(parameter.sharded_param) for parameter in reduction.fsdp_parameters):
                    reduction.unfinished = None  # a gradient leaves the device only when it is complete

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
        """Frees what a backward pass would have freed, so that the next step gathers exactly what it should."""
        for unit in self.units:
            unit.reshard()
            for group in torch_private.parameter_groups(unit):
                torch_private.forget_forward_passes(group)

    def before_input_gradients(self) -> None:
        """The weights may be freed: deferred weight gradients need only inputs and output gradients."""
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
            # Sum between shard groups once a step. In a pipeline do it in every pass: a pass may bring only some of the
            # gradients (a tied embedding), and FSDP cannot add tensors of different sizes.
            unit.set_requires_all_reduce(last or self.in_pipeline, recurse=False)
            unit.set_reshard_after_backward(reshard, recurse=False)
        self.units[-1].set_is_last_backward(last)


def _complete(group: Any) -> None:
    """Fills in zeros for missing gradients: hybrid sharding accumulates all gradients of a unit in one tensor.

    After two input-gradient passes in a row, the first reduction takes the gradients of both passes' norms, and the
    second has none.
    """
    for record in group.fsdp_params:
        if record.sharded_param.requires_grad and record.unsharded_accumulated_grad is None:
            parameter = record.unsharded_param
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _last_layer(units: Sequence[Unit]) -> set[nn.Module]:
    """The modules of the last layer: itself and the experts inside it."""
    layers = [number for number, unit in enumerate(units) if not (unit.expert or unit.at_the_end or unit.by_index)]
    return {unit.module for unit in units[layers[-1] :] if not unit.at_the_end} if layers else set()


def _passes(root: nn.Module, units: Sequence[Unit]) -> tuple[list[Any], list[Any]]:
    """What the forward and the backward pass gather, in order.

    The backward pass takes the layers in reverse, but still each layer before the experts inside it.
    """
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
    """Prefetches nothing while a layer is recomputed: the backward pass has already freed what follows it."""

    def choose(module: Any, _: Any) -> None:
        in_backward = torch_private.current_graph_task_id() >= 0
        module.set_modules_to_forward_prefetch([] if in_backward else list(following))

    return choose


def _loss_through_head(root: nn.Module, units: Sequence[Unit]) -> None:
    """Runs FSDP's hooks of the head for a loss that reads the head's weight instead of calling the head."""
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


# -- The collectives of `fully_shard`, named for the profiler, and in the background on gloo ----------------
# FSDP2 overlaps by means of streams. A CPU has none, so on gloo FSDP2 would wait for every reduce-scatter. Ours starts
# in the backward pass of a layer and is finished by the end of the whole pass, with at most two in flight.


IN_FLIGHT = 2


def install(module: nn.Module, unfinished: Unfinished, sums: GradientSums) -> list[GradientReduceScatter]:
    """Gives a module under `fully_shard` our collectives."""
    reductions = []
    for group in torch_private.parameter_groups(module):
        mesh = group.mesh_info.mesh
        lent = on_gloo(mesh.get_group(mesh.ndim - 1), mesh.device_type)
        overlapped = lent and mesh.ndim == 1  # hybrid: FSDP goes on to sum between the shard groups at once
        fsdp: Any = module
        reductions.append(GradientReduceScatter(group.fsdp_params, lent, unfinished if overlapped else None, sums))
        fsdp.set_custom_reduce_scatter(reductions[-1])
        fsdp.set_custom_all_gather(ParameterAllGather(lent))
    return reductions


class ParameterAllGather:
    """All-gather of a unit's parameters; ``lent``: into scratch memory that is reused."""

    def __init__(self, lent: bool) -> None:
        self.lent = lent

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return SCRATCH.lend(size[0], dtype) if self.lent else torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        with sent("dp", Called.PARAMETERS, input_tensor):
            return all_gather(output_tensor, input_tensor, group, async_op)


class Unfinished:
    """Reductions started in the running backward pass, oldest first; they are finished when it ends.

    For gradients made outside of a backward pass the caller sets ``will_finish``, and finishes them itself.
    """

    def __init__(self) -> None:
        self.started: list[_Reduction] = []
        self.will_finish = False

    def add(self, reduction: _Reduction) -> None:
        if not self.will_finish:
            self.will_finish = True
            torch_private.at_end_of_backward(self.finish)
        self.started.append(reduction)
        while len(self.started) > IN_FLIGHT:
            self.started.pop(0).finish()

    def finish(self) -> None:
        self.will_finish = False
        self.finish_started()

    def finish_started(self) -> None:
        while self.started:
            self.started.pop(0).finish()


class GradientReduceScatter:
    """Sums the gradients of one unit; in the background where ``unfinished`` is given."""

    def __init__(
        self, fsdp_parameters: Sequence[Any], lent: bool, unfinished: Unfinished | None, sums: GradientSums
    ) -> None:
        self.fsdp_parameters, self.lent, self.unfinished, self.sums = fsdp_parameters, lent, unfinished, sums
        self.allocations = 0
        self.total: Tensor | None = None  # where FSDP accumulates: the output of the first reduction of a step

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called twice: for the input, which is freed soon, and the output, which becomes the gradients."""
        self.allocations += 1
        if self.lent and self.allocations % 2:
            return SCRATCH.lend(size[0], dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        with sent("dp", Called.GRADIENT_SHARDS, input_tensor):
            if self.unfinished is None or not self._may_wait(output_tensor, self.unfinished):
                if self.unfinished is not None:
                    self.unfinished.finish_started()  # FSDP may add to one of them now
                self.sums.reduce_scatter(output_tensor, input_tensor, group, in_fp32=True)
                self.total = None
                return
            work = self.sums.reduce_scatter(output_tensor, input_tensor, group, async_op=True)
        assert work is not None
        gradients = [parameter.sharded_param.grad for parameter in self.fsdp_parameters]
        if all(gradient is None for gradient in gradients):
            # FSDP makes the output the gradients, unread.
            self.total = output_tensor
            self.unfinished.add(_Reduction(work, input_tensor, output_tensor, None))
        elif self._accumulates_into_total(gradients, output_tensor):
            output_tensor.zero_()  # FSDP adds these zeros now; `finish` adds the sum once it has arrived
            self.unfinished.add(_Reduction(work, input_tensor, output_tensor, self.total))
        else:
            self.unfinished.finish_started()
            wait_for(work, "dp", Called.GRADIENT_SHARDS)

    def _may_wait(self, output: Tensor, unfinished: Unfinished) -> bool:
        """Whether the output may arrive later: FSDP does not convert its format, and someone will wait for it."""
        trained = (parameter for parameter in self.fsdp_parameters if parameter.sharded_param.requires_grad)
        same_format = all(parameter.orig_dtype == output.dtype for parameter in trained)
        return same_format and (unfinished.will_finish or torch_private.current_graph_task_id() != -1)

    def _accumulates_into_total(self, gradients: Sequence[Any], output: Tensor) -> bool:
        if self.total is None or self.total.numel() != output.numel():
            return False
        place = self.total.untyped_storage().data_ptr()
        trained = [
            gradient for gradient, other in zip(gradients, self.fsdp_parameters) if other.sharded_param.requires_grad
        ]
        return all(
            gradient is not None and local(gradient).untyped_storage().data_ptr() == place for gradient in trained
        )


class _Reduction:
    """A reduce-scatter in flight. ``sent`` is held on to: if it were freed, its memory would be reused."""

    def __init__(self, work: Pending, sent: Tensor, output: Tensor, total: Tensor | None) -> None:
        self.work, self.sent, self.output, self.total = work, sent, output, total

    def finish(self) -> None:
        wait_for(self.work, "dp", Called.GRADIENT_SHARDS)
        if self.total is not None:
            self.total += self.output
