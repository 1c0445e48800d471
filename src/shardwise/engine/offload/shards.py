"""Shards of parameters and of their gradients kept outside of the device's memory, unit by unit.

While one unit is gathered, the shards of the next are fetched, so that the device holds one unit's shards at a time, as
in ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857). PyTorch's own `CPUOffloadPolicy` copies only when it
gathers, offloads whole units only, and cannot use a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine import torch_private
from shardwise.engine.offload.states import StoredStates
from shardwise.engine.offload.store import BackgroundCopy, Incoming
from shardwise.engine.offload.streamed import StreamedUpdate
from shardwise.engine.parameters import as_divided, local
from shardwise.layout.payloads import Phase, Role, sent_backward


class OffloadedWeights:
    """Weights of the units under `fully_shard`; ``forward`` and ``backward`` list them as each pass gathers them."""

    def __init__(self, forward: Sequence[nn.Module], backward: Sequence[nn.Module], stored: StoredStates) -> None:
        self.shards: dict[nn.Module, _Shards] = {}
        for module in forward:
            for group in torch_private.parameter_groups(module):
                away = [parameter for parameter in group.fsdp_params if stored.has_weights(parameter.sharded_param)]
                if away:
                    self.shards[module] = _Shards(group, away, stored)
        stored.cut_units([parameter.sharded_param for parameter in shards.away] for shards in self.shards.values())
        for is_backward, order in ((False, forward), (True, backward)):
            there = [self.shards[module] for module in order if module in self.shards]
            for shards, after in pairwise(there):
                shards.after[is_backward] = after
            if is_backward and there:
                for shards in there:
                    shards.share = min(1.0, 2 / len(there))  # so that all states come in the first half of the pass
                last = [module for module in forward if module in self.shards][-1]
                self.shards[last].in_backward = there

    def settle(self) -> None:
        """Frees what is on the device: the optimizer updates the store."""
        for shards in self.shards.values():
            shards.free()


class _Shards:
    """The shards of a unit whose weights are in the store.

    FSDP has no public hook that runs before it gathers, so two methods of its per-unit state are replaced.
    """

    def __init__(self, group: Any, away: Sequence[Any], stored: StoredStates) -> None:
        self.group, self.away, self.stored = group, away, stored
        self.after: dict[bool, _Shards] = {}
        self.in_backward: list[_Shards] = []  # set on the last unit of a forward pass: the units of the backward pass
        self.share = 1.0  # share of the next update's states to bring once a backward pass has fetched this unit
        self._is_here = True  # until the first gather, before which FSDP may still move them
        self._is_coming = False
        self._incoming: list[Incoming] = []
        self._sizes = [0] * len(away)
        self._unshard, self._wait_for_unshard = group.unshard, group.wait_for_unshard
        group.unshard, group.wait_for_unshard = self.unshard, self.wait_for_unshard

    def unshard(self, async_op: bool = False) -> None:
        is_backward = torch_private.gathers_for_backward(self.group)
        if self._will_gather(is_backward):
            self.fetch(is_backward)
            self._gather(async_op)
        else:
            self._unshard(async_op)
        after = self.after.get(is_backward)
        if after is not None and after._will_gather(is_backward):
            after.fetch(is_backward)

    def _gather(self, async_op: bool) -> None:
        if torch_private.gather_ranks(self.group) == 1:
            self._unshard(async_op)
            return
        reader = torch_private.gather_stream(self.group, async_op)
        self._wait(reader)
        self._unshard(async_op)
        self.free(reader)

    def wait_for_unshard(self) -> None:
        """A rank that is alone in its shard group copies its shards here, where others finish their all-gather."""
        copies = torch_private.is_gathering(self.group) and torch_private.gather_ranks(self.group) == 1
        if copies:
            self._wait()
        self._wait_for_unshard()
        if copies:
            self.free()
        if torch.is_grad_enabled() and not torch_private.gathers_for_backward(self.group):
            for shards in self.in_backward:
                if shards._will_gather(True):  # the first that the backward pass needs
                    shards.fetch(True)
                    break

    def fetch(self, is_backward: bool) -> None:
        if self._is_here or self._is_coming:
            return
        for parameter, size in zip(self.away, self._sizes):
            local(parameter.sharded_param).untyped_storage().resize_(size)
        parameters = [parameter.sharded_param for parameter in self.away if local(parameter.sharded_param).numel()]
        phase = Phase.BACKWARD if is_backward else Phase.FORWARD
        self._is_coming, self._incoming = True, self.stored.bring_weights(parameters, phase)
        if is_backward and self.stored.streamed is not None:
            self.stored.streamed.come_ahead(self.share)

    def free(self, reader: Any = None) -> None:
        """Frees the shards' memory on the device; ``reader`` is the GPU stream that reads them last."""
        self._wait()
        if not self._is_here:
            return
        self._is_here = False
        for place, parameter in enumerate(self.away):
            shard = local(parameter.sharded_param)
            if shard.is_cuda and reader is not None:
                shard.record_stream(reader)
            self._sizes[place] = shard.untyped_storage().nbytes()
            shard.untyped_storage().resize_(0)

    def _wait(self, reader: Any = None) -> None:
        for copy in self._incoming:
            copy.wait(reader)
        self._is_here, self._is_coming, self._incoming = self._is_here or self._is_coming, False, []

    def _will_gather(self, is_backward: bool) -> bool:
        group = self.group
        needed = group.unshard_in_backward or not is_backward
        return bool(needed and not torch_private.is_gathering(group) and not group.is_unsharded)


def await_updates(units: Sequence[nn.Module], update: StreamedUpdate) -> None:
    """Makes each unit under `fully_shard` wait for the update of the shards that it gathers."""
    update.is_awaited = True
    for group in (group for unit in units for group in torch_private.parameter_groups(unit)):
        _AwaitedShards(group, update)


class _AwaitedShards:
    """The shards of a unit, on the device, once the last update has written them."""

    def __init__(self, group: Any, update: StreamedUpdate) -> None:
        self.group, self.update = group, update
        self._unshard, self._wait_for_unshard = group.unshard, group.wait_for_unshard
        group.unshard, group.wait_for_unshard = self.unshard, self.wait_for_unshard

    def unshard(self, async_op: bool = False) -> None:
        if torch_private.gather_ranks(self.group) > 1:
            self._await(torch_private.gather_stream(self.group, async_op))
        self._unshard(async_op)

    def wait_for_unshard(self) -> None:
        if torch_private.gather_ranks(self.group) == 1:
            self._await()
        self._wait_for_unshard()

    def _await(self, reader: Any = None) -> None:
        self.update.weights_of((parameter.sharded_param for parameter in self.group.fsdp_params), reader)


class OffloadedGradients:
    """Moves gradients of the ``units`` under `fully_shard` off the device once reduced, while the next unit computes.

    The host adds each microbatch to the sum and computes its norm, so that clipping has to read only gradients that are
    on the device. Gradients of parameters in ``stay`` remain: something is added to them after they are reduced.
    """

    def __init__(self, units: Sequence[nn.Module], stored: StoredStates, stay: AbstractSet[nn.Parameter]) -> None:
        self.stored = stored
        self.leaving: list[BackgroundCopy] = []
        self._unit: Any = None
        for group in (group for unit in units for group in torch_private.parameter_groups(unit)):
            parameters = [
                parameter.sharded_param for parameter in group.fsdp_params if parameter.sharded_param.requires_grad
            ]
            away = {parameter for parameter in parameters if stored.has_gradients(parameter) and parameter not in stay}
            for parameter in parameters if away else ():
                # FSDP calls the hook once the gradient of the shard is complete.
                parameter.register_post_accumulate_grad_hook(
                    partial(self._leave, group) if parameter in away else _detach
                )

    def settle(self) -> None:
        """Waits until every gradient has left."""
        for copy in self.leaving:
            copy.wait()
        self.leaving = []

    def _leave(self, unit: Any, parameter: nn.Parameter) -> None:
        if unit is not self._unit:
            self.settle()  # one unit's at a time
            self._unit = unit
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        parameter.grad = None
        self.leaving.append(self._add(parameter, gradient))

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> BackgroundCopy:
        stored, is_first = self.stored, parameter not in self.stored.summed
        region, place = stored.gradient_place(parameter)
        moved = stored.store.lanes.moved
        moved[sent_backward(Role.GRADIENTS_TO_HOST)] += gradient.nbytes
        if stored.store.target == "nvme" and not is_first:
            moved[sent_backward(Role.GRADIENTS_FROM_DISK)] += gradient.nbytes
        norm = stored.summed.setdefault(parameter, torch.zeros(()))
        return region.add(place, gradient, norm, is_first=is_first)


def _detach(parameter: nn.Parameter) -> None:
    """Copies a gradient that stays on the device: as a view it would keep the gradients of its whole unit alive."""
    assert parameter.grad is not None
    gradient = local(parameter.grad)
    if gradient.untyped_storage().nbytes() > gradient.nbytes:
        parameter.grad = as_divided(gradient.clone(), parameter.grad)
