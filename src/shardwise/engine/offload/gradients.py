"""Sums of gradients outside of the device's memory: what a unit has reduced leaves while the next one computes.

Each microbatch is added where the sum is, by the host, which takes its norm at the same time: of all gradients that are
clipped, those of the device alone are read there.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.cost.payload import Role, sent_backward
from shardwise.engine.fsdp_collectives import parameter_groups
from shardwise.engine.offload.lanes import Copy
from shardwise.engine.offload.rows import local
from shardwise.engine.offload.states import StoredStates


class TravellingGradients:
    """Of the ``units`` under `fully_shard`; parameters that ``stay`` are still added to when they are reduced."""

    def __init__(self, units: Sequence[nn.Module], stored: StoredStates, stay: AbstractSet[nn.Parameter]) -> None:
        self.stored = stored
        self.leaving: list[Copy] = []
        self._unit: Any = None
        for group in (group for unit in units for group in parameter_groups(unit)):
            parameters = [one.sharded_param for one in group.fsdp_params if one.sharded_param.requires_grad]
            away = {one for one in parameters if stored.has_gradients(one) and one not in stay}
            for one in parameters if away else ():
                # FSDP calls it, when it has made the gradient of the shard.
                one.register_post_accumulate_grad_hook(partial(self._leave, group) if one in away else _detach)

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

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> Copy:
        stored, is_first = self.stored, parameter not in self.stored.summed
        region, place = stored.gradient_place(parameter)
        moved = stored.store.lanes.moved
        moved[sent_backward(Role.GRADIENTS_TO_HOST)] += gradient.nbytes
        if stored.store.target == "nvme" and not is_first:
            moved[sent_backward(Role.GRADIENTS_FROM_DISK)] += gradient.nbytes
        norm = stored.summed.setdefault(parameter, torch.zeros(()))
        return region.add(place, gradient, norm, is_first=is_first)


def _detach(parameter: nn.Parameter) -> None:
    """What stays of a unit is no longer a part of the tensor of all its gradients, which would stay with it."""
    assert parameter.grad is not None
    gradient: Any = parameter.grad
    if gradient._local_tensor.untyped_storage().nbytes() > gradient._local_tensor.nbytes:
        gradient._local_tensor = gradient._local_tensor.clone()
