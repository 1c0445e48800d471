"""Updates of a rank's own tensors: AdamW, SGD, Muon; a few calls for all parameters, no wait for the device.

PyTorch's optimizers take the divided parameters of FSDP as DTensors, at a price per operator and parameter, and update
16-bit weights without fp32 masters. This one hands the local tensors to PyTorch's own fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.muon import muon_directions
from shardwise.engine.names import named
from shardwise.spec.errors import SpecError
from shardwise.spec.optimization import Optimization
from shardwise.spec.training import Training

CONVERTED_ELEMENTS = 2**24  # 16-bit gradients that have an fp32 copy at a time


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    training: Training,
    *,
    masters: Mapping[nn.Parameter, Tensor] | None = None,
) -> LocalOptimizer:
    """The optimizer of a job for the parameters of this rank, by their names in the whole model.

    ``masters`` are the fp32 values of parameters that are computed with in 16 bits (`DataParallel.masters`).
    """
    settings = training.optimization
    if training.optimizer == "adam8bit":
        raise SpecError("training.optimizer", "adam8bit has no 8-bit kernels in this engine", "optimizer: adamw")
    groups: dict[tuple[str, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            kind = training.optimizer
            if kind == "muon" and not is_hidden_matrix(name, parameter):
                kind = "adamw"
            groups.setdefault((kind, decays(name, parameter)), []).append((name, parameter))
    return LocalOptimizer(
        [
            {"params": members, "kind": kind, "weight_decay": settings.decay if decayed else 0.0}
            for (kind, decayed), members in groups.items()
        ],
        settings,
        dict(masters or {}),
    )


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to norms, biases and other vectors."""
    return parameter.dim() > 1 and not name.endswith((".bias", "_bias", "norm.weight"))


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Muon is for the matrices inside the layers; embedding, head and vectors take AdamW."""
    return parameter.dim() > 1 and "layers." in name and not name.endswith((".bias", "_bias"))


class LocalOptimizer(torch.optim.Optimizer):
    """Looks like any of `torch.optim`, so that schedules of the learning rate and checkpoints work.

    All states are there from the beginning: memory does not grow with the first step.
    """

    def __init__(
        self, groups: list[dict[str, Any]], settings: Optimization, masters: dict[nn.Parameter, Tensor]
    ) -> None:
        super().__init__(groups, {"lr": settings.learning_rate})
        self.settings, self.masters = settings, masters
        for group in self.param_groups:
            names = _STATES[group["kind"]]
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in names:
                    state[name] = torch.zeros_like(self._values(parameter), dtype=torch.float32)
                if parameter in masters:
                    state["master"] = masters[parameter]
            group["step"] = _step_counter(group["params"])

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, bad: Tensor | None = None, divisor: Tensor | None = None
    ) -> None:
        """One update from the gradients divided by ``divisor``; none where ``bad`` is 1 (both are scalars)."""
        assert closure is None, "gradients are there already: nothing is evaluated again"
        with named("optimizer"):
            for group in self.param_groups:
                group["step"] += 1 if bad is None else 1 - bad
                # A rank that holds no row of a small parameter still takes part in what Muon gathers.
                muon = group["kind"] == "muon"
                members = [one for one in group["params"] if one.grad is not None and (muon or local(one).numel())]
                for some in _in_portions(members):
                    gradients = [local(one.grad).float() for one in some if one.grad is not None]
                    _UPDATES[group["kind"]](self, group, some, gradients, bad, divisor)
            self._publish()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the tensors that are there: PyTorch's own would turn the states of 16-bit parameters into 16 bits."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group["lr"] = saved["lr"]
            group["step"].copy_(saved["step"])
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(number, {}).items():
                    local(self.state[parameter][name]).copy_(local(value))
        self._publish()

    def values(self, parameter: nn.Parameter) -> Tensor:
        """The local fp32 values of a parameter: what is trained, checkpointed and compared."""
        return local(self._values(parameter))

    def states(self, parameters: Iterable[nn.Parameter], name: str) -> list[Tensor]:
        return [local(self.state[one][name]) for one in parameters]

    def _values(self, parameter: nn.Parameter) -> Tensor:
        return self.masters.get(parameter, parameter)

    def _publish(self) -> None:
        """The weights that are computed with follow their masters."""
        if self.masters:
            torch._foreach_copy_(list(self.masters), list(self.masters.values()))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that data parallelism may have divided."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _step_counter(parameters: list[nn.Parameter]) -> Tensor:
    """On the device, where a fused kernel reads it and a step that is left out leaves it."""
    return torch.zeros((), dtype=torch.float32, device=parameters[0].device)


def _in_portions(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """All at once where the gradients are fp32; else as many as may have fp32 copies of them."""
    portion: list[nn.Parameter] = []
    converted = 0
    for one in parameters:
        elements = 0 if one.grad is None or one.grad.dtype == torch.float32 else local(one).numel()
        if portion and converted + elements > CONVERTED_ELEMENTS:
            yield portion
            portion, converted = [], 0
        portion.append(one)
        converted += elements
    if portion:
        yield portion


def _adamw(
    optimizer: LocalOptimizer,
    group: dict[str, Any],
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    bad: Tensor | None,
    divisor: Tensor | None,
) -> None:
    settings = optimizer.settings
    torch._fused_adamw_(  # the kernel of torch.optim.AdamW(fused=True), without its bookkeeping for each parameter
        [optimizer.values(one) for one in parameters],
        gradients,
        optimizer.states(parameters, "exp_avg"),
        optimizer.states(parameters, "exp_avg_sq"),
        [],
        [group["step"]] * len(parameters),
        lr=group["lr"],
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=group["weight_decay"],
        eps=settings.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=bad,
    )


def _sgd(
    optimizer: LocalOptimizer,
    group: dict[str, Any],
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    bad: Tensor | None,
    divisor: Tensor | None,
) -> None:
    momentum = group["kind"] == "sgd-momentum"
    torch._fused_sgd_(
        [optimizer.values(one) for one in parameters],
        gradients,
        optimizer.states(parameters, "momentum_buffer") if momentum else [],
        weight_decay=group["weight_decay"],
        momentum=optimizer.settings.momentum if momentum else 0.0,
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,  # the buffers are zero, which comes to the same
        grad_scale=divisor,
        found_inf=bad,
    )


def _muon(
    optimizer: LocalOptimizer,
    group: dict[str, Any],
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    bad: Tensor | None,
    divisor: Tensor | None,
) -> None:
    if divisor is not None:
        gradients = list(torch._foreach_div(gradients, divisor))
    rate: float | Tensor = group["lr"]
    if bad is not None:  # no kernel of its own that could leave a step out: nothing is added to anything
        rate = group["lr"] * (1 - bad)
        for gradient in gradients:
            gradient.masked_fill_(bad.bool(), 0.0)
    values = [optimizer.values(one) for one in parameters]
    directions = muon_directions(
        parameters, gradients, optimizer.states(parameters, "momentum_buffer"), optimizer.settings.momentum, bad
    )
    torch._foreach_mul_(values, 1 - rate * group["weight_decay"])
    torch._foreach_mul_(directions, -rate)
    torch._foreach_add_(values, directions)


_STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "sgd-momentum": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}
_UPDATES = {"adamw": _adamw, "sgd": _sgd, "sgd-momentum": _sgd, "muon": _muon}
