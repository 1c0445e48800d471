"""Seconds of one operator on one device: FLOPs at a sustained share of peak, bytes at a share of memory bandwidth.

Matmuls sustain one share of the peak per device and data type; a part of their operands' traffic and a fixed cost per
kernel are added (measured whole steps show them; a maximum would hide them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardwise.collectives.arrays import select
from shardwise.cost.compute.operators import Operator, OperatorRole
from shardwise.spec.efficiency import EngineKernels
from shardwise.spec.hardware import Device
from shardwise.spec.stack import Stack
from shardwise.spec.training import Recipe

# Bytes that an eager stack moves, over those of a fused kernel. Norm: to fp32, square, mean, scale, back, weight are 36
# bytes per element instead of 4, beside a residual of 6. Rotary embedding: to fp32, complex product, back are 20, not
# 4. Gated activation: two kernels of 4 and 6 bytes instead of one of 6 (torchtitan/models/llama/model.py, 2024).
_EAGER_PASSES = {OperatorRole.NORMS: 4.2, OperatorRole.ROTARY: 5.0, OperatorRole.ACTIVATION: 1.7}


@dataclass(frozen=True)
class Seconds:
    """Forward pass, input gradient and weight gradient: numbers, or columns of a table."""

    forward: Any = 0.0
    input_gradient: Any = 0.0
    weight_gradient: Any = 0.0

    @property
    def passes(self) -> tuple[Any, Any, Any]:
        return self.forward, self.input_gradient, self.weight_gradient

    @property
    def backward(self) -> Any:
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> Any:
        return self.forward + self.input_gradient + self.weight_gradient

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(self.forward * factor, self.input_gradient * factor, self.weight_gradient * factor)

    def with_weights_at_once(self, share: float) -> Seconds:
        """A ``share`` of the weight gradients is computed with the input gradients, whatever the schedule says."""
        moved = self.weight_gradient * share
        return Seconds(self.forward, self.input_gradient + moved, self.weight_gradient - moved)


def operator_seconds(
    operator: Operator, device: Device, recipe: Recipe, stack: Stack, slowdown: float = 1.0
) -> Seconds:
    """Seconds of ``operator`` on ``device`` in the formats of ``recipe``, as ``stack`` runs it.

    Matmuls and attention take ``slowdown`` times as long as at full clock; what moves bytes does not.
    """
    seconds = _operator_seconds(operator, device, recipe, stack, slowdown)
    if operator.flows == operator.trained == 1:
        return seconds
    return Seconds(seconds.forward, seconds.input_gradient * operator.flows, seconds.weight_gradient * operator.trained)


def _operator_seconds(operator: Operator, device: Device, recipe: Recipe, stack: Stack, slowdown: float) -> Seconds:
    """The same if all gradients are needed."""
    if operator.kind == "traffic":
        return _traffic(operator, device, recipe, stack)
    if operator.kind == "attention":
        return _attention(operator, device, recipe, stack) * slowdown
    return _product(operator, device, recipe, stack) * slowdown + _product_casts(operator, device, recipe, stack)


def _launch(device: Device, stack: Stack) -> float:
    """Seconds to launch a kernel: none in a CUDA graph, nor where launches were measured for whole layers."""
    measured = _own(device, stack) is not None
    return 0.0 if stack.launched_by_graphs or measured else device.efficiency.operator_seconds


# Rows of an odd number of 16-bit elements start at no multiple of 4 bytes, so cuBLAS takes a kernel of Turing's class
# that reads element by element (cutlass_75_tensorop_..._align1) on every newer GPU. Measured: 95 and 115 TFLOP/s on
# H100 (float8_experimental pull request 145), 107 to 116 on RTX 4090 (pytorch issue 181718); on A100 115, from GPT-2's
# 112,046 tokens/s with a vocabulary of 50,257 and 127,345 with 50,304 (rasbt/LLMs-from-scratch, ch05/10).
_ODD_RATE = 110e12


def _product(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    efficiency = device.efficiency
    if operator.expert:
        recipe = stack.for_experts(recipe)
    data_type = recipe.wide if operator.wide else recipe.compute
    rate = device.peak_flops(data_type) * efficiency.gemm_share(data_type)
    if (own := _own(device, stack)) is not None and data_type == "fp8" and recipe.scaling in own.scaled:
        rate = device.peak_flops(data_type) * own.scaled[recipe.scaling]
    rows, columns, inner = operator.rows, operator.columns, operator.inner
    if stack.odd_sizes == "as given" and device.vendor == "nvidia" and data_type in ("bf16", "fp16"):
        rate = min(rate, _ODD_RATE) if math.ceil(columns) % 2 or math.ceil(inner) % 2 else rate
    started: Any = 0.0  # rows that take as long as the start of each matmul of a group
    if operator.expert:  # a single expert is a matmul like any other
        rate *= select(operator.matrices > 1, efficiency.expert_gemm, 1.0)
        started = select(operator.matrices > 1, efficiency.expert_rolloff, 0.0)
    element = recipe.activation
    weights, moved_forward = operator.matrices * inner * columns, product_bytes(operator, element)
    # The weight gradient is accumulated in fp32: read and written, 8 bytes per weight.
    accumulated = element * rows * (inner + columns) + 8 * weights
    exposed = efficiency.operand_traffic / device.memory_bandwidth
    launch = _launch(device, stack)

    def seconds(height: Any, width: Any, depth: Any, moved: Any) -> Any:
        """A matmul for every matrix, each of ``height`` by ``width`` elements that are sums over ``depth``."""
        flops = 2 * operator.matrices * height * width * (depth + efficiency.gemm_rolloff)
        return (flops + 2 * efficiency.gemm_tail * depth) / rate + moved * exposed + launch

    # Time before and after the rows of a matmul is added to theirs, so that more rows never take less time. A weight
    # gradient sums over the rows.
    each = rows / operator.matrices
    padded = each + started
    return Seconds(
        seconds(padded, columns, inner, moved_forward),
        seconds(padded, inner, columns, moved_forward),
        seconds(inner, columns, padded, accumulated),
    )


def product_bytes(operator: Operator, element: float) -> Any:
    """Bytes of a matmul's operands and of its result."""
    weights = operator.matrices * operator.inner * operator.columns
    return element * (operator.rows * operator.inner + weights) + element * operator.rows * operator.columns


def _product_casts(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    """Seconds to cast the operands, where they are multiplied in 8 bit or less."""
    if operator.expert:
        recipe = stack.for_experts(recipe)
    if operator.wide or recipe.compute not in ("fp8", "fp4", "int8"):
        return Seconds()
    own, memory = _own(device, stack), device.memory_bandwidth * device.efficiency.memory
    if stack.is_own and not operator.trained:
        # Frozen weights stay as they were cast once, and nothing is transposed for their gradients, which is what the
        # measured factor is of: inputs and gradients of outputs are read in 16 bit and written in 8.
        return Seconds(operator.rows * operator.inner, operator.rows * operator.columns) * (3 / memory)
    times = 1.0 if own is None else own.casts.get(recipe.scaling, 1.0)
    return _casts(operator, stack, recipe.scaling) * (times / memory)


# A compiled cast with a scale for each column takes twice as long as with one for each row, whose elements lie side by
# side (pytorch/ao pull request 1869: a kernel that reads tiles is twice as fast across both).
_BY_COLUMNS = 2


def _casts(operator: Operator, stack: Stack, scaling: str) -> Seconds:
    """Bytes moved in each pass to cast the operands to 8 bit.

    Usually a tensor is read in 16 bit and written in 8 with its transpose, 4 bytes per element; some stacks fuse that
    partly with the kernel that computes it. "separate" finds the maximum, then casts (5 bytes), again in the backward
    pass for weights and inputs, which are saved in 16 bit, and casts the output's gradient once more transposed
    (torchao float8_linear.py). A scale per row instead takes the largest of rows and of columns anew for every matmul,
    and gradients, which are accumulated slowly, are scaled by a kernel of their own, read and written in 16 bit
    (torchao float8_ops.py, post_inverse_scale; pytorch/ao issue 2184).
    """
    entering, weights = operator.rows * operator.inner, operator.matrices * operator.inner * operator.columns
    leaving = operator.rows * operator.columns
    if stack.casts == "separate" and scaling == "row":
        input_gradient = 5 * leaving + _BY_COLUMNS * 5 * weights + 4 * entering
        weight_gradient = _BY_COLUMNS * 5 * (leaving + entering) + 4 * weights
        return Seconds(5 * (entering + weights), input_gradient, weight_gradient)
    if stack.casts == "separate":
        return Seconds(5 * (entering + weights), 5 * (leaving + weights), 3 * leaving + 5 * entering)
    share = 0.7 if stack.casts == "fused" else 1.0
    return Seconds(share * 4 * (entering + weights), share * 4 * leaving)


def _attention(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    efficiency, peak = device.efficiency, device.peak_flops(recipe.wide)
    if stack.attention == "unfused":
        return _stored_scores_attention(operator, device, recipe, stack)
    features = operator.inner / operator.heads / 2
    whole = efficiency.head_features * math.ceil(features / efficiency.head_features) / features
    backward = (efficiency.backward_score_flops, efficiency.backward_rolloff)
    flops, backward_flops = (
        _attention_flops(operator, whole, *(own if given is None else given for own, given in zip(both, wanted)))
        for both in [(efficiency.score_flops, efficiency.attention_rolloff)]
        for wanted in ((None, None), backward)
    )
    older = 1.0 if stack.attention == "fused" else efficiency.older_attention
    # FlashAttention-2 is 1.3 to 2.5 times as fast as the Triton kernel of the first (arXiv 2307.08691, section 4.1).
    older /= 1.9 if stack.attention == "flash-1" else 1.0
    older *= (1 + efficiency.exponential_flops / 512) / (1 + efficiency.exponential_flops / (4 * features))
    if stack.is_own:
        older *= _own_attention(operator, device)
    launch = _launch(device, stack)
    # The backward kernel has five matmuls where the forward one has two (Dao 2023, arXiv 2307.08691).
    return Seconds(
        flops / (peak * efficiency.attention_forward * older) + launch,
        2.5 * backward_flops / (peak * efficiency.attention_backward * older) + launch,
    )


# Of FlashAttention-2's speed, over both passes: 90% of it forward, 85% backward (PyTorch's blog, "FlexAttention: The
# Flexibility of PyTorch with the Performance of FlashAttention", 2024).
FLEX_ATTENTION = 3.5 / (1 / 0.9 + 2.5 / 0.85)


def _own_attention(operator: Operator, device: Device) -> float:
    """How fast our engine's attention with capped scores or sliding windows is, relative to its plain attention.

    PyTorch runs FlexAttention for capped scores and FlashAttention-2 for windows, on however new a device.
    """
    efficiency, own = device.efficiency, device.efficiency.own
    windowed = efficiency.older_attention if own is None else own.windowed_attention
    capped = FLEX_ATTENTION * efficiency.older_attention if own is None else own.capped_attention
    return capped if operator.capped else windowed if operator.windowed else 1.0


def _attention_flops(operator: Operator, whole: float, score_flops: float, rolloff: float) -> float:
    """FLOPs of a pass over the keys in sight: matmuls, padded to ``whole`` times their features, and scores."""
    scores = operator.rows * operator.columns * operator.heads
    seen = operator.attended + min(1.0, rolloff / operator.columns)
    return (whole * operator.flops + score_flops * scores) * seen


# Bytes per score moved by unfused attention in 16 bit, as Megatron-LM and Transformer Engine run it. Forward: the
# matmul writes 2, the fused scale, mask and softmax reads and writes 4, the second matmul reads 2. Backward: 2 and 2
# around the second matmul, softmax 6, and the first matmul's two gradients read 2 each. Dropout is a kernel of its own:
# forward 4 and a mask of 1, backward 5.
_SCORE_BYTES, _DROPOUT_BYTES = (8, 14), (5, 5)


def _stored_scores_attention(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    """Two batched matmuls over all keys, and the score matrix read and written by mask, softmax and dropout."""
    efficiency = device.efficiency
    wide = recipe.wide
    rate = device.peak_flops(wide) * efficiency.gemm_share(wide)
    scores = operator.rows * operator.columns * operator.heads
    memory = device.memory_bandwidth * efficiency.memory / efficiency.stored_scores_traffic
    launch = 4 * _launch(device, stack)
    matmuls = operator.flops / rate
    dropped = _DROPOUT_BYTES if operator.dropped else (0, 0)
    forward, backward = ((moved + more) * scores / memory for moved, more in zip(_SCORE_BYTES, dropped))
    return Seconds(matmuls + forward + launch, 2 * matmuls + backward + launch)


_MEASURED_PASSES = {OperatorRole.NORMS: "norms", OperatorRole.HEAD_NORMS: "head norms", OperatorRole.ROTARY: "rotary",
                    OperatorRole.ACTIVATION: "activation"}  # fmt: skip
_ONLY_MEASURED = (OperatorRole.HEAD_GRADIENT, OperatorRole.HEAD_NORMS, OperatorRole.SCORES, OperatorRole.STARTS)


def _own(device: Device, stack: Stack) -> EngineKernels | None:
    """Measurements of our own engine on the device, if that is what runs."""
    return device.efficiency.own if stack.is_own else None


def mode_of(stack: Stack) -> str:
    return "compiled" if stack.elementwise == "compiled" else "eager"


def _own_traffic(operator: Operator, own: EngineKernels, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    """An operator that moves bytes in our own engine, by its measured kernels."""
    if operator.role is OperatorRole.STARTS:
        started = own.device_starts(mode_of(stack), rotary=operator.rotary, moe=operator.expert)
        return Seconds(started / 3, 2 * started / 3)  # two of three products are in the backward pass
    memory = device.memory_bandwidth * device.efficiency.memory * 2 / recipe.activation
    if operator.role in _MEASURED_PASSES:
        by_mode = own.compiled if mode_of(stack) == "compiled" else own.eager
        passes = by_mode.get(_MEASURED_PASSES[operator.role], 1.0)
        if mode_of(stack) == "eager" and operator.eager_forward is not None:  # of both passes, which were measured
            both = passes * (operator.forward_bytes + operator.backward_bytes) / memory
            return Seconds(both * operator.eager_forward, both * (1 - operator.eager_forward))
    else:
        others = {
            OperatorRole.LOSS: own.loss_traffic,
            OperatorRole.PERMUTE: own.routing.get(mode_of(stack), device.efficiency.routing_traffic),
            OperatorRole.SCORES: own.score_traffic,
        }
        passes = others.get(operator.role, 1.0)
    return Seconds(passes * operator.forward_bytes / memory, passes * operator.backward_bytes / memory)


# Bytes of a logit that the kernels of a loss move in each pass; a fused one moves 5, as counted. `parallel` and
# `copied` (Megatron-LM's tensor_parallel/cross_entropy.py, nanotron's tensor_parallel/functional.py): cast to fp32 6,
# maximum 4, subtraction 8, exponential 8, sum 4, division 8; backward scaled 8 and cast 6. `steps` (Megatron-LM's
# fused_cross_entropy.py): a cast with the maximum 6, exponential 8, sum 4, division 8. `plain` (F.cross_entropy): cast
# 6, logarithm of softmax 8; backward its gradient filled 4, the logits' 12, cast 6. XLA, which has the whole step,
# fuses them.
_LOSS_BYTES = {"parallel": (38, 14), "copied": (38, 14), "steps": (26, 14), "plain": (14, 22)}


def _loss(operator: Operator, device: Device, stack: Stack, memory: float) -> Seconds:
    xla = stack.loss == "copied" and stack.elementwise == "compiled"
    forward, backward = (5, 5) if xla else _LOSS_BYTES.get(stack.loss, (5, 5))
    launch = operator.kernels * _launch(device, stack)
    seconds = (operator.forward_bytes * forward, operator.backward_bytes * backward)
    return Seconds(*(moved / 5 / memory + launch for moved in seconds))


# Bytes of a weight that torch's operators make of four bits (AutoGPTQ, qlinear_cuda_old.py, forward): shifted codes as
# 32-bit integers, cast to 8 bits, masked, without their zero point, in 16 bits by their scale; each read and written.
_UNPACKED_BYTES = 0.5 + 4 + (4 + 1) + (1 + 1) + (1 + 1) + (1 + 2)
_UNPACKING_KERNELS = 9  # four of them for the zero points


def _traffic(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    if (own := _own(device, stack)) is not None:
        return _own_traffic(operator, own, device, recipe, stack)
    if operator.role in _ONLY_MEASURED:
        return Seconds()
    efficiency = device.efficiency
    # Bytes are counted in 16 bit.
    memory = device.memory_bandwidth * efficiency.memory * 2 / recipe.activation
    passes = 1.0
    if operator.role is OperatorRole.LOSS:
        return _loss(operator, device, stack, memory)
    if operator.role is OperatorRole.PERMUTE:
        passes = 1.0 if stack.fused_permute else efficiency.routing_traffic
    elif operator.role is OperatorRole.EXPERT_BIAS:
        passes = 0.0 if stack.fused_moe_mlp else 1.0
    elif stack.elementwise == "eager":
        passes = _EAGER_PASSES.get(operator.role, 1.0)
    elif stack.elementwise == "fused":
        passes = efficiency.elementwise_traffic
    if operator.role is OperatorRole.DEQUANTISED and stack.dequantised_by == "operators":
        return Seconds(_UNPACKED_BYTES * operator.rows / memory + _UNPACKING_KERNELS * _launch(device, stack))
    launch = operator.kernels * _launch(device, stack)
    if operator.role is OperatorRole.PERMUTE and stack.routing == "dropless" and not stack.launched_by_graphs:
        launch += efficiency.routing_seconds
    return Seconds(
        passes * operator.forward_bytes / memory + launch, passes * operator.backward_bytes / memory + launch
    )
