"""Transient memory of a pass: logits, gradients in flight, communication buffers, gathered layers.

A pass has two moments, at the loss and inside a layer; they never coincide, so the larger of them counts. Where a stack
makes gradients as they come, the terms are what this project's engine holds, operator by operator; `shardwise dryrun`
traces it and compares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from shardwise.collectives.arrays import maximum, select
from shardwise.cost.compute.operators import layer_operators, trains_head
from shardwise.cost.memory.activations import (
    SavedRole,
    key_value_features,
    layer_copy_bytes,
    layer_saved_tensors,
    stream_element,
)
from shardwise.cost.memory.adapters import input_share
from shardwise.cost.memory.head import (
    head_gradients,
    head_weights,
    kept_per_logit,
    logits_bytes,
    loss_gradient_element,
    loss_tokens,
    rounds_head_gradient,
)
from shardwise.cost.step.stage_time import layer_shape
from shardwise.layout.pieces import WIDE_LOGITS, loss_tokens_at_once
from shardwise.layout.sharding import Sharding
from shardwise.layout.stages import Kinds, RankContents, layers_of_kind
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import MatrixRole
from shardwise.spec.parameters import parameter_count
from shardwise.spec.training import Recipe

_R = MatrixRole
# The two moments of a pass, at its loss and in a layer: what is in memory at one is gone at the other.
Moment = Literal["loss", "layer"]
MOMENTS: tuple[Moment, ...] = ("loss", "layer")


def transient_bytes(job: Job, kinds: tuple[LayerRecord, ...], moment: Moment, *, has_head: bool) -> tuple[float, float]:
    """Communication buffers and temporary tensors at a moment; ``kinds``: those of the rank's layers."""
    if job.stack.gradients == "kept":
        return communication_buffer_bytes(job), temporary_bytes(job, has_head=has_head and moment == "loss")
    if moment == "loss":
        return 0.0, _loss_bytes(job) if has_head else 0.0
    return communication_buffer_bytes(job), layer_moment_bytes(job, kinds)


def temporary_bytes(job: Job, *, has_head: bool) -> float:
    """Logits while the loss is computed; for stacks of which it is known, also temporary gradients."""
    logits = logits_temporary_bytes(job) + _deferred_bytes(job) if has_head else 0.0
    if job.stack.dummy_gradients:
        at_the_head = max(logits, _head_backward_bytes(job)) if has_head else 0.0
        return _dummy_gradient_bytes(job) + max(at_the_head, _activation_gradient_bytes(job))
    if job.stack.layers == "megatron":
        return logits + _score_buffer_bytes(job)
    if job.stack.gradients == "made" or job.stack.sharded_parameters == "fp32":
        return max(logits, layer_moment_bytes(job, job.model.kinds))
    if job.stack.gated_activation == "separate":
        return max(logits, _activation_gradient_bytes(job))
    return logits


def _dummy_gradient_bytes(job: Job) -> float:
    """Empty gradients that Transformer Engine hands to autograd after a fused accumulation, one of every weight shape.

    It caches them (pytorch/module/base.py, get_dummy_wgrad); router and head are not its modules.
    """
    shapes = {
        (operator.columns, operator.inner)
        for kind in job.model.kinds
        for operator in layer_operators(job.model, layer_shape(job), kind)
        if operator.kind == "product" and not operator.wide
    }
    return 2 * sum(columns * inner for columns, inner in shapes)


def _head_backward_bytes(job: Job) -> float:
    """16-bit gradients of logits, head (Megatron-Core, tensor_parallel/layers.py) and its input, less kept logits.

    What the loss keeps of the logits is their fp32 softmax, freed by then, or with a fused loss the gradient itself.
    """
    gradients = 2 * (head_gradients(job) + job.model.hidden * job.microbatch_tokens)
    return gradients + logits_bytes(job, 2 - kept_per_logit(job))


def _deferred_bytes(job: Job) -> float:
    """Gradients of logits, and inputs of the head, of microbatches whose gradient of the head is computed later."""
    of_one = logits_bytes(job, 2) + 2 * job.model.hidden * job.microbatch_tokens
    return job.stack.deferred_head_gradients * of_one


def _score_buffer_bytes(job: Job) -> float:
    """The scores of one layer, in a buffer that stays (Megatron-Core, transformer/dot_product_attention.py, "mpu")."""
    if job.training.attention != "unfused":
        return 0.0
    heads = job.model.heads / job.strategy.tp
    return heads * job.microbatch_tokens * job.training.seq * job.training.recipe.activation


def _activation_gradient_bytes(job: Job) -> float:
    """The gradient of an MLP's activation inputs beside those inputs, of the widest kind of layer."""
    return max(
        tensor.bytes
        for kind in job.model.kinds
        for tensor in layer_saved_tensors(job, kind)
        if tensor.role is SavedRole.ACTIVATION_INPUTS
    )


def communication_buffer_bytes(job: Job) -> float:
    """Buffers that tensors pass through on their way between devices."""
    return sum(communication_buffers(job).values())


def communication_buffers(job: Job) -> dict[str, float]:
    """Bytes of communication buffers, by dimension."""
    model, strategy, recipe = job.model, job.strategy, job.training.recipe
    tokens = job.microbatch_tokens
    region = tokens / strategy.tp if strategy.sequence_parallel else tokens
    hidden = model.hidden * recipe.communication
    buffers: dict[str, float] = {}
    if strategy.tp > 1 and strategy.sequence_parallel:
        buffers["tp"] = hidden * tokens  # the gathered input of the linear layer in use
    if strategy.pp > 1:
        buffers["pp"] = (
            2 * hidden * region * (job.stack.message_buffers == "one")
        )  # one activation received, one gradient
    if strategy.cp > 1:
        key_value_bytes = key_value_features(job) * tokens * recipe.communication
        buffers["cp"] = 2 * key_value_bytes * (strategy.cp if strategy.context_method == "all-gather" else 1)
    if strategy.ep > 1 and model.moe:
        buffers["ep"] = 2 * hidden * region * model.moe.top_k  # sent and received tokens
    return buffers


def message_buffer_bytes(job: Job) -> float:
    """Bytes of each microbatch's own buffers, where it has any: an activation and a gradient received, and the output.

    torch.distributed.pipelining (stage.py) keeps the outputs of all microbatches for the end of the step.
    """
    if job.strategy.pp == 1 or job.stack.message_buffers == "one":
        return 0.0
    tokens = job.microbatch_tokens / (job.strategy.tp if job.strategy.sequence_parallel else 1)
    return 3 * tokens * job.model.hidden * job.training.recipe.communication


def logits_temporary_bytes(job: Job) -> float:
    """Logits besides those kept, alive while the loss is computed."""
    if job.stack.loss == "pieces":
        return loss_moment_bytes(job)
    element = job.training.recipe.activation
    per_logit = {
        "parallel": element,  # the 16-bit logits beside their fp32 softmax
        "steps": element + 4.0,  # and the fp32 logits that a step before has written
        "copied": 4.0,  # an fp32 copy beside the softmax; the 16-bit logits are gone by then
        # Backward: the gradients after and before the logarithm of the softmax, in fp32; where ranks split them, that
        # of the chosen logits, the softmax, their sum and its product (torch/distributed/tensor/parallel/loss.py).
        "plain": 8.0 if job.stack.head_tensor_parallel(job.strategy.tp) == 1 else 12.0,
        "compiled": element,  # their gradient beside them, in 16 bit
        "whole": 2 * element,  # the gradients after and before the logarithm of the softmax, in 16 bit
        "fused": 0.0,  # their gradient is written over them
    }
    return logits_bytes(job, per_logit[job.stack.loss])


def _loss_bytes(job: Job) -> float:
    """Temporary bytes at the loss of a stack that makes gradients as they come."""
    if job.stack.loss == "pieces":
        return loss_moment_bytes(job)
    return plain_loss_bytes(job) if job.stack.loss == "plain" else _backward_of_loss_bytes(job)


def _backward_of_loss_bytes(job: Job) -> float:
    """The most of the backward passes of the loss and of the head."""
    return max(logits_temporary_bytes(job), _head_backward_bytes(job))


def plain_loss_bytes(job: Job) -> float:
    """Temporary bytes of a plain cross entropy: the most of its forward pass, its backward pass and the head's.

    Where a step replaces the gradients of the last, those are freed before the two backward passes.
    """
    backward = _backward_of_loss_bytes(job)
    if job.autocasts:
        # The gradient of the head becomes fp32 when those of the logits and the copy of the head are gone.
        rounded = 4 * head_gradients(job) + 2 * job.model.hidden * job.microbatch_tokens
        backward = max(backward, rounded - logits_bytes(job, kept_per_logit(job)))
        if job.stack.gradients == "replaced":
            backward -= job.recipe.gradient * parameter_count(job.model) / job.strategy.tp
    return max(_plain_forward_bytes(job), backward)


def _plain_forward_bytes(job: Job) -> float:
    """16-bit logits and their fp32 copy, before autocast's outermost context, around model and loss, ends.

    The fp32 output of the last norm is still there too. Keys and values that the model returns are all fp32, because
    the first are, and a cache has one format (transformers, DynamicLayer.lazy_initialization).
    """
    element, tokens = job.training.recipe.activation, job.microbatch_tokens
    logits = logits_bytes(job, 4.0 + (element if element < 4 else 0.0))
    if not job.autocasts:
        return logits
    returned = 4 * key_value_features(job) * tokens * job.model.layers if job.stack.key_value_cache else 0.0
    return logits + 4 * job.model.hidden * tokens + returned


def cached_copy_bytes(job: Job, layers: Kinds, share: float) -> float:
    """What autocast's cache adds at the loss: copies of weights of recomputed layers, a ``share`` of ``layers``.

    The cache is cleared before the backward
    pass of the loss, so copies count only as far as they raise the forward pass above it.
    """
    return max(0.0, sum(count * share * only_cached_bytes(job, kind) for kind, count in layers) - cache_slack(job))


def only_cached_bytes(job: Job, kind: LayerRecord) -> float:
    """Copies of the weights of a recomputed layer in the cache; a compiled layer makes its own and leaves none."""
    held = job.autocasts and job.stack.elementwise == "eager" and job.stack.loss == "plain"
    return layer_copy_bytes(job, kind) if held else 0.0


def cache_slack(job: Job) -> float:
    """Bytes by which the peak of the loss exceeds that of its forward pass."""
    return plain_loss_bytes(job) - _plain_forward_bytes(job) if job.autocasts else 0.0


def loss_moment_bytes(job: Job) -> float:
    """Temporary bytes of a loss in pieces: logits, which their gradients overwrite, and the gradient of the input.

    The gradient of the head's weights is counted by `head_activation_bytes`. It is scaled and rounded at the end, when
    no logits are left, unless it stays fp32. With tensor parallelism the whole input is held beside its gradient.
    Pieces include the tokens of prediction modules.
    """
    weights, element = head_weights(job), job.training.recipe.activation
    tokens = loss_tokens(job)
    rows = job.model.vocab / job.strategy.tp
    trained = trains_head(job.model, job.training.tuning)
    logits = min(tokens, loss_tokens_at_once(int(tokens), rows, job.model.hidden, trains_head=trained)) * rows
    inputs = (2 if job.strategy.tp > 1 else 1) * tokens * job.model.hidden * element
    padded = element * weights if rows % 8 and job.run_device == "cuda" else 0  # the head with rows of zeros
    rounded = (
        element * head_gradients(job) if rounds_head_gradient(job) and loss_gradient_element(job) > element else 0.0
    )
    return max(rounded, element * logits + 4 * min(logits, WIDE_LOGITS) + padded) + inputs


def layer_moment_bytes(job: Job, kinds: tuple[LayerRecord, ...]) -> float:
    """The most that the backward pass of a layer of these kinds allocates beyond what it frees."""
    return max((layer_kind_bytes(job, kind) for kind in kinds), default=0.0)


def wide_gradients(job: Job, kind: LayerRecord) -> float:
    """Tensors as wide as an MLP that its backward pass allocates beyond what it frees.

    Gated: gradients of gate, up and activated gate, and the gate once more, when the input of the last matmul and its
    gradient have been exchanged for each other. A compiled kernel makes the first two and that input at once, beside
    its gradient (measured: bench/peak_memory.py). Of a gate that is a kernel of its own the activated one is kept:
    gradients of it and of the other factor. Where the last matmul is frozen, its input was not kept, and its gradient
    takes the place of nothing; experts whose gate is a kernel of its own run one after another, so that it is small.
    """
    separate, experts = job.model.gated and job.stack.gated_activation == "separate", job.model.experts_of(kind)
    more = 2 if separate else ((3 if job.training.compile else 4) if job.model.gated else 1)
    if job.training.tuning.everything or job.training.compile or (experts and separate):
        return more
    return more + 1 - input_share(job, kind, "experts" if experts else "mlp", (_R.DOWN,))


def layer_kind_bytes(job: Job, kind: LayerRecord) -> float:
    model, strategy, element = job.model, job.strategy, job.training.recipe.activation
    tokens, tp = job.microbatch_tokens, job.strategy.tp
    region = tokens / tp if strategy.sequence_parallel else tokens
    more, moe = wide_gradients(job, kind), model.experts_of(kind)
    wide, last_product = tokens * model.ffn / tp, model.ffn * model.hidden / tp
    if moe:
        routed = tokens / tp * moe.top_k * job.stack.most_rows_of_experts(model)
        shared = more * tokens * moe.shared_ffn / tp
        wide = max(routed * moe.ffn, 2 * routed * model.hidden / more, shared / more)
        held = moe.experts / strategy.ep / strategy.expert_tensor_parallel
        last_product = moe.ffn * model.hidden * held
    gathered = 2 * tokens * model.hidden - tokens * model.ffn / tp if tp > 1 and not moe else 0.0
    made = element * max(more * wide, gathered) + stream_element(job) * region * model.hidden
    # Under autocast the 16-bit copy of that weight is gone, and its gradient fp32.
    tuning, layers = job.training.tuning, layers_of_kind(model, kind)
    trained = tuning.trained_share("experts" if moe else "mlp", layers)
    gradient = trained * (4 - 2 if job.autocasts else job.training.recipe.gradient) * last_product
    return made + gradient + dequantised_bytes(job, kind)


def dequantised_bytes(job: Job, kind: LayerRecord) -> float:
    """16-bit weights of the widest frozen matrix of a layer while it is multiplied; a group of experts has one."""
    model, strategy = job.model, job.strategy
    if not job.training.tuning.base.quantised:
        return 0.0
    held = max(
        matrix.parameters_per_rank(strategy.tp)
        for matrix in (*model.mixer_matrices(kind), *model.mlp_matrices(model.ffn))
    )
    if moe := model.experts_of(kind):
        routed = max(m.parameters_per_rank(strategy.expert_tensor_parallel) for m in model.mlp_matrices(moe.ffn))
        held = max(
            *(matrix.parameters_per_rank(strategy.tp) for matrix in model.mixer_matrices(kind)),
            routed * moe.experts / strategy.ep,
        )
    return 2 * held


class Matrices(NamedTuple):
    """What a stack gathers and reduces together that does not take whole layers."""

    of_dense: float  # the largest matrix, as a share of a layer's
    of_experts: float  # the same of all its experts, which are one tensor
    gradient: float  # bytes of an element on its way


def gathered_matrices(job: Job) -> Matrices | None:
    """None where whole layers are gathered."""
    model, stack = job.model, job.stack
    if stack.gathers == "layers":
        return None
    sizes = [matrix.parameters for matrix in (*model.attention_matrices, *model.mlp_matrices(model.ffn))]
    on_the_way = 2.0 if stack.gradient_reduce == "bf16" else 4.0
    of_experts = 1 / len(model.mlp_matrices(model.moe.ffn)) if model.moe else 0.0
    return Matrices(max(sizes) / sum(sizes), of_experts, min(job.recipe.gradient, on_the_way))


def gathered_bytes(
    contents: RankContents,
    sharding: Sharding,
    recipe: Recipe,
    moment: Moment = "layer",
    *,
    tied: bool = False,
    matrices: Matrices | None = None,
    ends: Literal["kept", "head kept", "freed"] = "kept",
) -> Any:
    """Transient memory of whole layers, or ``matrices``, under sharded data parallelism.

    ZeRO-3 gathers the layer in use and prefetches the next; ZeRO-2 and 3 hold one layer's whole gradient until
    it is reduced (FSDP2: one unit in use, one in flight). Embedding and head stay gathered between the passes: FSDP2
    does not reshard its root, which backward would gather again at once, unless a script gives `reshard_after_forward`
    (fully_shard.py, `auto_reshard_after_forward`): then nothing is gathered at the loss. XLA gathers what an operator
    reads.
    """
    if ends == "freed" and moment == "loss":
        return 0.0
    unit = divided_units(contents, sharding, recipe, tied=tied, matrices=matrices)
    if matrices:
        return gathered_at(unit, sharding, replace(recipe, gradient=matrices.gradient), moment)
    if recipe.fp32_shards:
        return gathered_at(unit, sharding, recipe, moment) + _in_transit(unit, sharding, moment)
    gradient = unit.layer * recipe.gradient if sharding.gradients_sharded else 0.0
    layer = unit.layer * recipe.gathered + unit.frozen_layer
    both_ends = unit.ends * recipe.gathered + unit.frozen_ends
    in_use = 2 * layer + both_ends
    if ends == "head kept":
        end = unit.end * recipe.gathered + unit.frozen_end
        in_use = end if moment == "loss" else layer + maximum(layer, end)
    whole = unit.layers * recipe.gathered + unit.frozen_layers + both_ends
    parameters = select(sharding.keep_parameters, whole, in_use)
    return (sharding.zero >= 2) * gradient + (sharding.zero == 3) * parameters


def divided_units(
    contents: RankContents, sharding: Sharding, recipe: Recipe, *, tied: bool, matrices: Matrices | None = None
) -> Units:
    """What is gathered and reduced together; experts that one device holds alone are already whole."""
    # Offloaded parameters come and go unit by unit, even those that are whole.
    alone = sharding.offload.weights + sharding.offload.gradients > 0
    dense, experts = (alone | (shards > 1) for shards in (sharding.shards, sharding.expert_shards))
    layers = contents.layer_matrices * dense + contents.experts * experts
    ends = contents.others * dense
    both_ends = contents.has_embedding * contents.has_head * (not tied)
    layer, end = layers / maximum(1, contents.layers), ends / select(both_ends, 2, 1)
    each = recipe.gathered if sharding.offload.weights else recipe.gathered_for_every_use
    in_use = contents.layer_matrices * dense * each + contents.experts * experts * recipe.of_experts.gathered
    in_use = in_use / maximum(1, contents.layers)
    frozen_layers = contents.frozen_matrices * dense * recipe.frozen_gathered
    frozen_layers = frozen_layers + contents.frozen_experts * experts * recipe.of_experts.frozen_gathered
    frozen_layer = frozen_layers / maximum(1, contents.layers)
    frozen_ends = contents.frozen_others * dense * recipe.gathered
    if matrices:
        largest = (
            contents.layer_matrices * dense * matrices.of_dense,
            contents.experts * experts * matrices.of_experts,
        )
        layer = maximum(*largest) / maximum(1, contents.layers)
        in_use = layer * recipe.gathered
        frozen_layer = frozen_layer * matrices.of_dense
    frozen = (frozen_layers, frozen_layer, frozen_ends, frozen_ends / select(both_ends, 2, 1))
    return Units(layers, layer, ends, end, contents.has_embedding, in_use + frozen_layer, *frozen)


class Units(NamedTuple):
    """Parameters that are gathered and reduced together."""

    layers: Any  # of all layers
    layer: Any  # of one layer, or of its largest matrix
    ends: Any  # of embedding and head
    end: Any  # of one of them
    has_embedding: Any
    layer_bytes: Any  # bytes of that where it is gathered for every use, its frozen weights included
    frozen_layers: Any  # bytes of the frozen weights of all layers
    frozen_layer: Any  # of one layer
    frozen_ends: Any  # of embedding and head
    frozen_end: Any  # of one of them


def gathered_at(unit: Units, sharding: Sharding, recipe: Recipe, moment: Moment) -> Any:
    """Whole parameters and gradients that FSDP holds.

    At the loss: the head, the last layer, already on its way, and a gradient of the pass before. In a layer: itself
    and the next, and the gradient before it, which is being reduced.
    """
    end = unit.end * recipe.gathered + unit.frozen_end
    in_use = end + unit.layer_bytes if moment == "loss" else 2 * unit.layer_bytes
    whole = (unit.layers + unit.ends) * recipe.gathered + unit.frozen_layers + unit.frozen_ends
    gathered = (sharding.zero == 3) * select(sharding.keep_parameters, whole, in_use)
    if moment == "loss":
        return gathered + left_over(unit, sharding, recipe)
    reduced = maximum(unit.layer, unit.end) * recipe.gradient if sharding.gradients_sharded else 0.0
    return gathered + (sharding.zero >= 2) * reduced


def _in_transit(unit: Units, sharding: Sharding, moment: Moment) -> Any:
    """fp32 shards of a layer on their way from the host, and in the backward pass of gradients on their way to it."""
    share = sharding.offload.weights + (sharding.offload.gradients if moment == "layer" else 0.0)
    return 4 * share * unit.layer / sharding.shards


def left_over(unit: Units, sharding: Sharding, recipe: Recipe) -> Any:
    """The last whole gradient that a backward pass reduces, which FSDP frees with the first of the next pass."""
    if not (recipe.fp32_shards and sharding.gradients_sharded):
        return 0.0
    last = select(unit.has_embedding, unit.end, unit.layer)
    return (sharding.zero >= 2) * last * recipe.gradient
