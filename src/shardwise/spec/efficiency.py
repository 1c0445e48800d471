"""How much of its peak a device sustains, and what our own engine's kernels take on it: what no data sheet gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.spec.codec import FrozenMapping, Spec, quantity, setting

_SHARE = {"above": 0, "maximum": 1}
MODES = ("eager", "compiled")
LAYER_PARTS = (*MODES, "eager rotary", "compiled rotary", "mixture")
PASSES = ("norms", "head norms", "rotary", "activation")
SCALINGS = ("tensor", "row", "block")
# A layer in both passes by the host of an H200 (bench/results/calibrated-h200.yaml).
GENERIC_HOST = FrozenMapping({"eager": 2.2e-3, "eager rotary": 3.5e-3, "compiled": 2.1e-3, "compiled rotary": 2.9e-3,
                              "mixture": 1.5e-3})  # fmt: skip
GENERIC_GEMM = FrozenMapping({"fp32": 0.80, "fp16": 0.60, "bf16": 0.60, "fp8": 0.55, "fp4": 0.50})


@dataclass(frozen=True, kw_only=True)
class EngineKernels(Spec):
    """What this project's own engine takes on a device, as `calibrate` measures it on whole steps."""

    eager: Mapping[str, float] = setting(minimum=0, keys=PASSES)
    """Times the bytes of one fused kernel that norms with residuals, norms of heads, rotary embedding and activation
    move without the compiler."""
    compiled: Mapping[str, float] = setting(minimum=0, keys=PASSES)
    """The same with the compiler."""
    layer_seconds: Mapping[str, float] = setting(dimension="seconds", minimum=0, keys=LAYER_PARTS)
    """What starting a layer's kernels costs the device in both passes, also in a CUDA graph. Rotary layers have entries
    of their own, mixtures a further one."""
    host_seconds: Mapping[str, float] = setting(dimension="seconds", minimum=0, keys=LAYER_PARTS)
    """What the host needs to launch them one by one; hidden where the kernels take longer."""
    update_traffic: float = setting(1.0, minimum=0)
    """Times the bytes counted for the optimizer."""
    accumulation_traffic: float = setting(0.0, minimum=0)
    """Times the bytes counted for adding a further microbatch's gradients."""
    loss_traffic: float = setting(1.0, minimum=0)
    """Times the bytes counted for the loss."""
    scaled: Mapping[str, float] = setting(FrozenMapping(), **_SHARE, keys=SCALINGS)
    """Share of the FP8 peak, by what has a scale of its own."""
    casts: Mapping[str, float] = setting(FrozenMapping(), minimum=0, keys=SCALINGS)
    """Times the least bytes that casting moves."""
    routing: Mapping[str, float] = setting(FrozenMapping(), minimum=0, keys=MODES)
    """How often a mixture's tokens are read and written to sort them by expert and back, by mode."""
    score_traffic: float = setting(0.0, minimum=0)
    """The same of the router's fp32 scores."""
    windowed_attention: float = setting(1.0, above=0)
    """Speed of the kernel for sliding windows, over the usual one's."""
    capped_attention: float = setting(1.0, above=0)
    """Speed of the kernel for capped scores, over the usual one's."""

    def device_starts(self, mode: str, *, rotary: bool, moe: bool) -> float:
        """Seconds of a layer, in both passes, that starting its kernels takes on the device."""
        return by_layer(self.layer_seconds, mode, rotary=rotary, moe=moe)

    def host_launches(self, mode: str, *, rotary: bool, moe: bool) -> float:
        """The same of the host that launches them."""
        return by_layer(self.host_seconds, mode, rotary=rotary, moe=moe)


def by_layer(seconds: Mapping[str, float], mode: str, *, rotary: bool, moe: bool) -> float:
    """Seconds of a layer of this kind."""
    names = (f"{mode} rotary" if rotary else mode, *(["mixture"] if moe else []))
    return sum(seconds.get(name, 0.0) for name in names)


@dataclass(frozen=True, kw_only=True)
class Efficiency(Spec):
    """How much of its peak a device sustains, and what a call costs: what a data sheet does not give. `calibrate`
    replaces it by a measured one."""

    # -- matmuls

    gemm: Mapping[str, float] = setting(GENERIC_GEMM, **_SHARE)
    """Share of the peak that matmuls sustain in a long step, per data type."""
    gemm_tail: float = setting(0.0, minimum=0)
    """Output elements that would have fitted into the last, partly filled wave of tiles."""
    gemm_rolloff: float = setting(0.0, minimum=0)
    """Inner dimension at which half of that share is left."""
    operand_traffic: float = setting(0.3, minimum=0)
    """Share of the operands' bytes that is not hidden under the matmul."""
    expert_gemm: float = setting(0.9, **_SHARE)
    """Matmuls of several experts sustain this much of `gemm`; one alone is like any."""
    expert_rolloff: float = setting(300.0, minimum=0)
    """Tokens per expert at which half of that is left."""

    # -- memory

    memory: float = setting(0.85, **_SHARE)
    """Share of the memory bandwidth that elementwise kernels sustain."""
    elementwise_traffic: float = setting(1.0, minimum=0)
    """Times the counted bytes that fused elementwise kernels move."""

    # -- attention

    attention_forward: float = setting(0.6, **_SHARE)
    """Share of the 16-bit peak that the newest class of fused kernel reaches, heads of 128 features."""
    attention_backward: float = setting(0.5, **_SHARE)
    """The same of its backward pass."""
    older_attention: float = setting(0.6, **_SHARE)
    """What the class of kernels before it reaches of that."""
    attention_rolloff: float = setting(0.0, minimum=0)
    """Extra keys per query that causal attention computes: tiles on the diagonal are computed whole."""
    backward_rolloff: float | None = setting(None, minimum=0)
    """The same of the backward pass, where it differs."""
    backward_score_flops: float | None = setting(None, minimum=0)
    """`score_flops` of the backward pass, where they differ."""
    head_features: int = setting(32, minimum=1)
    """Heads are computed as a multiple of so many features (FlashAttention: csrc/flash_attn/src/static_switch.h)."""
    score_flops: float = setting(0.0, minimum=0)
    """FLOPs of a score besides its matmuls."""
    exponential_flops: float = setting(0.0, minimum=0)
    """Matmul FLOPs that take as long as one exponential; narrower heads have more of them."""
    stored_scores_traffic: float = setting(1.0, minimum=0)
    """Times the counted bytes that attention with stored scores moves."""

    # -- mixtures of experts

    routing_traffic: float = setting(5.0, minimum=0)
    """How often tokens are read and written to sort them by expert."""
    routing_seconds: float = quantity("seconds", 9e-4, minimum=0)
    """What a mixture layer adds to a pass while the host waits for the tokens per expert; nothing where the whole step
    is one CUDA graph."""

    # -- communication and the host

    overlapped_tp_exposed: float = setting(0.2, minimum=0, maximum=1)
    """Share of tensor-parallel communication sent tile by tile that stays exposed."""
    operator_seconds: float = quantity("seconds", 5e-6, minimum=0)
    """What starting a kernel takes."""
    host_seconds: Mapping[str, float] = setting(GENERIC_HOST, dimension="seconds", minimum=0, keys=LAYER_PARTS)
    """What a host needs to launch a layer's kernels one by one from PyTorch, in both passes; hidden where the kernels
    take longer. For stacks that do so; our own engine's is measured apart."""
    stage_call_seconds: float = quantity("seconds", 0.0, minimum=0)
    """What a call of a pipeline stage takes on the host."""

    # -- unlike devices and steps

    device_spread: float = setting(0.01, minimum=0)
    """Standard deviation of a step's time between devices, as a share."""
    layer_jitter: float = setting(0.03, minimum=0)
    """Standard deviation of a layer's time between nodes, as a share."""
    step_seconds: float = quantity("seconds", 0.02, minimum=0)
    """What a step takes besides its kernels."""

    # -- power

    power_slowdown: float = setting(1.0, minimum=1)
    """How many times as long matmuls alone take under the power limit as at full clock."""
    attention_slowdown: float = setting(1.0, minimum=1)
    """The same of attention."""
    other_power: float = setting(0.7, minimum=0, maximum=1)
    """Share of the power limit that memory-bound kernels draw: the more of a step they take, the less the others are
    slowed down."""
    own: EngineKernels | None = None
    """What only calibrated devices have."""
    source: str = "generic prior: no measurement of this device"
    """Where the figures come from."""

    def gemm_share(self, data_type: str) -> float:
        """Share of the peak of ``data_type``; a type that is not described takes the 16-bit share."""
        return self.gemm.get(data_type, self.gemm.get("bf16", GENERIC_GEMM["bf16"]))

    def slowdown(self, matmul_seconds: float, attention_seconds: float, other_seconds: float) -> float:
        """What matmuls and attention of a step, which take so many seconds at full clock, are slowed down by."""
        slowdown, tensor = 1.0, matmul_seconds + attention_seconds
        if self.power_slowdown > 1 and tensor:
            for _ in range(12):  # it depends on their share of the slower step
                share = slowdown * tensor / (slowdown * tensor + other_seconds)
                slowdown = self.slowdown_at(share * matmul_seconds / tensor, share * attention_seconds / tensor)
        return slowdown

    def slowdown_at(self, matmul_share: float, attention_share: float = 0.0) -> float:
        """The same where they take these shares of the time.

        The clock f falls until the mean power is the limit, 1: f^2.5·(matmul_share·p + attention_share·q) +
        other_share·other_power = 1 for kernels that draw p and q at full clock. A clock draws f·V², which over the
        range of a GPU's clocks is about f^2.5 (measured: 676, 709 and 783 TFLOP/s with matmuls in 100, 57 and 35% of
        the time of an H200). Matmuls take 1/f as long; alone that is ``power_slowdown``, so p is power_slowdown^2.5.
        """
        if self.power_slowdown == 1:
            return 1.0
        drawn = matmul_share * self.power_slowdown**2.5 + attention_share * self.attention_slowdown**2.5
        slower: float = (drawn / (1 - (1 - matmul_share - attention_share) * self.other_power)) ** 0.4
        return max(1.0, slower)
