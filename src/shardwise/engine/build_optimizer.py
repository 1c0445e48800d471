"""The optimizer of a job for a rank's parameters: which of them are updated how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from shardwise.engine.offload.store import Store
from shardwise.engine.optimizer import NOWHERE, STATES, LocalOptimizer
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Offload
from shardwise.spec.training import Training


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    training: Training,
    *,
    masters: Mapping[nn.Parameter, Tensor] | None = None,
    store: Store | None = None,
    offload: Offload = NOWHERE,
) -> LocalOptimizer:
    """The optimizer of a job for the parameters of this rank, by their names in the whole model.

    ``masters`` are the fp32 values of parameters that are computed with in 16 bits (`DataParallel.masters`). What
    ``offload`` says of all states, weights and gradients is kept in the ``store``.
    """
    settings = training.optimization
    if training.optimizer not in STATES:
        raise SpecError("training.optimizer", f"this engine has no {training.optimizer}", "optimizer: adamw")
    groups: dict[tuple[str, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            kind = kind_for(name, parameter, training.optimizer)
            groups.setdefault((kind, decays(name, parameter)), []).append((name, parameter))
    return LocalOptimizer(
        [
            {"params": members, "kind": kind, "weight_decay": settings.decay if decayed else 0.0}
            for (kind, decayed), members in groups.items()
        ],
        settings,
        dict(masters or {}),
        store,
        offload,
    )


def kind_for(name: str, parameter: nn.Parameter, optimizer: str) -> str:
    """The optimizer that updates a parameter, by its name in the whole model."""
    return "adamw" if optimizer == "muon" and not is_hidden_matrix(name, parameter) else optimizer


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to norms, biases and other vectors."""
    return parameter.dim() > 1 and not name.endswith((".bias", "_bias", "norm.weight"))


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Muon is for the matrices inside the layers; embedding, head and vectors take AdamW."""
    return parameter.dim() > 1 and "layers." in name and not name.endswith((".bias", "_bias"))
