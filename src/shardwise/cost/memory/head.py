"""Sizes at the head: its weights, the logits, and what the loss keeps of them."""

from __future__ import annotations

from shardwise.cost.compute.operators import trains_head
from shardwise.layout.pieces import loss_in_one_piece
from shardwise.layout.sharding import divided_over
from shardwise.spec.job import Job


def loss_gradient_element(job: Job) -> float:
    """Bytes of an element of the gradient of the head's weights as our loss makes it, before it is scaled.

    A sum over pieces is fp32. A single piece has its final format at once, unless that is fp16, which may overflow.
    """
    trained = trains_head(job.model, job.training.tuning)
    whole = loss_in_one_piece(loss_tokens(job), job.model.hidden, trains_head=trained)
    whole = whole and job.training.precision != "fp16"
    return job.training.recipe.activation if whole and rounds_head_gradient(job) else 4.0


def rounds_head_gradient(job: Job) -> bool:
    """Whether the gradient of the head's weights leaves our loss in 16 bits."""
    divided = job.strategy.zero > 0 and divided_over(job.strategy) > 1
    return job.training.recipe.gradient < 4 or divided


def loss_tokens(job: Job) -> float:
    """Tokens of a microbatch that have a loss, once for every head that predicts."""
    return job.microbatch_tokens * (1 + job.model.mtp_layers)


def kept_per_logit(job: Job) -> float:
    """Bytes of every logit that the loss keeps for its backward pass."""
    element = job.training.recipe.activation
    known = {"fused": element, "compiled": element, "whole": 2 * element, "pieces": 0.0}
    return known.get(job.stack.loss, 4.0)  # of a whole one the script's logits, and their logarithm of the softmax


def logits_bytes(job: Job, per_logit: float) -> float:
    """All logits of a microbatch on one device."""
    ranks = 1 if job.stack.loss == "whole" else job.stack.head_tensor_parallel(job.strategy.tp)
    return per_logit * job.microbatch_tokens * job.model.vocab / ranks


def head_weights(job: Job) -> float:
    """Weights of the output projection on one device."""
    return job.model.vocab * job.model.hidden / job.stack.head_tensor_parallel(job.strategy.tp)


def head_gradients(job: Job) -> float:
    """Elements of their gradient; 0 where they are frozen."""
    return head_weights(job) * trains_head(job.model, job.training.tuning)
