"""The plain decoder as a function of its weights, of which a job trains some: what every layout is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.parameters import plain_name
from shardwise.engine.tuning import trains
from shardwise.models.adapters import MODULES, add_adapters, is_of_adapter
from shardwise.models.decoder import Decoder, is_stack_of_experts
from shardwise.models.dropout import dropped, keys_in_layer, mixed, salt_of
from shardwise.models.loss import IGNORED
from shardwise.models.moe import MoELayer
from shardwise.models.stored import StoredWeight, fill_stored
from shardwise.models.weight_formats import Region
from shardwise.spec.fine_tuning import Preference
from shardwise.spec.job import Job


class PlainModel:
    """The plain decoder as a function of ``weights``, of which the job trains some.

    With adapters it computes with the sums W + s·B·A themselves, of which the engine never makes one, and beside what
    dropout leaves of their inputs.
    """

    def __init__(self, job: Job, value_of: Callable[[str, tuple[int, ...]], Tensor]) -> None:
        self.decoder, tuning = Decoder(job.model), job.training.tuning
        self.adapters, self.adapted = tuning.adapters, set[str]()
        self.preference = (job.training.preference or Preference()) if job.training.task == "dpo" else None
        named = dict(self.decoder.named_parameters())
        if tuning.adapters is not None:
            with torch.device("meta"):
                other = Decoder(job.model)
            add_adapters(other, tuning.adapters)
            named = dict(other.named_parameters())
        self.weights = {}
        for name, parameter in named.items():
            value = value_of(name, tuple(parameter.shape))
            trained = trains(tuning, name, job.model)
            if not trained and _is_linear_of_layer(name) and tuning.base.name != "computed":
                value = _as_stored(value, tuning.base.name)
            self.weights[name] = value.requires_grad_(trained)
            if is_of_adapter(name):
                self.adapted.add(name.rpartition(".")[0])
        if self.adapters is not None and self.adapters.dropout:
            for adapter in self.adapted:
                linear = self.decoder.get_submodule(adapter.removesuffix(".adapter"))
                linear.register_forward_hook(partial(self._beside_dropped, adapter))
        for mixture in mixtures_of(self.decoder):
            mixture[1].router.gate.requires_grad_(trains(tuning, f"{mixture[0]}.router.gate.weight", job.model))

    def __call__(self, batch: Batch) -> Tensor:
        """The summed loss."""
        self.token_keys = batch.token_keys
        weights = {name: weight for name, weight in self.weights.items() if not is_of_adapter(name)}
        for adapter in self.adapted:
            name = adapter.removesuffix(".adapter") + ".weight" if adapter.endswith(".adapter") else adapter[:-8]
            weights[name] = self._summed(weights[name], adapter)
        named = {"positions": batch.positions, "documents": batch.documents}
        if self.preference is not None:
            plain = {name: self.weights[name] for name in weights}
            self.token_keys = None
            with torch.no_grad():
                before = self._of_documents(plain, batch, named)
            self.token_keys = batch.token_keys
            return self._preferences(self._of_documents(weights, batch, named), before)
        loss: Tensor = torch.func.functional_call(self.decoder, weights, (batch.tokens, batch.labels), named)
        return loss

    def _of_documents(self, weights: dict[str, Tensor], batch: Batch, named: dict[str, Any]) -> list[list[Tensor]]:
        """The log-probability of every answer, document by document."""
        logits = torch.func.functional_call(self.decoder, weights, (batch.tokens,), named)
        scores = logits.log_softmax(-1).gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
        assert batch.documents is not None
        rows = zip(scores, batch.labels, batch.documents)
        return [
            [row[(documents == number) & (labels != IGNORED)].sum() for number in range(4)]
            for row, labels, documents in rows
        ]

    def _preferences(self, policy: list[list[Tensor]], reference: list[list[Tensor]]) -> Tensor:
        """As TRL writes it (`DPOTrainer.dpo_loss`, sigmoid)."""
        assert self.preference is not None
        total = torch.zeros(())
        for row, before in zip(policy, reference):
            for chosen in (0, 2):
                logits = (row[chosen] - row[chosen + 1]) - (before[chosen] - before[chosen + 1])
                smoothing, beta = self.preference.label_smoothing, self.preference.beta
                total = total - F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing
        return total

    def _summed(self, weight: Tensor, adapter: str) -> Tensor:
        assert self.adapters is not None
        if self.adapters.dropout:
            return weight
        a, b = self.weights[f"{adapter}.a"], self.weights[f"{adapter}.b"]
        summed = weight + self.adapters.factor * (a @ b if is_stack_of_experts(f"{adapter}.a") else b @ a)
        if self.adapters.method == "lora":
            return summed
        lengths = summed.detach().norm(dim=1, keepdim=True)
        brought: Tensor = summed * (self.weights[f"{adapter}.magnitude"][:, None] / lengths)
        return brought

    def _beside_dropped(self, adapter: str, linear: nn.Module, given: tuple[Tensor], outputs: Tensor) -> Tensor:
        """The outputs of a linear layer and those of its adapter, as PEFT writes it (tuners/lora/layer.py)."""
        if self.token_keys is None or self.adapters is None:
            return outputs
        _, layer, inside = adapter.removesuffix(".adapter").split(".", 2)
        keys = mixed(keys_in_layer(self.token_keys, int(layer)) ^ salt_of(inside))
        left = dropped(given[0], keys, 0, self.adapters.dropout)
        a, b = self.weights[f"{adapter}.a"], self.weights[f"{adapter}.b"]
        return outputs + self.adapters.factor * F.linear(F.linear(left, a), b)


def _is_linear_of_layer(name: str) -> bool:
    *_, inside, own = ("", *name.removesuffix(".weight").split("."))
    return inside in ("attention", "mlp", "shared", "experts") and own in MODULES


def _as_stored(weight: Tensor, form: str) -> Tensor:
    """What is left of a weight, or of each of stacked experts, in fewer bits; these store outputs by rows."""
    if weight.dim() == 3:
        return torch.stack([_as_stored(matrix.T, form).T for matrix in weight])
    whole = Region((0, weight.shape[0]), (0, weight.shape[1]))
    stored = StoredWeight(form, (weight.shape[0], weight.shape[1]), whole).to_empty(device="cpu")
    fill_stored(stored, lambda _, region: region.of(weight), lambda tensor: (tensor.detach(), 0))
    return stored.dense(torch.float32)


def mixtures_of(module: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    return ((plain_name(name), mixture) for name, mixture in module.named_modules() if isinstance(mixture, MoELayer))
