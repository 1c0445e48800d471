"""What a pass holds for a moment: buffers of communication and temporary tensors, as the job's stack makes them."""

from __future__ import annotations

from shardwise.cost.activations import layer_saved_tensors, logits_temporary_bytes
from shardwise.cost.operators import layer_operators
from shardwise.cost.passing import Moment, layer_moment_bytes, loss_moment_bytes
from shardwise.cost.stage_time import layer_shape
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


def passing_bytes(job: Job, kinds: tuple[bool, ...], moment: Moment, *, has_head: bool) -> tuple[float, float]:
    """Buffers of communication, and temporary tensors, at a moment; ``kinds`` of layer that the rank has."""
    if moment == "together":
        return communication_buffer_bytes(job), temporary_bytes(job, has_head=has_head)
    if moment == "loss":
        return 0.0, loss_moment_bytes(job) if has_head else 0.0
    return communication_buffer_bytes(job), layer_moment_bytes(job, kinds)


def kinds_of(contents: RankContents) -> tuple[bool, ...]:
    """Whether layers have experts: the kinds of layer that a rank has."""
    return tuple(moe for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)) if count)


def temporary_bytes(job: Job, *, has_head: bool) -> float:
    """Logits while the loss is computed; where it is known of the stack, what gradients hold on their way as well."""
    logits = logits_temporary_bytes(job) if has_head else 0.0
    if job.stack.dummy_gradients:
        at_the_head = logits + _head_gradient_bytes(job) if has_head else 0.0
        return _dummy_gradient_bytes(job) + max(at_the_head, _activation_gradient_bytes(job))
    if job.stack.gradients == "made":
        return max(logits, layer_moment_bytes(job, _kinds(job)))
    if job.stack.gated_activation == "separate":
        return max(logits, _activation_gradient_bytes(job))
    return logits


def _dummy_gradient_bytes(job: Job) -> float:
    """Empty gradients that Transformer Engine hands to autograd after a fused accumulation, one of every weight shape.

    It caches them (pytorch/module/base.py, get_dummy_wgrad); router and head are not its modules.
    """
    shapes = {
        (operator.columns, operator.inner)
        for moe in _kinds(job)
        for operator in layer_operators(job.model, layer_shape(job), moe=moe)
        if operator.kind == "product" and not operator.wide
    }
    return 2 * sum(columns * inner for columns, inner in shapes)


def _head_gradient_bytes(job: Job) -> float:
    """Gradients of the head's weights (Megatron-Core, tensor_parallel/layers.py) and of its input, in 16 bit."""
    weights = job.model.vocab * job.model.hidden / job.strategy.tp
    return 2 * (weights + job.model.hidden * job.microbatch_tokens)


def _activation_gradient_bytes(job: Job) -> float:
    """The gradient of an MLP's activation inputs beside those inputs, of the widest kind of layer."""
    return max(
        tensor.bytes
        for moe in _kinds(job)
        for tensor in layer_saved_tensors(job, moe=moe)
        if tensor.name.endswith("activation inputs")
    )


def _kinds(job: Job) -> tuple[bool, ...]:
    """Whether layers have experts: the kinds of layer that the model has."""
    model = job.model
    if not model.moe_layers:
        return (False,)
    return (True,) if model.moe_layers == model.layers else (False, True)


def communication_buffer_bytes(job: Job) -> float:
    """Buffers that tensors pass through on their way between devices."""
    model, strategy, recipe = job.model, job.strategy, job.training.recipe
    tokens = job.microbatch_tokens
    region = tokens / strategy.tp if strategy.sequence_parallel else tokens
    hidden = model.hidden * recipe.communication
    buffers = 0.0
    if strategy.tp > 1 and strategy.sequence_parallel:
        buffers += hidden * tokens  # the gathered input of the linear layer in use
    if strategy.pp > 1:
        buffers += 2 * hidden * region  # one activation received, one gradient
    if strategy.cp > 1:
        buffers += 2 * _key_value_bytes(job) * (strategy.cp if strategy.context_method == "all-gather" else 1)
    if strategy.ep > 1 and model.moe:
        buffers += 2 * hidden * region * model.moe.top_k  # sent and received tokens
    return buffers


def _key_value_bytes(job: Job) -> float:
    model, tensor = job.model, job.strategy.tp
    heads = model.heads if model.mla else model.key_value_heads
    per_token = heads / min(tensor, heads) * (model.query_key_dim + model.value_dim)
    return per_token * job.microbatch_tokens * job.training.recipe.communication
