"""The optimizer of a rank's own tensors: AdamW, SGD, Muon, in a few calls for all parameters, without host syncs.

PyTorch's optimizers take the divided parameters of FSDP as DTensors, at a price per operator and parameter, and update
16-bit weights without fp32 masters. This one hands the local tensors to PyTorch's own fused kernels; on a GPU AdamW is
one kernel of ours, which needs no fp32 copies of gradients and writes the 16-bit weights as well (`one_pass`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.labels import StepPhase
from shardwise.engine.offload.states import BYTES, StoredStates, rows_of, whole_rows
from shardwise.engine.offload.store import MASTER, Store
from shardwise.engine.optim import eight_bits
from shardwise.engine.optim.one_pass import OnePass, OnePassPart
from shardwise.engine.optim.updates import STATES, Update, muon_update
from shardwise.engine.parameters import local
from shardwise.engine.profiler_ranges import named
from shardwise.engine.torch_private import foreach_copy_
from shardwise.models import kernels
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Offload
from shardwise.spec.training import Training

NOWHERE = Offload()
FORMATS = {"adamw-bf16-moments": torch.bfloat16, "adam8bit": torch.uint8}  # of states that are not fp32
CONVERTED_ELEMENTS = 2**24  # of parameters whose gradients or values have an fp32 copy at a time


class LocalOptimizer(torch.optim.Optimizer):
    """The optimizer of a job for the parameters of this rank, given by their names in the whole model.

    It looks like any optimizer of `torch.optim`, so that learning-rate schedules and checkpoints work. All states are
    allocated at the start: memory does not grow with the first step. ``masters`` are the fp32 values of 16-bit
    parameters (`DataParallel.masters`); the mapping becomes the optimizer's own. The shares of states, weights and
    gradients that ``offload`` names are kept in the ``store``; of a parameter whose states are partly there, the device
    keeps the remaining part as a flat tensor. Without a store, the masters of bf16 parameters are reduced to their
    ``rests`` unless ``whole_masters`` is set (because others write them too). ``on_split`` is called for each, so that
    its fp32 master can be freed before other states are allocated.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        training: Training,
        *,
        masters: dict[nn.Parameter, Tensor] | None = None,
        store: Store | None = None,
        offload: Offload = NOWHERE,
        whole_masters: bool = False,
        on_split: Callable[[nn.Parameter], None] = lambda parameter: None,
    ) -> None:
        self.settings = training.optimization
        named_parameters = list(named_parameters)
        super().__init__(_groups(named_parameters, training), {"lr": self.settings.learning_rate})
        device = named_parameters[0][1].device
        self.masters = masters = {} if masters is None else masters
        self.rests: dict[nn.Parameter, Tensor] = {}  # the lower halves of masters whose upper halves are the weights
        self.learnt_steps: int | None = None  # after which AdamW's second moments stay as they are
        self._one_pass = OnePass()
        self._tails: dict[nn.Parameter, Tensor] = {}  # of partly stored parameters: the master's part on the device
        for group in self.param_groups:
            # On the device: a fused kernel reads it there, and a skipped step leaves it unchanged.
            group["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self.stored = self._room(store, offload)
        for group in self.param_groups:
            for parameter in group["params"]:
                if store is None and not whole_masters and parameter.dtype == torch.bfloat16 and parameter in masters:
                    with torch.no_grad():
                        self.rests[parameter] = torch.empty_like(parameter, dtype=torch.int16)
                        split_(self.masters.pop(parameter), local(parameter), self.rests[parameter])
                    on_split(parameter)
                self._begin(parameter, group["kind"])

    def _room(self, store: Store | None, offload: Offload) -> StoredStates:
        kinds = {group["kind"] for group in self.param_groups}
        if store is None or "muon" in kinds or not kinds.isdisjoint(FORMATS):
            if store is not None and offload.optimizer:
                problem = "only fp32 states that are updated element by element leave the device"
                raise SpecError("strategy.offload.optimizer", problem, "optimizer: adamw")
            return StoredStates((), (), store, 0)
        names = [name for kind in sorted(kinds) for name in STATES[kind]]
        rows = rows_of(self.param_groups)
        elements = round(offload.optimizer * sum(row.size for row in rows))
        weights, gradients = (whole_rows(rows, share, elements) for share in (offload.weights, offload.gradients))
        return StoredStates(rows, [*names, *([MASTER] if self.masters else [])], store, elements, weights, gradients)

    def _begin(self, parameter: nn.Parameter, kind: str) -> None:
        state = self.state[parameter]
        for name in STATES[kind]:
            if kind == "adam8bit":
                bytes_ = eight_bits.room(local(parameter).numel())
                state[name] = torch.zeros(bytes_, dtype=torch.uint8, device=local(parameter).device)
            else:
                state[name] = torch.zeros_like(parameter, dtype=FORMATS.get(kind, torch.float32))
        if parameter in self.masters or parameter in self.rests:
            state[MASTER] = self.rests[parameter] if parameter in self.rests else self.masters[parameter]
        self._push_out(parameter, 0)
        if self.stored.has_weights(parameter):
            self.stored.write(parameter, MASTER, local(parameter))

    def _push_out(self, parameter: nn.Parameter, before: int) -> None:
        """Moves into the store what belongs there now; the first ``before`` elements are there already."""
        more = self.stored.count(parameter) - before
        if more <= 0:
            return
        state = self.state[parameter]
        for name, tensor in state.items():
            flat = local(tensor).flatten()
            self.stored.write(parameter, name, flat[:more], before)
            state[name] = flat[more:].clone()
        if MASTER in state:
            self.masters.pop(parameter, None)
            self._tails[parameter] = state[MASTER]

    def _pull_in(self, parameter: nn.Parameter, after: int) -> None:
        """Moves back to the device what the store holds beyond the first ``after`` elements of a parameter."""
        if self.stored.count(parameter) <= after:
            return
        state = self.state[parameter]
        for name, tensor in state.items():
            back = self.stored.read(parameter, name, after).to(tensor.device)
            flat = torch.cat([back, tensor])
            state[name] = flat if after else flat.view(local(parameter).shape)
        if MASTER in state:
            self._tails[parameter] = state[MASTER]

    @property
    def cut(self) -> list[nn.Parameter]:
        """Parameters whose states are not, or not all, on the device."""
        return [
            parameter for group in self.param_groups for parameter in group["params"] if self.stored.count(parameter)
        ]

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        bad: Tensor | None = None,
        divisor: Tensor | None = None,
    ) -> None:
        """One update from the gradients divided by ``divisor``; none if ``bad`` is 1 (both are scalars)."""
        assert closure is None, "gradients are there already: nothing is evaluated again"
        if self.stored.elements and self.stored.streamed is None and bad is not None:
            if known_to_host(bad):
                return
            bad = None
        if self.stored.streamed is not None:
            self.stored.streamed.finish()  # with the number of its own step
        with named(StepPhase.OPTIMIZER):
            updates = []
            for group in self.param_groups:
                group["step"] += 1 if bad is None else 1 - bad
                update = Update(
                    group["kind"], self.settings, group["lr"], group["weight_decay"], group["step"], bad, divisor,
                    self.learnt_steps,
                )  # fmt: skip
                updates.append(update)
                # A rank that holds no row of a small parameter still takes part in Muon's all-gather.
                muon = group["kind"] == "muon"
                members = [
                    parameter
                    for parameter in group["params"]
                    if parameter.grad is not None and (muon or local(parameter).numel() > self.stored.count(parameter))
                ]
                if kernels.run_on(update.step.device) and update.in_one_pass:
                    self._one_pass(update, (self._part(parameter) for parameter in members))
                    continue
                for some in self._in_portions(members):
                    gradients = [
                        self._rest(parameter, local(parameter.grad)).float()
                        for parameter in some
                        if parameter.grad is not None
                    ]
                    self._update(update, some, gradients)
                self._publish(members)
            if self.stored.elements and self.stored.streamed is not None:
                self.stored.streamed.run(updates)
            elif self.stored.elements:
                with named(StepPhase.OFFLOADED_STATES):
                    self.stored.update([update.on(torch.device("cpu")) for update in updates])

    def _part(self, parameter: nn.Parameter) -> OnePassPart:
        """What the kernel reads and writes of a parameter."""
        state, whole = self.state[parameter], not self.stored.elements and not isinstance(parameter, DTensor)
        gradient, first, second = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        assert gradient is not None
        if whole:  # by far the most frequent, and a host's microseconds count
            value = state.get(MASTER, parameter)
            return OnePassPart(gradient.contiguous(), value, first, second, parameter if MASTER in state else None)
        gradient = self._rest(parameter, local(gradient)).contiguous()
        weight = self._rest(parameter, local(parameter)) if MASTER in state else None
        return OnePassPart(gradient, self._here(parameter), local(first), local(second), weight)

    def _update(self, update: Update, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        values = [self._here(parameter) for parameter in parameters]
        states = {name: self.states(parameters, name) for name in STATES[update.kind]}
        if update.kind == "muon":
            muon_update(update, parameters, values, gradients, states["momentum_buffer"])
        else:
            update(values, gradients, states)
        for parameter, value in zip(parameters, values):
            if parameter in self.rests:
                split_(value, local(parameter), self.rests[parameter])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the existing tensors: PyTorch's own would turn the states of 16-bit parameters into 16 bits."""
        assert not self.cut, "states that are elsewhere are written by `write`"
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group["lr"] = saved["lr"]
            group["step"].copy_(saved["step"])
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(number, {}).items():
                    local(self.state[parameter][name]).copy_(local(value))
            self._publish(group["params"])

    def steps_taken(self) -> int:
        """Without skipped ones; waits for the device."""
        return max((int(group["step"].item()) for group in self.param_groups), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states that may be offloaded, wherever they are now."""
        return BYTES * len(self.stored.states) * sum(row.size for row in self.stored.rows)

    @torch.no_grad()
    def offload(self, share: float) -> None:
        """Call between two steps: from now on the states of this ``share`` of all elements are in the store."""
        stored = self.stored
        elements = round(share * sum(row.size for row in stored.rows))
        before = {row.parameter: stored.count(row.parameter) for row in stored.rows}
        for row in stored.rows:
            self._pull_in(row.parameter, min(max(elements - row.begin, 0), row.size))
        stored.resize(elements)
        for parameter, count in before.items():
            self._push_out(parameter, count)

    @torch.no_grad()
    def read(self, parameter: nn.Parameter, name: str) -> Tensor:
        """The local values of a state (``master``: the fp32 values); the tensor itself where it is on the device."""
        if name == MASTER and self.stored.has_weights(parameter):
            return self.stored.read(parameter, MASTER).view(local(parameter).shape)
        if name == MASTER and parameter not in self._tails:
            return self.values(parameter)
        here, shape = local(self.state[parameter][name]), local(parameter).shape
        if here.dtype == torch.uint8:
            return eight_bits.decoded(here, local(parameter).numel(), signed=name == "exp_avg").view(shape)
        if not self.stored.count(parameter):
            return here.view(shape)
        return torch.cat([self.stored.read(parameter, name), here.cpu()]).view(shape)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, name: str, values: Tensor) -> None:
        """Writes new values of what `read` returned; the weights follow their masters."""
        stored = self.stored.count(parameter)
        if name == MASTER and self.stored.has_weights(parameter):
            self.stored.write(parameter, MASTER, values.flatten())
            if local(parameter).untyped_storage().nbytes():  # until the first step it is on the device as well
                local(parameter).copy_(values)
        elif name == MASTER and parameter in self.rests:
            split_(values.to(parameter.device, torch.float32), local(parameter), self.rests[parameter])
        elif name in self.state[parameter] and self.state[parameter][name].dtype == torch.uint8:
            here = self.state[parameter][name]
            eight_bits.encode_(values.to(here.device, torch.float32), here, signed=name == "exp_avg", step=None)
        elif stored and name in self.state[parameter]:
            flat = values.flatten()
            self.stored.write(parameter, name, flat[:stored])
            self.state[parameter][name].copy_(flat[stored:])
        else:
            self.read(parameter, name).copy_(values)
        if name == MASTER and parameter in self._tails:
            local(parameter).copy_(values)

    def values(self, parameter: nn.Parameter) -> Tensor:
        """The local fp32 values of a parameter, all of which are on the device.

        A copy where only the rest of the master is kept.
        """
        if self.stored.streamed is not None:
            self.stored.streamed.weights_of([parameter])
        if parameter in self.rests:
            return master_values(local(parameter), self.rests[parameter])
        return local(self.masters.get(parameter, parameter))

    def dtype(self, parameter: nn.Parameter, name: str) -> torch.dtype:
        """The format of what `read` returns; frozen parameters have no separate fp32 values."""
        if name != MASTER:
            kept = local(self.state[parameter][name]).dtype
            return torch.float32 if kept == torch.uint8 else kept
        narrow = parameter not in self._tails and parameter not in self.rests and parameter not in self.masters
        return parameter.dtype if narrow else torch.float32

    def states(self, parameters: Iterable[nn.Parameter], name: str) -> list[Tensor]:
        """The parts of a state that are on the device."""
        return [local(self.state[parameter][name]) for parameter in parameters]

    def _rest(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """The elements whose states are on the device."""
        stored = self.stored.count(parameter)
        return tensor.reshape(-1)[stored:] if stored else tensor

    def _here(self, parameter: nn.Parameter) -> Tensor:
        """The fp32 values whose states are on the device."""
        return self._tails[parameter] if parameter in self._tails else self._rest(parameter, self.values(parameter))

    def _in_portions(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """All at once if nothing is converted; else as many as may have fp32 copies at a time."""
        portion: list[nn.Parameter] = []
        converted = 0
        for parameter in parameters:
            wide = [] if parameter.grad is None else [parameter.grad, *self.state[parameter].values()]
            elements = 0 if all(tensor.dtype == torch.float32 for tensor in wide) else local(parameter).numel()
            if portion and converted + elements > CONVERTED_ELEMENTS:
                yield portion
                portion, converted = [], 0
            portion.append(parameter)
            converted += elements
        if portion:
            yield portion

    def _publish(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copies masters into the weights."""
        whole = {parameter: self.masters[parameter] for parameter in parameters if parameter in self.masters}
        if whole:
            foreach_copy_(list[Tensor](whole), list(whole.values()))
        for parameter in parameters:
            if parameter in self._tails:
                self._rest(parameter, parameter.detach()).copy_(self._tails[parameter])


def known_to_host(flag: Tensor) -> bool:
    """Waits for the device: the host has to know whether to update."""
    return bool(flag.item())


def _groups(named_parameters: Iterable[tuple[str, nn.Parameter]], training: Training) -> list[dict[str, Any]]:
    """The trained parameters, by the kind of their update and by whether they decay."""
    if training.optimizer not in STATES:
        raise SpecError("training.optimizer", f"this engine has no {training.optimizer}", "optimizer: adamw")
    groups: dict[tuple[str, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            kind = kind_for(name, parameter, training.optimizer)
            groups.setdefault((kind, decays(name, parameter)), []).append((name, parameter))
    if not groups:  # nothing that this rank holds is trained; torch refuses to have no group
        return [{"params": [], "kind": "adamw", "weight_decay": 0.0}]
    decay = training.optimization.decay
    return [
        {"params": members, "kind": kind, "weight_decay": decay if decayed else 0.0}
        for (kind, decayed), members in groups.items()
    ]


def kind_for(name: str, parameter: nn.Parameter, optimizer: str) -> str:
    """The optimizer that updates a parameter, by its name in the whole model."""
    if optimizer == "adam8bit" and parameter.dim() < 2:  # vectors are few, and each of their elements weighs more
        return "adamw"
    return "adamw" if optimizer == "muon" and not is_hidden_matrix(name, parameter) else optimizer


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to norms, biases and other vectors."""
    return parameter.dim() > 1 and not name.endswith((".bias", "_bias", "norm.weight"))


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Muon is for the matrices inside the layers; embedding, head, vectors and what joins embeddings take AdamW."""
    return parameter.dim() > 1 and "layers." in name and not name.endswith((".bias", "_bias", ".joined.weight"))


# -- fp32 masters of bf16 weights in two bytes: a weight is the upper half of its master -----------
# The weight is the nearest bf16 number, as PyTorch rounds. Read as integers, the bits of a master are 2^16 times those
# of its weight, plus a rest from -2^15 to 2^15. A rest of 2^15 does not fit into 16 bits and is kept as 2^15 - 1: a
# master exactly half way between two weights may change in the last of its 24 bits. Otherwise nothing is lost.


def master_values(weight: Tensor, rest: Tensor) -> Tensor:
    """The fp32 values of a bf16 ``weight`` and its int16 ``rest``."""
    bits = weight.view(torch.int16).to(torch.int32) << 16
    return bits.add_(rest).view(torch.float32)


def split_(values: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Writes fp32 ``values`` as a bf16 ``weight`` and its int16 ``rest``."""
    weight.copy_(values)
    upper = weight.view(torch.int16).to(torch.int32) << 16
    rest.copy_(values.contiguous().view(torch.int32).sub(upper).clamp_(max=2**15 - 1))
