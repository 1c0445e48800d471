"""Seconds of one operator on one device: arithmetic at a sustained share of peak, bytes at a share of memory speed.

The form and its terms: products sustain one share of the peak per device and data type; a part of the operands'
bytes and a fixed cost per kernel add to it (they are seen in whole steps, not hidden by a maximum).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.compute.operators import Operator, OperatorRole
from shardwise.spec.hardware import Device
from shardwise.spec.stack import Stack
from shardwise.spec.training import Recipe

# What an eager stack moves of the bytes that one kernel needs. Norm: to fp32, square, mean, scale, back, weight are 36
# bytes per element instead of 4, beside a residual of 6. Rotary embedding: to fp32, complex product, back are 20, not
# 4. Gated activation: two kernels of 4 and 6 bytes instead of one of 6 (torchtitan/models/llama/model.py, 2024).
_EAGER_PASSES = {OperatorRole.NORMS: 4.2, OperatorRole.ROTARY: 5.0, OperatorRole.ACTIVATION: 1.7}


@dataclass(frozen=True)
class Seconds:
    """Forward pass, input gradient and weight gradient."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(self.forward * factor, self.input_gradient * factor, self.weight_gradient * factor)

    def with_weights_at_once(self, share: float) -> Seconds:
        """A ``share`` of the weight gradients is computed with those of the inputs, whatever the schedule says."""
        moved = self.weight_gradient * share
        return Seconds(self.forward, self.input_gradient + moved, self.weight_gradient - moved)


def operator_seconds(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    """What ``operator`` takes on ``device`` in the formats of ``recipe``, as ``stack`` runs it."""
    if operator.kind == "product":
        return _product(operator, device, recipe, stack)
    if operator.kind == "attention":
        return _attention(operator, device, recipe, stack)
    return _traffic(operator, device, recipe, stack)


def _launch(device: Device, stack: Stack) -> float:
    """A captured step launches no kernel by itself."""
    return 0.0 if stack.cuda_graphs == "full" else device.efficiency.operator_seconds


def _product(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    efficiency = device.efficiency
    data_type = recipe.wide if operator.wide else recipe.compute
    rate = device.peak_flops(data_type) * efficiency.gemm_share(data_type)
    if operator.expert and not stack.fused_moe_mlp:
        rate *= efficiency.expert_gemm
    rows, columns, inner = operator.rows, operator.columns, operator.inner
    element = recipe.activation
    read, written = element * (rows * inner + inner * columns), element * rows * columns
    # The weight gradient is accumulated in fp32: read and written, 8 bytes per weight.
    accumulated = element * rows * (inner + columns) + 8 * inner * columns
    exposed = efficiency.operand_traffic / device.memory_bandwidth
    launch = _launch(device, stack)

    def seconds(depth: float, moved: float) -> float:
        return operator.flops / rate * (1 + efficiency.gemm_rolloff / depth) + moved * exposed + launch

    forward, backward = seconds(inner, read + written), seconds(columns, read + written)
    weight = seconds(rows, accumulated)
    products = Seconds(forward, backward, weight)
    if not operator.wide and recipe.compute in ("fp8", "fp4"):
        products += _casts(operator, stack) * (1 / (device.memory_bandwidth * efficiency.memory))
    return products


def _casts(operator: Operator, stack: Stack) -> Seconds:
    """Bytes that the operands' casts to 8 bit move in each pass.

    Usually a tensor is read in 16 bit and written in 8 with its transpose, 4 bytes per element; partly fused with what
    makes it in some stacks. "separate" looks for the maximum, then casts (5 bytes), again in the backward pass for
    weights and inputs, which are kept in 16 bit, and casts the output's gradient once more transposed (torchao
    float8_linear.py).
    """
    entering, weights = operator.rows * operator.inner, operator.inner * operator.columns
    leaving = operator.rows * operator.columns
    if stack.casts == "separate":
        return Seconds(5 * (entering + weights), 5 * (leaving + weights), 3 * leaving + 5 * entering)
    share = 0.7 if stack.casts == "fused" else 1.0
    return Seconds(share * 4 * (entering + weights), share * 4 * leaving)


def _attention(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    efficiency, peak = device.efficiency, device.peak_flops(recipe.wide)
    if stack.attention == "unfused":
        return _stored_scores_attention(operator, device, recipe, stack)
    scores = operator.rows * operator.columns * operator.heads
    flops = (operator.flops + efficiency.score_flops * scores) * operator.attended
    older = efficiency.older_attention if stack.attention == "flash-2" else 1.0
    launch = _launch(device, stack)
    # The backward kernel makes five products where the forward one makes two (Dao 2023, arXiv 2307.08691).
    return Seconds(
        flops / (peak * efficiency.attention_forward * older) + launch,
        2.5 * flops / (peak * efficiency.attention_backward * older) + launch,
    )


# Bytes per score that Megatron-LM's unfused attention moves in 16 bit. Forward: the matmul writes 2, the fused scale,
# mask and softmax reads and writes 4, dropout 4 and a mask of 1, the second matmul reads 2. Backward: 2 and 2 around
# the second matmul, dropout 5, softmax 6, and the first matmul's two gradients read 2 each.
_SCORE_BYTES = (13, 19)


def _stored_scores_attention(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    """Two batched matmuls over all keys, and the score matrix read and written by mask, softmax and dropout."""
    efficiency = device.efficiency
    wide = recipe.wide
    rate = device.peak_flops(wide) * efficiency.gemm_share(wide)
    scores = operator.rows * operator.columns * operator.heads
    memory = device.memory_bandwidth * efficiency.memory / efficiency.stored_scores_traffic
    launch = 4 * _launch(device, stack)
    products = operator.flops / rate
    forward, backward = (moved * scores / memory for moved in _SCORE_BYTES)
    return Seconds(products + forward + launch, 2 * products + backward + launch)


def _traffic(operator: Operator, device: Device, recipe: Recipe, stack: Stack) -> Seconds:
    efficiency = device.efficiency
    # Bytes are counted in 16 bit.
    memory = device.memory_bandwidth * efficiency.memory * 2 / recipe.activation
    passes = 1.0
    if operator.role is OperatorRole.PERMUTE:
        passes = 1.0 if stack.fused_permute else 3.0
    elif stack.elementwise == "eager":
        passes = _EAGER_PASSES.get(operator.role, 1.0)
    elif stack.elementwise == "fused" and operator.role is not OperatorRole.LOSS:
        passes = efficiency.elementwise_traffic
    launch = operator.kernels * _launch(device, stack)
    return Seconds(
        passes * operator.forward_bytes / memory + launch, passes * operator.backward_bytes / memory + launch
    )
