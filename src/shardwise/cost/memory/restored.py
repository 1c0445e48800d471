"""What recompute restores of a layer for its backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from shardwise.collectives.arrays import maximum, select
from shardwise.cost.memory.activations import SavedRole, layer_activation_bytes, layer_saved_tensors, stream_element
from shardwise.cost.memory.adapters import input_share
from shardwise.cost.memory.transient import layer_kind_bytes, wide_gradients
from shardwise.layout.pieces import computes_mlp_in_pieces, mlp_tokens_at_once
from shardwise.layout.stages import layers_of_kind
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import MatrixRole

_R = MatrixRole


def restored_bytes(job: Job, kind: LayerRecord) -> float:
    """What recompute restores for the backward pass of a layer, beside what that allocates (`layer_moment_bytes`).

    Where the MLP is in pieces, the two together are the most of its backward pass and of that of attention.
    """
    restored = 0.0
    if job.strategy.recompute != "none":
        restored = layer_activation_bytes(job, kind, recompute="none") - layer_activation_bytes(job, kind)
    tokens, width = int(job.microbatch_tokens), job.model.ffn
    if job.model.experts_of(kind) or not computes_mlp_in_pieces(job) or mlp_tokens_at_once(tokens, width) >= tokens:
        return restored
    in_mlp = restored + layer_kind_bytes(job, kind) - _left_out_by_pieces(job, kind)
    return max(in_mlp, _backward_of_attention_bytes(job, kind)) - layer_kind_bytes(job, kind)


def left_by_router_bytes(job: Job, kind: LayerRecord) -> float:
    """What a repeated layer with experts leaves until its next forward pass, beside its input, which is freed."""
    if not (job.model.experts_of(kind) and job.stack.kept_router_losses and job.strategy.recompute == "full"):
        return 0.0
    before = sum(
        tensor.bytes
        for tensor in layer_saved_tensors(job, kind)
        if not tensor.in_mixture or tensor.role is SavedRole.ROUTER_SCORES
    )
    return before - layer_activation_bytes(job, kind)


_WIDE = (SavedRole.ACTIVATION_INPUTS, SavedRole.ACTIVATION_OUTPUT)


def _left_out_by_pieces(job: Job, kind: LayerRecord) -> float:
    """An MLP in pieces (`engine/pieces.py`) restores its input and makes all of that input's gradient, but of what is
    as wide as itself only one piece; and it sums the gradients of its weights in fp32."""
    model, element, tokens = job.model, job.training.recipe.activation, job.microbatch_tokens
    wide = sum(tensor.bytes for tensor in layer_saved_tensors(job, kind) if tensor.role in _WIDE)
    wide += element * wide_gradients(job, kind) * tokens * model.ffn
    trained = job.training.tuning.trained_share("mlp", layers_of_kind(model, kind))
    matrices = [matrix.parameters for matrix in model.mlp_matrices(model.ffn)]
    summed = trained * (4 * sum(matrices) + (element - job.training.recipe.gradient) * max(matrices))
    at_once, kept = mlp_tokens_at_once(int(tokens), model.ffn), input_share(job, kind, "mlp", (_R.GATE, _R.UP))
    input_and_gradients = element * model.hidden * ((1 - kept) * tokens + tokens + 2 * at_once)
    return (1 - at_once / tokens) * wide - input_and_gradients - summed


def _backward_of_attention_bytes(job: Job, kind: LayerRecord) -> float:
    """What a recomputed layer holds in the backward pass of its attention, when that of the MLP is over.

    FlashAttention-2 sums the gradient of the queries in fp32, and makes those of keys and values for every query head
    (csrc/flash_attn/flash_api.cpp, mha_bwd: dq_accum, dk_expanded).
    """
    model, element, tokens = job.model, job.training.recipe.activation, job.microbatch_tokens
    gone = (*_WIDE, SavedRole.NORM_INPUTS, SavedRole.NORM_OUTPUTS, SavedRole.GATE_AFTER_ITS_ACTIVATION)
    saved = {tensor: tensor.bytes for tensor in layer_saved_tensors(job, kind) if tensor.role not in gone}
    held = sum(size / 2 if tensor.role is SavedRole.LINEAR_INPUTS else size for tensor, size in saved.items())
    key_heads = model.heads if model.mla else model.key_value_heads
    features = model.heads * (model.query_key_dim + model.value_dim)  # queries, and the gradient of the output
    features += key_heads * (model.query_key_dim + model.value_dim)
    if kind.mixer == "delta" and (delta := model.delta):
        features = 2 * delta.value_heads * (delta.key_dim + delta.value_dim)
    elif job.run_device == "cuda" and job.training.attention == "flash":
        features += 2 * model.heads * model.query_key_dim  # fp32, in elements of 16 bits
        features += model.heads * (model.query_key_dim + model.value_dim) * (key_heads < model.heads)
    return held + tokens * (element * features + stream_element(job) * model.hidden)


def recomputed_layer_bytes(kinds: Iterable[tuple[Any, Any]]) -> Any:
    """Tensors that recompute restores for the backward pass of one layer.

    ``kinds``: the number of layers of each kind, and what is restored for one of them. That is below zero where a layer
    that is computed again needs less than one that is not.
    """
    most: Any = -math.inf
    for count, restored in kinds:
        most = maximum(most, select(count > 0, restored, -math.inf))
    return select(most > -math.inf, most, 0.0)
