"""Adapters beside the linear layers of a decoder: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353).

A decoder gets them from outside (`add_adapters`). Names stay as they were; those of an adapter follow the name of its
linear layer: ``layers.0.attention.query.adapter.a``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.dropout import InputDropout, TokenKeys, salt_of
from shardwise.models.mlp import as_they_are
from shardwise.models.moe import GroupedExperts, grouped_product
from shardwise.models.stored import StoredWeight, stored_product, weight_of
from shardwise.spec.fine_tuning import Adapters
from shardwise.spec.model import MatrixRole

_R = MatrixRole
# Attributes of attention and MLPs.
MODULES: dict[str, MatrixRole] = {
    "query": _R.QUERY, "key": _R.KEY, "value": _R.VALUE, "output": _R.ATTENTION_OUTPUT, "query_down": _R.QUERY_DOWN,
    "query_up": _R.QUERY_UP, "key_value_down": _R.KEY_VALUE_DOWN, "key_value_up": _R.KEY_VALUE_UP, "gate": _R.GATE,
    "up": _R.UP, "down": _R.DOWN,
}  # fmt: skip
Norms = Callable[[Tensor], Tensor]


class Adapter(nn.Module):
    """Two narrow matrices, ``a`` [rank, inputs] and ``b`` [outputs, rank]; with DoRA also the length of each output's
    row of the sum."""

    def __init__(self, inputs: int, outputs: int, adapters: Adapters) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(adapters.rank, inputs))
        self.b = nn.Parameter(torch.empty(outputs, adapters.rank))
        self.magnitude = nn.Parameter(torch.empty(outputs)) if adapters.method == "dora" else None
        self.factor = adapters.factor
        self.on = True  # off: the frozen layer alone
        self.over_inputs: Norms | None = None  # sums over the ranks that the inputs are cut over
        self.dropout: InputDropout | None = None

    def narrow(self, inputs: Tensor) -> Tensor:
        """[..., inputs] to [..., rank], scaled: cheaper here than behind ``b``."""
        of_some = None if self.dropout is None else self.dropout.narrow(inputs, self.a)
        return (F.linear(inputs, self.a) if of_some is None else of_some) * self.factor

    def widened(self, products: Tensor, narrow: Tensor) -> Tensor:
        """The frozen layer's products plus those of the adapter."""
        summed = torch.addmm(products.flatten(0, -2), narrow.flatten(0, -2), self.b.T)
        return summed.view_as(products)

    def lengthened(self, products: Tensor, linear: Any) -> Tensor:
        """The rows of the sum brought to their trained lengths (DoRA, section 4).

        Their lengths count as constants in the backward pass (section 4.3).
        """
        if self.magnitude is None:
            return products
        return products * (self.magnitude / self.lengths(weight_of(linear, products.dtype))).type_as(products)

    @torch.no_grad()
    def lengths(self, weight: Tensor) -> Tensor:
        """‖W + s·B·A‖ of each row, in fp32, without making the sum: ‖W‖² + 2s·(W·Aᵀ)∘B + s²·(B·A·Aᵀ)∘B."""
        a, b = self.a.float(), self.b.float()
        own = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        crossed = (weight @ self.a.T.to(weight.dtype)).float()
        squares = own + ((2 * self.factor * crossed + self.factor**2 * (b @ (a @ a.T))) * b).sum(1)
        return (squares if self.over_inputs is None else self.over_inputs(squares)).sqrt()


class TunedLinear(nn.Linear):
    """A frozen linear layer, perhaps with an `adapter`; its weight may be ``stored`` in fewer bits instead."""

    adapter: Adapter | None
    stored: StoredWeight | None

    def __init__(self, linear: nn.Linear, adapters: Adapters | None = None) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.stored = self.adapter = None
        if adapters is not None:
            self.adapter = Adapter(linear.in_features, linear.out_features, adapters).to(linear.weight.device)

    def forward(self, inputs: Tensor) -> Tensor:
        adapter = adapter_of(self)
        if adapter is not None and adapter.magnitude is None:
            added = F.linear(adapter.narrow(inputs), adapter.b)
            outputs = self._product(inputs, added)
            return outputs if self.bias is None else outputs + self.bias
        (outputs,) = with_adapters((self._product(inputs),), inputs, (self,), as_they_are)
        return outputs

    def _product(self, inputs: Tensor, added: Tensor | None = None) -> Tensor:
        """The frozen layer's matmul, to which something is ``added``.

        That is there before: a layer that is recomputed need not multiply where nothing after it is saved.
        """
        if self.stored is not None:
            return stored_product(inputs, self.stored, added)
        if added is None:
            return F.linear(inputs, self.weight)
        return torch.addmm(added.flatten(0, -2), inputs.flatten(0, -2), self.weight.T).view_as(added)


def adapter_of(linear: nn.Module) -> Adapter | None:
    """The adapter of a linear layer, if it has one and that is on."""
    adapter: Adapter | None = getattr(linear, "adapter", None)
    return adapter if adapter is not None and adapter.on else None


Move = Callable[..., tuple[Tensor, ...]]


def with_adapters(
    products: Sequence[Tensor], hidden: Tensor, maps: Sequence[nn.Linear], move: Move
) -> tuple[Tensor, ...]:
    """The outputs of linear layers of the same ``hidden``, whose ``products`` lack what adapters and biases add.

    ``move`` carries the narrow vectors of all of them, made of the hidden states at hand, to where the layers multiply.
    """
    adapters = [adapter_of(linear) for linear in maps]
    narrow = [adapter.narrow(hidden) for adapter in adapters if adapter is not None]
    moved = iter(move(*narrow) if narrow else ())
    outputs = []
    for linear, adapter, product in zip(maps, adapters, products):
        if adapter is None:
            outputs.append(product if linear.bias is None else product + linear.bias)
        else:
            product = adapter.lengthened(adapter.widened(product, next(moved)), linear)
            outputs.append(product if linear.bias is None else product + linear.bias)
    return tuple(outputs)


class ExpertAdapter(nn.Module):
    """Stacked adapters, one for each expert: ``a`` [experts, inputs, rank] and ``b`` [experts, rank, outputs]."""

    def __init__(self, matrices: Tensor, adapters: Adapters) -> None:
        super().__init__()
        experts, inputs, outputs = matrices.shape
        self.a = nn.Parameter(matrices.new_empty(experts, inputs, adapters.rank))
        self.b = nn.Parameter(matrices.new_empty(experts, adapters.rank, outputs))
        self.factor, self.on = adapters.factor, True

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """What each expert's adapter adds to the product of its rows, which stop at its entry of ``ends``."""
        return grouped_product(grouped_product(rows, self.a, ends) * self.factor, self.b, ends)


def linears_of_layers(root: nn.Module) -> Iterator[tuple[str, nn.Module, MatrixRole, int]]:
    """The linear layers of attention and MLPs in a decoder's layers: name, module, role and layer."""
    for name, module in root.named_modules():
        words = name.split(".")
        if len(words) > 3 and words[-2] in ("attention", "mlp", "shared") and words[-1] in MODULES:
            yield name, module, MODULES[words[-1]], int(words[1])


def adapted_linears(root: nn.Module, adapters: Adapters) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of a decoder's layers that have adapters, by their names."""
    for name, module, role, layer in linears_of_layers(root):
        if isinstance(module, nn.Linear) and role in adapters.roles and adapters.adapts_layer(layer):
            yield name, module


def adapted_experts(root: nn.Module, adapters: Adapters) -> Iterator[tuple[GroupedExperts, str]]:
    """Experts with the names of their matrices that have adapters."""
    for name, experts in root.named_modules():
        if adapters.experts and isinstance(experts, GroupedExperts) and adapters.adapts_layer(int(name.split(".")[1])):
            for own in ("gate", "up", "down"):
                if MODULES[own] in adapters.roles and getattr(experts, own) is not None:
                    yield experts, own


def add_adapters(root: nn.Module, adapters: Adapters) -> None:
    """Gives a decoder, or what is left of one, its adapters, without values."""
    for name, linear in list(adapted_linears(root, adapters)):
        before, _, own = name.rpartition(".")
        tuned = TunedLinear(linear, adapters)
        setattr(root.get_submodule(before), own, tuned)
        if adapters.dropout and tuned.adapter is not None:
            _, index, inside = name.split(".", 2)
            layer: Any = root.get_submodule(f"layers.{index}")
            layer.token_keys = layer.token_keys or TokenKeys()
            tuned.adapter.dropout = InputDropout(adapters.dropout, salt_of(inside), layer.token_keys)
    for experts, own in list(adapted_experts(root, adapters)):
        setattr(experts, f"{own}_adapter", ExpertAdapter(getattr(experts, own), adapters))


def is_of_adapter(name: str) -> bool:
    """Whether a parameter, by its name, belongs to an adapter."""
    return name.rpartition(".")[0].endswith("adapter")


def initial_adapter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """As PEFT begins: ``a`` uniform within 1/√inputs (Kaiming's with slope √5), ``b`` zero.

    Lengths follow from the weights (`set_magnitudes`). Shapes of experts are those of a single one.
    """
    value = torch.zeros(shape, device=generator.device)
    if name.endswith(".a"):
        inputs = shape[0] if ".experts." in name else shape[1]
        value.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
    return value
