"""How much of its peak a device sustains, and what our own engine's kernels take on it: what no data sheet gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.spec.codec import FrozenMapping, Spec, quantity

_SHARE = {"above": 0, "maximum": 1}
MODES = ("eager", "compiled")
LAYER_PARTS = (*MODES, "eager rotary", "compiled rotary", "mixture")
PASSES = ("norms", "head norms", "rotary", "activation")
SCALINGS = ("tensor", "row", "block")
GENERIC_GEMM = FrozenMapping({"fp32": 0.80, "fp16": 0.60, "bf16": 0.60, "fp8": 0.55, "fp4": 0.50})


@dataclass(frozen=True, kw_only=True)
class EngineKernels(Spec):
    """What this project's own engine takes on a device, as `calibrate` measures it on whole steps.

    ``eager`` and ``compiled`` say how many times the bytes of one fused kernel are moved by norms with residuals, norms
    of heads, rotary embedding and activation, without and with the compiler. ``layer_seconds`` is what starting the
    kernels of a layer costs the device in both passes, by mode, also in a CUDA graph; ``host_seconds`` what the host
    needs to launch them one by one, which hides under them where they take longer. ``update_traffic``,
    ``accumulation_traffic`` and ``loss_traffic`` are times the bytes that are counted for the optimizer, for adding the
    gradients of a further microbatch, and for the loss. ``scaled`` is the share of the FP8
    peak by what has a scale of its own, ``casts`` times the bytes that casting moves at least. ``routing`` is how often
    the tokens of a mixture are read and written to sort them by expert and back, by mode, ``score_traffic`` the same of
    the router's scores in fp32. Layers with rotary embedding have ``layer_seconds`` and ``host_seconds`` of
    their own, mixtures further ones.
    ``windowed_attention`` and ``capped_attention`` are the speeds of the kernels for sliding windows and for capped
    scores, over that of the other.
    """

    eager: Mapping[str, float] = field(metadata={"minimum": 0, "keys": PASSES})
    compiled: Mapping[str, float] = field(metadata={"minimum": 0, "keys": PASSES})
    layer_seconds: Mapping[str, float] = field(metadata={"dimension": "seconds", "minimum": 0, "keys": LAYER_PARTS})
    host_seconds: Mapping[str, float] = field(metadata={"dimension": "seconds", "minimum": 0, "keys": LAYER_PARTS})
    update_traffic: float = field(default=1.0, metadata={"minimum": 0})
    accumulation_traffic: float = field(default=0.0, metadata={"minimum": 0})
    loss_traffic: float = field(default=1.0, metadata={"minimum": 0})
    scaled: Mapping[str, float] = field(default=FrozenMapping(), metadata={**_SHARE, "keys": SCALINGS})
    casts: Mapping[str, float] = field(default=FrozenMapping(), metadata={"minimum": 0, "keys": SCALINGS})
    routing: Mapping[str, float] = field(default=FrozenMapping(), metadata={"minimum": 0, "keys": MODES})
    score_traffic: float = field(default=0.0, metadata={"minimum": 0})
    windowed_attention: float = field(default=1.0, metadata={"above": 0})
    capped_attention: float = field(default=1.0, metadata={"above": 0})

    def device_starts(self, mode: str, *, rotary: bool, moe: bool) -> float:
        """Seconds of a layer, in both passes, that starting its kernels takes on the device."""
        return _by_layer(self.layer_seconds, mode, rotary=rotary, moe=moe)

    def host_launches(self, mode: str, *, rotary: bool, moe: bool) -> float:
        """The same of the host that launches them."""
        return _by_layer(self.host_seconds, mode, rotary=rotary, moe=moe)


def _by_layer(seconds: Mapping[str, float], mode: str, *, rotary: bool, moe: bool) -> float:
    names = (f"{mode} rotary" if rotary else mode, *(["mixture"] if moe else []))
    return sum(seconds.get(name, 0.0) for name in names)


@dataclass(frozen=True, kw_only=True)
class Efficiency(Spec):
    """How much of its peak a device sustains, and what a call costs: what a data sheet does not give.

    `calibrate` replaces it by a measured one. ``gemm`` is the share of the peak that matmuls sustain in a long step,
    per data type; ``gemm_rolloff`` the inner dimension at which half of it is left, ``gemm_tail`` the elements of an
    output that the last, partly filled wave of tiles would have had room for. ``operand_traffic`` is the share of
    the operands' bytes that is not hidden under the matmul. ``attention_*`` are shares of the 16-bit peak that a fused
    kernel of the newest class reaches with heads of 128 features; ``older_attention`` is what the class before it
    reaches of that, ``exponential_flops`` the matmul FLOPs that an exponential takes as long as: narrower heads have
    more of them. ``attention_rolloff`` is the number of keys that causal attention takes as long for as for all those
    behind the mask: tiles on the diagonal are computed whole. ``score_flops`` are the FLOPs of a score besides its
    matmuls; ``backward_rolloff`` and ``backward_score_flops`` are those of the backward pass where they differ, and a
    kernel computes heads of a multiple of ``head_features``. Matmuls of several experts sustain ``expert_gemm`` of
    ``gemm``, half of it with ``expert_rolloff`` tokens each; one alone is like any.
    ``routing_seconds`` is what every mixture-of-experts layer adds to a pass because the host waits for the number of
    tokens that each expert gets, unless the whole step is one CUDA graph; ``routing_traffic`` how often the tokens are
    read and written to sort them by expert. ``overlapped_tp_exposed`` is what stays exposed of tensor-parallel
    communication that is sent tile by tile. ``device_spread`` is the standard deviation of a step's time between
    devices, ``layer_jitter`` that of a layer's time between nodes, as shares. ``power_slowdown`` is how
    many times as long matmuls alone take under the device's power limit as at full clock, ``attention_slowdown`` the
    same of attention, ``other_power`` the share of that limit that memory-bound kernels draw: the more of a step they
    take, the less the others are slowed down. ``own`` is what only calibrated devices have.
    """

    gemm: Mapping[str, float] = field(default=GENERIC_GEMM, metadata=_SHARE)
    gemm_tail: float = field(default=0.0, metadata={"minimum": 0})
    gemm_rolloff: float = field(default=0.0, metadata={"minimum": 0})
    operand_traffic: float = field(default=0.3, metadata={"minimum": 0})
    expert_gemm: float = field(default=0.9, metadata=_SHARE)
    expert_rolloff: float = field(default=300.0, metadata={"minimum": 0})
    memory: float = field(default=0.85, metadata=_SHARE)
    elementwise_traffic: float = field(default=1.0, metadata={"minimum": 0})
    attention_forward: float = field(default=0.6, metadata=_SHARE)
    attention_backward: float = field(default=0.5, metadata=_SHARE)
    older_attention: float = field(default=0.6, metadata=_SHARE)
    attention_rolloff: float = field(default=0.0, metadata={"minimum": 0})
    backward_rolloff: float | None = field(default=None, metadata={"minimum": 0})
    backward_score_flops: float | None = field(default=None, metadata={"minimum": 0})
    head_features: int = field(default=1, metadata={"minimum": 1})
    score_flops: float = field(default=0.0, metadata={"minimum": 0})
    exponential_flops: float = field(default=0.0, metadata={"minimum": 0})
    stored_scores_traffic: float = field(default=1.0, metadata={"minimum": 0})
    routing_traffic: float = field(default=5.0, metadata={"minimum": 0})
    routing_seconds: float = quantity("seconds", 9e-4, minimum=0)
    overlapped_tp_exposed: float = field(default=0.2, metadata={"minimum": 0, "maximum": 1})
    operator_seconds: float = quantity("seconds", 5e-6, minimum=0)
    stage_call_seconds: float = quantity("seconds", 0.0, minimum=0)
    device_spread: float = field(default=0.01, metadata={"minimum": 0})
    layer_jitter: float = field(default=0.03, metadata={"minimum": 0})
    step_seconds: float = quantity("seconds", 0.02, minimum=0)
    power_slowdown: float = field(default=1.0, metadata={"minimum": 1})
    attention_slowdown: float = field(default=1.0, metadata={"minimum": 1})
    other_power: float = field(default=0.7, metadata={"minimum": 0, "maximum": 1})
    own: EngineKernels | None = None
    source: str = "generic prior: no measurement of this device"

    def gemm_share(self, data_type: str) -> float:
        """Share of the peak of ``data_type``; a type that is not described takes the 16-bit share."""
        return self.gemm.get(data_type, self.gemm.get("bf16", GENERIC_GEMM["bf16"]))

    def slowdown(self, matmul_seconds: float, attention_seconds: float, other_seconds: float) -> float:
        """What matmuls and attention of a step, which take so many seconds at full clock, are slowed down by."""
        found, tensor = 1.0, matmul_seconds + attention_seconds
        if self.power_slowdown > 1 and tensor:
            for _ in range(12):  # it depends on their share of the slower step
                share = found * tensor / (found * tensor + other_seconds)
                found = self.slowdown_at(share * matmul_seconds / tensor, share * attention_seconds / tensor)
        return found

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
