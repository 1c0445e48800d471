"""What one layer keeps for its backward pass, tensor by tensor.

The list follows Korthikanti et al. 2022 (arXiv 2205.05198, section 4) and is generalised from the model's
own tensors: with GELU of width 4h, multi-head attention, dropout, unfused attention and 16-bit elements it
adds up to their sbh(34 + 5as/h), and to their TP, TP+SP, selective and full variants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from shardwise.cost.compute.operators import gradient_share
from shardwise.cost.memory.adapters import adapter_bytes, input_share, inputs_of_earlier_pass
from shardwise.cost.memory.head import head_gradients, head_weights, kept_per_logit, logits_bytes, loss_gradient_element
from shardwise.layout.payloads import Share
from shardwise.layout.stages import layers_of_kind
from shardwise.spec.fine_tuning import Part
from shardwise.spec.job import Job
from shardwise.spec.layers import DELTA_CHUNK, LayerRecord
from shardwise.spec.model import MatrixRole, MixtureOfExperts, Model
from shardwise.spec.parameters import layer_parameters

_E5M6_BYTES = 1.5  # DeepSeek-V3's format of what attention and the projection after it both read (arXiv 2412.19437)


class SavedRole(Enum):
    """What a saved tensor is to its layer, in words."""

    NORM_INPUTS = "norm inputs"
    NORM_OUTPUTS = "norm outputs before their weight"
    LINEAR_INPUTS = "linear inputs"
    DROPOUT_MASKS = "dropout masks"
    QUERIES = "queries"
    KEYS = "keys"
    VALUES = "values"
    QUERIES_AND_KEYS_BEFORE_THEIR_NORM = "queries and keys before their norm"
    LATENT_VECTORS = "latent vectors"
    ATTENTION_OUTPUT = "attention output"
    ATTENTION_OUTPUT_BY_HEADS = "attention output by heads"
    ATTENTION_OUTPUT_BY_SEQUENCES = "attention output by sequences"
    LOG_SUM_EXP = "log-sum-exp"
    ATTENTION_SCORES = "attention scores"
    OUTPUT_GATE = "gate of the output"
    CONVOLUTION_INPUTS = "inputs of the convolution"
    STATE_MATRICES = "matrices and rates of chunks"
    ACTIVATION_INPUTS = "activation inputs"
    ACTIVATION_OUTPUT = "activation output"
    GATE_AFTER_ITS_ACTIVATION = "gate after its activation"
    ACTIVATION_BEFORE_ITS_WEIGHT = "activation before its weight"
    ROUTER_SCORES = "router scores"
    DISPATCHED_TOKENS = "dispatched tokens"
    EXPERT_OUTPUTS = "expert outputs"
    WEIGHT_COPIES = "16-bit copies of weights"
    ADAPTERS = "inside adapters"


@dataclass(frozen=True)
class SavedTensor:
    """One tensor kept from the forward to the backward pass."""

    role: SavedRole
    bytes: float  # of one microbatch on one device
    recomputed_by: str = ""  # the operator of selective recompute that would make it again
    share: Share = Share.DENSE
    in_mixture: bool = False  # inside a mixture of experts, which selective recompute may run again as a whole

    @property
    def name(self) -> str:
        return self.share.value + self.role.value


@dataclass(frozen=True)
class _Sizes:
    """Tokens and bytes per element that every tensor of a layer is made of."""

    full_tokens: float  # tokens of the microbatch on this context-parallel rank
    region_tokens: float  # the same, divided by tp in the regions of norms under sequence parallelism
    tensor: int  # the degree of tensor parallelism
    key_tokens: float  # keys of a query in a stored score matrix: the whole sequence
    element: float  # bytes of an element of activations
    linear_input: float  # bytes of an element that a linear layer keeps of its input
    region_input: float  # the same of layers whose input sequence parallelism divides
    kept_tokens: float  # tokens of those inputs, of which a stack may keep this rank's part or all
    separate_gate: bool  # the gate of a gated MLP is a kernel of its own
    gate_input: float  # bytes of an element of the inputs of an activation function
    stream: float  # bytes of an element of the hidden states between layers
    attention_outputs: tuple[float, ...]
    """Bytes of an element of attention's output: as the projection and as attention keeps it, or once for both."""
    kept_casts: bool  # inputs are kept as they were cast for their matmul, so that no operator makes them again

    def again(self, operator: str, element: float) -> str:
        """The operator that makes a linear layer's input, of ``element`` bytes, again; "" if it is kept as cast."""
        return "" if self.kept_casts and element < self.element else operator


def _sizes(job: Job) -> _Sizes:
    recipe, strategy = job.training.recipe, job.strategy
    tokens = job.microbatch_tokens
    region = tokens / strategy.tp if strategy.sequence_parallel else tokens
    separate = job.model.gated and job.stack.gated_activation == "separate"
    element, linear_input = recipe.activation, recipe.linear_input
    if job.training.adapters:  # which read inputs that are not cast
        linear_input = element
    gate_input = element
    outputs: tuple[float, ...] = (linear_input, element)
    if job.stack.saved_activations == "8-bit" and recipe.compute == "fp8":
        gate_input, outputs = linear_input if job.model.gated else element, (_E5M6_BYTES,)
    cut = strategy.tp > 1 and strategy.sequence_parallel and job.stack.gathered_inputs == "16-bit"
    return _Sizes(
        tokens, region, strategy.tp, job.training.seq, element, linear_input, element if cut else linear_input,
        tokens if job.stack.gathered_inputs == "whole" else region, separate,
        gate_input, stream_element(job), outputs, job.stack.is_own and not job.training.compile,
    )  # fmt: skip


def layer_saved_tensors(job: Job, kind: LayerRecord) -> tuple[SavedTensor, ...]:
    """Every tensor that one layer saves when nothing is recomputed."""
    sizes, model = _sizes(job), job.model
    wide = sizes.full_tokens * model.ffn / sizes.tensor
    tuning = job.training.tuning
    tensors = [
        *_norm_and_linear_inputs(job, sizes, kind),
        *(_state_tensors(job, sizes) if kind.mixer == "delta" else _attention_tensors(job, sizes)),
    ]
    if experts := model.experts_of(kind):
        tensors += [replace(tensor, in_mixture=True) for tensor in _expert_tensors(job, sizes, experts)]
    else:
        tensors += _mlp_tensors(model, sizes, wide)
    if job.training.dropout:
        blocks = 1 if model.parallel_block else 2
        tensors.append(SavedTensor(SavedRole.DROPOUT_MASKS, blocks * model.hidden * sizes.region_tokens))
    if job.autocasts:
        tensors.append(SavedTensor(SavedRole.WEIGHT_COPIES, layer_copy_bytes(job, kind)))
    return tuple(tensors if tuning.everything else _tuned(tensors, job, sizes, kind))


_R = MatrixRole
# The matrices whose gradients read a saved tensor. What other operators read too is not in the list: attention's output
# is read by its own backward pass, the inputs of an activation by it.
_READ_BY: dict[SavedRole, tuple[MatrixRole, ...]] = {
    SavedRole.ACTIVATION_OUTPUT: (_R.DOWN,),
    SavedRole.DISPATCHED_TOKENS: (_R.GATE, _R.UP),
    SavedRole.ATTENTION_OUTPUT_BY_SEQUENCES: (_R.ATTENTION_OUTPUT,),
}
_INPUTS_OF_ATTENTION = (_R.QUERY, _R.KEY, _R.VALUE, _R.QUERY_DOWN, _R.KEY_VALUE_DOWN)


def _tuned(tensors: list[SavedTensor], job: Job, sizes: _Sizes, kind: LayerRecord) -> Iterator[SavedTensor]:
    """What a layer keeps of ``tensors`` where some of its weights are frozen, and what its adapters keep.

    The input of a matrix is kept for the gradient of its weights, or of its adapter. Where no gradient flows, nothing
    is kept. The mean over layers.
    """
    tuning, flows = job.training.tuning, gradient_share(job.model, job.training.tuning)
    share = partial(input_share, job, kind)
    for tensor in tensors:
        kept = flows
        if tensor.role is SavedRole.NORM_OUTPUTS:  # which only gradients of the norms' weights read
            kept = tuning.trained_share("norms", layers_of_kind(job.model, kind))
        elif tensor.role is SavedRole.LINEAR_INPUTS:
            experts = job.model.experts_of(kind)
            routed = experts is not None and not experts.shared_ffn
            of_mlp = share("router", ()) if routed else share("mlp", (_R.GATE, _R.UP))
            kept = (share("attention", _INPUTS_OF_ATTENTION) + of_mlp) / 2
        elif tensor.role in _READ_BY:
            in_experts = tensor.share is Share.EXPERTS or tensor.role is SavedRole.DISPATCHED_TOKENS
            attention = tensor.role is SavedRole.ATTENTION_OUTPUT_BY_SEQUENCES
            part: Part = "experts" if in_experts else ("attention" if attention else "mlp")
            kept = share(part, _READ_BY[tensor.role])
        if kept:
            yield replace(tensor, bytes=tensor.bytes * kept)
    if tuning.base.quantised and job.stack.dequantised_by == "operators":
        yield SavedTensor(SavedRole.WEIGHT_COPIES, flows * layer_copy_bytes(job, kind))
    if tuning.adapters:
        yield SavedTensor(SavedRole.ADAPTERS, adapter_bytes(job, sizes.element, kind))


def stream_element(job: Job) -> float:
    """Bytes of an element of the hidden states that layers hand on.

    Embeddings are looked up in fp32 under autocast, and sums with 16-bit outputs stay so.
    """
    wide = job.autocasts or job.stack.upcasts(job.training.recipe)
    return 4.0 if wide else job.training.recipe.activation


def layer_copy_bytes(job: Job, kind: LayerRecord) -> float:
    """The 16-bit copies that autocast makes of the weights of a layer."""
    strategy = job.strategy
    held = layer_parameters(
        job.model,
        kind,
        tensor_parallel=strategy.tp,
        expert_parallel=strategy.ep,
        expert_tensor_parallel=strategy.expert_tensor_parallel,
    )
    return 2 * (held.total - held.norms)


def _norm_and_linear_inputs(job: Job, sizes: _Sizes, kind: LayerRecord) -> list[SavedTensor]:
    model, hidden = job.model, job.model.hidden * sizes.region_tokens
    normed, inputs = model.norms_per_layer, 2
    if model.parallel_block:  # its norms read one tensor, and attention and MLP what each of them makes of it
        normed, inputs = 1, max(1, model.norms_per_layer)
    if job.autocasts and job.stack.elementwise == "eager":
        inputs = _products_of_hidden_states(model, kind)
    again = "" if model.norm_after else "norm"  # behind attention and MLP, norms make no inputs of products
    kept = normed * _norm_input(job, sizes)
    if job.autocasts and job.stack.elementwise == "compiled":
        # All but the first input are added up again, of the 16-bit outputs that they are sums of.
        kept -= max(0, normed - 1) * (sizes.stream - sizes.element)
    tensors = [
        SavedTensor(SavedRole.NORM_INPUTS, kept * hidden),
        SavedTensor(
            SavedRole.LINEAR_INPUTS,
            inputs * model.hidden * sizes.kept_tokens * sizes.region_input,
            sizes.again(again, sizes.region_input),
        ),
    ]
    if output := _norm_output(job, sizes):
        tensors.append(SavedTensor(SavedRole.NORM_OUTPUTS, normed * hidden * output, "norm"))
    return tensors


def _has_separate_norms(job: Job) -> bool:
    """Whether a norm is several kernels; LayerNorm never is, since PyTorch has a kernel for it."""
    return job.stack.norms != "fused" and job.model.norm == "rmsnorm" and job.stack.elementwise == "eager"


def _norm_input(job: Job, sizes: _Sizes) -> float:
    """Bytes of each element of a norm's saved input."""
    return 4.0 if _has_separate_norms(job) else sizes.stream


def _norm_output(job: Job, sizes: _Sizes) -> float:
    """Bytes of each element of a norm's result before its weight, where the multiplication is a kernel of its own.

    It has the format of the norm's input (transformers, LlamaRMSNorm), or fp32 where weights multiply in fp32
    (GemmaRMSNorm, Olmo2RMSNorm).
    """
    if not (_has_separate_norms(job) and job.model.norm_weight):
        return 0.0
    wide = job.stack.norms == "fp32" or job.model.numerics.norm_plus_one or job.model.norm_after
    return 4.0 if wide else sizes.stream


def _products_of_hidden_states(model: Model, kind: LayerRecord) -> int:
    """Linear layers that read the output of a norm in Hugging Face transformers: each casts its own input.

    Models with RMS norms (Llama's family) project queries, keys and values separately; older ones all three at once.
    """
    attention = 2 if model.mla or kind.mixer == "delta" else (3 if model.norm == "rmsnorm" else 1)
    wide = 2 if model.gated else 1
    if experts := model.experts_of(kind):
        return attention + 1 + (wide if experts.shared_ffn else 0)  # the router
    return attention + wide


def _attention_tensors(job: Job, sizes: _Sizes) -> list[SavedTensor]:
    model = job.model
    tokens, heads = sizes.full_tokens, model.heads / sizes.tensor
    key_heads = model.heads if model.mla or job.stack.attention_by_heads else model.key_value_heads
    joined, in_values = job.stack.joined_projections and not model.mla, 1
    if joined:  # values are a view of the joint tensor, or repeated with the keys
        in_values, key_heads = 1 if key_heads < model.heads else 3, model.heads
    kv_heads = key_heads / min(sizes.tensor, key_heads)
    again = "up-projection" if model.mla else ""
    queries_again = again if model.mla and model.mla.q_rank else ""  # of full width, they are not an up-projection's
    stacked = 3 if job.stack.stacked_queries and model.key_value_heads == model.heads else 1
    tensors = [
        SavedTensor(SavedRole.QUERIES, stacked * tokens * heads * model.query_key_dim * sizes.element, queries_again),
        SavedTensor(SavedRole.KEYS, tokens * kv_heads * model.query_key_dim * sizes.element, again),
        SavedTensor(SavedRole.VALUES, in_values * tokens * kv_heads * model.value_dim * sizes.element, again),
        SavedTensor(SavedRole.ATTENTION_OUTPUT, tokens * heads * model.value_dim * sizes.attention_outputs[0]),
        *_score_tensors(job, sizes, heads),
    ]
    exchanged = job.strategy.cp > 1 and job.strategy.context_method == "ulysses"
    if job.training.attention == "flash" and (exchanged or job.stack.attention_by_heads):
        # FlashAttention keeps its output by heads, the projection after the all-to-all the same output by tokens.
        by_heads = tokens * heads * model.value_dim * sizes.element
        tensors.append(SavedTensor(SavedRole.ATTENTION_OUTPUT_BY_HEADS, by_heads))
    if _keeps_output_by_sequences(job):
        by_sequences = tokens * heads * model.value_dim * sizes.element
        tensors.append(SavedTensor(SavedRole.ATTENTION_OUTPUT_BY_SEQUENCES, by_sequences))
    if model.attention_gate:  # the output times the sigmoid of its gate, both kept, beside the output
        gated = tokens * heads * model.value_dim * sizes.element
        tensors.append(SavedTensor(SavedRole.OUTPUT_GATE, 2 * gated))
    if model.qk_norm:
        element = sizes.element
        if _has_separate_norms(job):  # an fp32 input, and the output before its weight
            element = 8.0 if model.norm_after else 4.0 + sizes.element
        before = tokens * (heads + kv_heads) * model.query_key_dim * element
        tensors.append(SavedTensor(SavedRole.QUERIES_AND_KEYS_BEFORE_THEIR_NORM, before))
    if model.mla:
        # Inputs of the latent norms, with the key's rotary part besides, and of the up-projections.
        narrow, rotary = model.mla.narrow_features, model.mla.rope_dim
        expanded = sizes.region_tokens * (narrow - rotary)
        if sizes.tensor > 1 and job.stack.latents == "whole":  # the rotary part is in the same tensor
            expanded = sizes.full_tokens * narrow
        latent = sizes.region_tokens * narrow + expanded
        tensors.append(SavedTensor(SavedRole.LATENT_VECTORS, latent * sizes.element))
    return tensors


def _state_tensors(job: Job, sizes: _Sizes) -> list[SavedTensor]:
    """What a gated delta net keeps between its projections.

    The input of the convolution; queries and keys of every value head, values, fp32 decays and norms, rates, and the
    inverted matrix of each chunk (flash-linear-attention, ops/gated_delta_rule/chunk.py: states are made again); the
    output before its norm, its gate, and what the projection reads.
    """
    delta = job.model.delta
    assert delta
    each, heads = sizes.full_tokens / sizes.tensor, delta.value_heads
    element, values = sizes.element, each * delta.value_features
    rates = each * heads * (12 + element + DELTA_CHUNK * element)  # a decay, and a norm of the query and of the key
    queries_and_keys = each * heads * delta.key_dim * element
    return [
        SavedTensor(SavedRole.CONVOLUTION_INPUTS, each * delta.convolved_features * element),
        SavedTensor(SavedRole.QUERIES, queries_and_keys),
        SavedTensor(SavedRole.KEYS, queries_and_keys),
        SavedTensor(SavedRole.VALUES, values * element),
        SavedTensor(SavedRole.STATE_MATRICES, rates),
        SavedTensor(SavedRole.ATTENTION_OUTPUT, values * (element + sizes.attention_outputs[0])),
        SavedTensor(SavedRole.OUTPUT_GATE, values * element),
    ]


def _keeps_output_by_sequences(job: Job) -> bool:
    """Whether attention's output is saved in two layouts, sequences interleaved and one after the other.

    Megatron's tensors interleave the sequences of a microbatch, FlashAttention's do not: Transformer Engine
    (pytorch/attention/dot_product_attention/backends.py, FlashAttention) copies the output for the projection, and
    FlashAttention keeps its own. A single sequence needs no copy, nor does cuDNN's kernel, which takes both layouts.
    Tensors of nanotron interleave them too, but only its plain products keep a copy.
    """
    flash = job.training.attention == "flash" and job.stack.attention == "flash-2"
    copied = job.stack.layers == "transformer engine" or job.stack.gathered_inputs == "whole"
    return flash and copied and job.strategy.microbatch > 1


def _score_tensors(job: Job, sizes: _Sizes, heads: float) -> list[SavedTensor]:
    """What attention keeps of its scores: the matrix itself, or with FlashAttention one sum for each row."""
    if job.training.attention == "flash":
        # Dao et al. 2022 (arXiv 2205.14135): one fp32 log-sum-exp per head and query; the output is kept
        # in the element type for the backward pass, beside a narrower linear input if there is one.
        extra = 0.0
        projected, *own = sizes.attention_outputs
        if own and own != [projected]:
            extra = sizes.full_tokens * heads * job.model.value_dim * own[0]
        return [SavedTensor(SavedRole.LOG_SUM_EXP, 4 * sizes.full_tokens * heads + extra)]
    scores = heads * sizes.full_tokens * sizes.key_tokens
    # Softmax output, which plain kernels keep as they compute it, in fp32.
    kept = scores * (4.0 if job.stack.elementwise == "eager" else sizes.element)
    if job.training.dropout:
        kept += scores * 1 + scores * sizes.element  # dropout mask and dropped-out softmax
    return [SavedTensor(SavedRole.ATTENTION_SCORES, kept, "attention")]


def _mlp_tensors(model: Model, sizes: _Sizes, wide: float, share: Share = Share.DENSE) -> list[SavedTensor]:
    """What an MLP keeps around its activation function, ``wide`` elements of each tensor."""
    before, again = 2 if model.gated else 1, "" if share is Share.EXPERTS else "mlp-up"
    tensors = [
        SavedTensor(SavedRole.ACTIVATION_INPUTS, before * wide * sizes.gate_input, again, share),
        SavedTensor(
            SavedRole.ACTIVATION_OUTPUT, wide * sizes.linear_input, sizes.again("activation", sizes.linear_input), share
        ),
    ]
    if sizes.separate_gate:
        # SiLU saves its input, and the product of gate and up its two: SiLU's output is one of them.
        tensors.append(SavedTensor(SavedRole.GATE_AFTER_ITS_ACTIVATION, wide * sizes.element, "activation", share))
    return tensors


def _expert_tensors(job: Job, sizes: _Sizes, moe: MixtureOfExperts) -> list[SavedTensor]:
    """Router, dispatched tokens and expert MLPs, with balanced load or padded to the fullest."""
    model = job.model
    of_experts = replace(sizes, linear_input=job.stack.for_experts(job.training.recipe).linear_input)
    # (token, expert) pairs per device; ranks that hold the same tokens (no sequence parallelism) share them.
    routed = sizes.full_tokens / sizes.tensor * moe.top_k * job.stack.most_rows_of_experts(model)
    tensors = [
        SavedTensor(SavedRole.ROUTER_SCORES, 8 * sizes.region_tokens * moe.experts),  # fp32 logits and probabilities
        SavedTensor(
            SavedRole.DISPATCHED_TOKENS,
            routed * job.strategy.expert_tensor_parallel * model.hidden * of_experts.linear_input,
        ),
        *_mlp_tensors(model, of_experts, routed * moe.ffn, Share.EXPERTS),
    ]
    if job.stack.expert_outputs == "weighted" and not model.gated:
        # Megatron-Core multiplies by the router's weight inside the activation, but fuses both for gated ones only
        # (transformer/moe/experts.py, bias_act_func).
        role = SavedRole.ACTIVATION_BEFORE_ITS_WEIGHT
        tensors.append(SavedTensor(role, routed * moe.ffn * sizes.element, "activation", Share.EXPERTS))
    if job.stack.expert_outputs == "kept":
        tensors.append(SavedTensor(SavedRole.EXPERT_OUTPUTS, routed * model.hidden * sizes.element))
    if moe.shared_ffn:
        tensors += _mlp_tensors(model, sizes, sizes.full_tokens * moe.shared_ffn / sizes.tensor)
    return tensors


def layer_activation_bytes(job: Job, kind: LayerRecord, recompute: str | None = None) -> float:
    """Bytes one layer keeps for one microbatch on one device, under ``recompute`` (default the job's)."""
    mode = job.strategy.recompute if recompute is None else recompute
    if mode == "full":
        # Only the layer's input; under sequence parallelism it is already divided.
        sizes = _sizes(job)
        flows = gradient_share(job.model, job.training.tuning)
        return flows * job.model.hidden * sizes.region_tokens * sizes.stream
    tensors = layer_saved_tensors(job, kind)
    alternate = "alternate-products" in job.selective_operators and kind.mixer != "delta"
    if mode == "selective" and alternate and not job.model.experts_of(kind):
        return _alternate_products_bytes(job)
    if mode == "selective":
        operators = job.selective_operators
        whole = "experts" in operators
        tensors = tuple(t for t in tensors if t.recomputed_by not in operators and not (t.in_mixture and whole))
    return sum(tensor.bytes for tensor in tensors)


def _alternate_products_bytes(job: Job) -> float:
    """TorchTitan's op-level recompute: the layer's input, every second matmul's output, attention's output.

    Kept of seven products: query, value, gate (or up) and down; key, output and the second wide one run again
    (torchtitan distributed/activation_checkpoint.py). Nothing reads the output of down in the backward pass: a
    compiled layer drops it, an eager one keeps what the policy names.
    """
    sizes, model, eager = _sizes(job), job.model, job.stack.elementwise == "eager"
    heads = model.heads / sizes.tensor
    kv_heads = model.key_value_heads / min(sizes.tensor, model.key_value_heads)
    wide = model.ffn / sizes.tensor
    per_token = 2 * heads * model.value_dim + kv_heads * model.value_dim + wide
    kept = sizes.full_tokens * per_token + (2 if eager else 1) * model.hidden * sizes.region_tokens
    return kept * sizes.element + 4 * sizes.full_tokens * heads


def key_value_features(job: Job) -> float:
    """Features of keys and values together that one tensor-parallel rank holds per token."""
    model = job.model
    heads = model.heads if model.mla else model.key_value_heads
    return heads / min(job.strategy.tp, heads) * (model.query_key_dim + model.value_dim)


def embedding_activation_bytes(job: Job) -> float:
    """What the embedding keeps per microbatch: its dropout mask."""
    return job.model.hidden * _sizes(job).region_tokens if job.training.dropout else 0.0


def head_activation_bytes(job: Job) -> float:
    """What the last stage keeps per microbatch: final norm and projection inputs, fp32 softmax of the logits.

    4sbh/t·(1 + v/h) in Korthikanti et al. 2022, section 4.3; the logits dominate at a large vocabulary. A fused loss
    keeps them in 16 bit (Transformer Engine, pytorch/triton/cross_entropy.py). A loss in pieces keeps no logits, but
    makes the gradient of the head's weights in the forward pass, in fp32 if it is a sum over pieces. Every
    multi-token-prediction module has its own loss, and keeps the inputs of its two norms and of its projection.
    """
    sizes = _sizes(job)
    normed = _norm_input(job, sizes) + _norm_output(job, sizes)
    inputs = job.model.hidden * (sizes.region_tokens * normed + sizes.kept_tokens * sizes.linear_input)
    per_logit = kept_per_logit(job)
    made = loss_gradient_element(job) * head_gradients(job) if job.stack.loss == "pieces" else 0.0
    if job.autocasts:
        made += 2 * head_weights(job)  # the copy that its product has read
    made += inputs_of_earlier_pass(job)
    joined = 2 * inputs * job.model.mtp_layers
    return (inputs + logits_bytes(job, per_logit)) * (1 + job.model.mtp_layers) + joined + made
