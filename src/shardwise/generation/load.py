"""Loads a model's weights, saved under any layout, on this rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.engine import cut_stages
from shardwise.engine.mesh import build_mesh
from shardwise.engine.parameters import held, materialise
from shardwise.generation.decoding import NextToken
from shardwise.generation.limits import layout_of
from shardwise.generation.request import GenerationRequest
from shardwise.models import Decoder
from shardwise.training.convert.sources import open_weights
from shardwise.training.convert.weights import DTYPES, Weights


def opened_weights(request: GenerationRequest) -> Weights:
    """The weights in a single type: the requested one, or that of the embedding."""
    weights = open_weights(Path(request.source), request.model)
    return weights.as_type(request.dtype or stored_dtype(weights))


def stored_dtype(weights: Weights) -> str:
    stored = weights.tensors["embedding.weight"].dtype
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "fp32")


@torch.no_grad()
def loaded(weights: Weights, tp: int, device: str) -> NextToken:
    """This rank's part of the model; all ``tp`` ranks of the default process group call this.

    Tensors are read one at a time, in full; only the rank's part is kept.
    """
    name = stored_dtype(weights)
    if tp == 1:
        with torch.device("meta"):
            decoder = Decoder(weights.model)
    else:
        job = layout_of(weights.model, tp, name)
        (part,) = cut_stages(job, build_mesh(job.strategy, device, job.model.key_value_heads)).values()
        assert isinstance(part, Decoder)
        decoder = part
    decoder.to(DTYPES[name]).eval().requires_grad_(False)
    materialise(decoder, torch.device(device))
    for held_parameter in held([decoder]):
        held_parameter.parameter.copy_(held_parameter.part.of(weights.tensors[held_parameter.name].read()))
    for key, buffer in decoder.named_buffers():
        if key in weights.tensors:
            buffer.copy_(weights.tensors[key].read())
        else:
            buffer.zero_()
    return NextToken(decoder) if tp == 1 else NextToken(decoder, _as_the_first)


def _as_the_first(chosen: Tensor) -> Tensor:
    """The first rank's choice; on some backends the ranks' logits differ in the last bit."""
    agreed = chosen.cpu()
    dist.broadcast(agreed, 0)
    return agreed.to(chosen.device)
