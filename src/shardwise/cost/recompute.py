"""What recompute runs again: which layers, and which operators and collectives of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

from shardwise.collectives.arrays import maximum, minimum
from shardwise.cost.operators import Operator, ends_with_product
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


class RecomputeSettings(Protocol):
    """A strategy, or what a sweep chooses of one."""

    @property
    def recompute(self) -> str: ...

    @property
    def recompute_layers(self) -> int | None: ...


def layers_to_recompute(settings: RecomputeSettings) -> float:
    """Layers of every rank that full recompute runs again; infinity for all of them."""
    if settings.recompute != "full":
        return 0.0
    return math.inf if settings.recompute_layers is None else settings.recompute_layers


def recomputed_share(wanted: Any, layers: Any) -> Any:
    """Share of a rank's ``layers`` whose forward pass, communication included, runs again."""
    return minimum(1.0, wanted / maximum(1, layers))


def fully_recomputed_share(job: Job, contents: RankContents) -> float:
    return float(recomputed_share(layers_to_recompute(job.strategy), contents.layers))


def layers_stay_whole(wanted: Any, layers: Any, chunks: Any) -> Any:
    """Whether every stage of a rank has layers behind those that full recompute brings back: they go first."""
    return (wanted > 0) & (wanted <= layers - chunks)


def blend(share: Any, plain: Any, recomputed: Any) -> Any:
    """A figure of layers of which full recompute runs a ``share`` again."""
    return (1 - share) * plain + share * recomputed


def recomputed_layer_bytes(kinds: Iterable[tuple[Any, Any]]) -> Any:
    """Tensors that recompute brings back while one layer runs its backward pass.

    ``kinds``: how many layers of a kind there are, and what is brought back in one.
    """
    most: Any = 0.0
    for count, brought_back in kinds:
        most = maximum(most, (count > 0) * brought_back)
    return most


def share_run_again(job: Job, operator: Operator, full_share: float) -> float:
    """Share of an operator's forward pass that recompute runs again: all of the layer, or only what it names."""
    if operator.recomputed_by and operator.recomputed_by in job.recomputed_operators:
        return 1.0
    if "alternate-products" in job.recomputed_operators:
        return 1.0 if operator.kind == "traffic" else operator.alternate
    return 0.0 if operator.ends_layer and job.stack.full_recompute == "as needed" else full_share


def outputs_left_out(job: Job, contents: RankContents) -> tuple[int, int]:
    """Dense and mixture-of-experts layers whose last matmul, and its sum over ranks, full recompute does not repeat.

    Only the residual addition reads its result, which no gradient needs. PyTorch's checkpoint without reentry stops
    at the last tensor that the backward pass reads (torch.utils.checkpoint.set_checkpoint_early_stop).
    """
    if job.stack.full_recompute == "whole":
        return 0, 0
    dense, moe = (ends_with_product(job.model, moe=moe) for moe in (False, True))
    return dense * contents.dense_layers, moe * contents.moe_layers


def weighted_outputs_left_out(job: Job, *, same_tokens: bool) -> bool:
    """Whether full recompute does not repeat the sum or gather of the experts' outputs over ranks that split them.

    It does where their tokens have yet to travel back and are weighted then, and where a shared expert follows, of
    which a gradient reads something. Not so where all experts are on every rank, nor where tensor-parallel ranks hold
    the ``same_tokens``: they join their outputs last.
    """
    model = job.model
    normed = model.norms_per_layer > 2 or model.norm_after
    if job.stack.full_recompute == "whole" or normed or (model.moe and model.moe.shared_ffn):
        return False
    return same_tokens or job.strategy.ep == 1
