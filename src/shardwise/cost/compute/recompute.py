"""Which layers and operators recompute runs again."""

from __future__ import annotations

import math
from typing import Any

from shardwise.collectives.arrays import maximum, minimum
from shardwise.cost.compute.operators import Operator, ends_with_product, gradient_share
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


def layers_to_recompute(recompute: str, layers: int | None) -> float:
    """Layers of every rank that full recompute runs again; infinity for all of them."""
    if recompute != "full":
        return 0.0
    return math.inf if layers is None else layers


def recomputed_share(wanted: Any, layers: Any) -> Any:
    """Share of a rank's ``layers`` whose forward pass, communication included, runs again."""
    return minimum(1.0, wanted / maximum(1, layers))


def fully_recomputed_share(job: Job, contents: RankContents) -> float:
    wanted = layers_to_recompute(job.strategy.recompute, job.strategy.recompute_layers)
    return float(recomputed_share(wanted, contents.layers))


def run_again_share(job: Job, contents: RankContents) -> float:
    """Share of a rank's layers that run again: those that full recompute covers and that have a backward pass."""
    return fully_recomputed_share(job, contents) * gradient_share(job.model, job.training.tuning)


def layers_stay_whole(wanted: Any, layers: Any, chunks: Any) -> Any:
    """Whether every stage of a rank ends with layers that are not recomputed, whose backward passes come first."""
    return (wanted > 0) & (wanted <= layers - chunks)


def blend(share: Any, plain: Any, recomputed: Any) -> Any:
    """The mean of a figure over layers, where full recompute runs a ``share`` of them again."""
    return (1 - share) * plain + share * recomputed


def share_run_again(job: Job, operator: Operator, full_share: float) -> float:
    """Share of an operator's forward pass that recompute runs again, because it is named or with its whole layer.

    A layer without a backward pass is not run again.
    """
    return gradient_share(job.model, job.training.tuning) * _share_named(job, operator, full_share)


def _share_named(job: Job, operator: Operator, full_share: float) -> float:
    if operator.recomputed_by and operator.recomputed_by in job.recomputed_operators:
        return 1.0
    if operator.in_mixture and "experts" in job.recomputed_operators:
        return 1.0
    if "alternate-products" in job.recomputed_operators:
        return 1.0 if operator.kind == "traffic" else operator.alternate
    return 0.0 if operator.ends_layer and not _repeats_last_matmul(job) else full_share


def _repeats_last_matmul(job: Job) -> bool:
    """Whether full recompute runs a layer to its end, though the backward pass reads no result of its last matmul.

    What is saved for the backward pass of an FP8 matmul is saved when that is over (`engine/fp8/linear.py`), and a
    DoRA's lengths have a gradient that reads the result. A compiled layer leaves out what nothing reads.
    """
    if job.stack.full_recompute == "whole":
        return True
    adapters = job.training.adapters
    reads = job.training.recipe.compute == "fp8" or (adapters is not None and adapters.method == "dora")
    return job.stack.is_own and not job.training.compile and reads


def outputs_left_out(job: Job, contents: RankContents) -> tuple[int, ...]:
    """Layers of each kind whose last matmul, and its sum over ranks, full recompute does not repeat.

    Only the residual addition reads its result, and no gradient needs it. PyTorch's non-reentrant checkpoint stops at
    the last tensor that the backward pass reads (torch.utils.checkpoint.set_checkpoint_early_stop).
    """
    if job.stack.full_recompute == "whole":
        return (0,) * len(contents.kinds)
    return tuple(count * ends_with_product(job.model, kind) for kind, count in contents.kinds)


def weighted_outputs_left_out(job: Job, *, same_tokens: bool) -> bool:
    """Whether full recompute skips the sum or gather of the experts' outputs over ranks that split them.

    It does where nothing follows that the backward pass reads: where all experts are on every rank, and where
    tensor-parallel ranks hold the ``same_tokens``. It does not where the outputs are still to be sent back and
    weighted, nor where a shared expert follows.
    """
    model = job.model
    normed = model.norms_per_layer > 2 or model.norm_after
    if job.stack.full_recompute == "whole" or normed or (model.moe and model.moe.shared_ffn):
        return False
    return same_tokens or job.strategy.ep == 1
