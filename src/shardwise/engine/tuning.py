"""What of a decoder is trained: adapters are added, everything else that the job freezes loses its gradient.

Frozen weights are kept in the format of the computation: nothing updates them, so that they need no fp32 values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.parameters import divided_as, local, store
from shardwise.models.adapters import TunedLinear, adapter_of, add_adapters, is_of_adapter, linears_of_layers
from shardwise.models.moe import GroupedExperts
from shardwise.models.stored import StoredWeight
from shardwise.models.weight_formats import decode
from shardwise.spec.fine_tuning import Part, Tuning
from shardwise.spec.job import Job
from shardwise.spec.model import Model


def apply_tuning(decoder: nn.Module, job: Job, compute: torch.dtype) -> None:
    """Call first, on the undivided decoder without values, or on what is left of it."""
    tuning = job.training.tuning
    if tuning.everything:
        return
    if tuning.adapters is not None:
        add_adapters(decoder, tuning.adapters)
    if storage_of(job, compute) is not None:
        for name, linear, _, layer in list(linears_of_layers(decoder)):
            part: Part = "attention" if ".attention." in name else "mlp"
            if type(linear) is nn.Linear and not tuning.trains(part, layer):
                before, _, own = name.rpartition(".")
                setattr(decoder.get_submodule(before), own, TunedLinear(linear))
    for name, parameter in decoder.named_parameters():
        if not trains(tuning, name, job.model):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(compute)


def storage_of(job: Job, compute: torch.dtype) -> str | None:
    """The format that frozen linear layers are kept in; None if that is the format of the computation."""
    form = job.training.base_precision
    return None if form == "computed" or (form == "bf16" and compute == torch.bfloat16) else form


def store_frozen(decoder: nn.Module, job: Job, compute: torch.dtype) -> None:
    """Keeps frozen linear layers as codes; call when everything is cut, and before anything has values."""
    form = storage_of(job, compute)
    if form is None:
        return
    for _, linear, _, _ in list(linears_of_layers(decoder)):
        held: Any = linear
        if not held.weight.requires_grad:
            held.stored = store(held, "weight", form)
    for experts in [module for module in decoder.modules() if isinstance(module, GroupedExperts)]:
        if not experts.up.requires_grad:
            names = [name for name in ("gate", "up", "down") if getattr(experts, name) is not None]
            experts.stored = nn.ModuleDict({name: store(experts, name, form) for name in names})


def trains(tuning: Tuning, name: str, model: Model) -> bool:
    """Whether a parameter is trained, by its name in the whole model."""
    if model.tied_embeddings and name == "head.weight":
        name = "embedding.weight"
    return tuning.everything or is_of_adapter(name) or tuning.trains(*place_of(name))


def place_of(name: str) -> tuple[Part, int | None]:
    """The part of the model that a parameter belongs to, and its layer (None: it is in none).

    The parts are those of `spec.parameters`: norms inside attention belong to it, as the gate of shared experts does to
    the router.
    """
    first, *rest = name.split(".")
    if first != "layers":
        return {"embedding": "embedding", "position_embedding": "embedding", "norm": "norms"}.get(first, "head"), None  # type: ignore[return-value]
    layer, inside, *within = rest
    part: Part = "norms"  # also what joins a prediction module's inputs
    if inside == "attention":
        part = "attention"
    elif inside == "mlp":
        of_mixture: dict[str, Part] = {"experts": "experts", "router": "router", "shared_gate": "router"}
        part = of_mixture.get(within[0], "mlp")
    return part, int(layer)


def trains_below(job: Job, layers: Iterable[int]) -> bool:
    """Whether anything is trained in the embedding or in these layers, so that gradients have to reach them."""
    tuning = job.training.tuning
    return tuning.trains("embedding") or any(map(tuning.trains_in, layers))


@torch.no_grad()
def first_lengths(stages: Iterable[nn.Module]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The lengths that DoRA trains, each with this rank's part of its first value: that of the rows of the weights."""
    for stage in stages:
        for linear in stage.modules():
            adapter = adapter_of(linear)
            if adapter is not None and adapter.magnitude is not None:
                weight, divided = _rows_here(linear)
                squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
                lengths = (squares if adapter.over_inputs is None else adapter.over_inputs(squares)).sqrt()
                yield adapter.magnitude, lengths if divided else divided_as(adapter.magnitude, lengths)


def _rows_here(linear: Any) -> tuple[Tensor, bool]:
    """The rows of a weight that are here, and whether they are divided over ranks, as lengths are then too."""
    stored: StoredWeight | None = getattr(linear, "stored", None)
    if stored is None:
        return local(linear.weight), isinstance(linear.weight, DTensor)
    if not isinstance(stored.codes, DTensor):
        return stored.dense(torch.float32), False
    here = {name: local(tensor) for name, tensor in stored.tensors.items()}
    return decode(stored.form, {**here, **stored.codes_of_values}, torch.float32), True
