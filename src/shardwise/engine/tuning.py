"""What of a decoder is trained: adapters are added, everything else that the job freezes loses its gradient.

Frozen weights are kept in the format of the computation: nothing updates them, so that they need no fp32 values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.parameters import divided_as, local
from shardwise.models.adapters import adapter_of, add_adapters, is_of_adapter
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
    for name, parameter in decoder.named_parameters():
        if not trains(tuning, name, job.model):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(compute)


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
                assert isinstance(linear.weight, Tensor)
                squares = torch.linalg.vector_norm(local(linear.weight), dim=1, dtype=torch.float32).square()
                lengths = (squares if adapter.over_inputs is None else adapter.over_inputs(squares)).sqrt()
                divided = isinstance(linear.weight, DTensor)  # as the lengths are
                yield adapter.magnitude, lengths if divided else divided_as(adapter.magnitude, lengths)
