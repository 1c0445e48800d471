"""How much of its peak a device sustains, and what a call costs: the numbers a data sheet does not give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.spec.codec import FrozenMapping, Spec, quantity

_SHARE = {"above": 0, "maximum": 1}
GENERIC_GEMM = FrozenMapping({"fp32": 0.80, "fp16": 0.60, "bf16": 0.60, "fp8": 0.55, "fp4": 0.50})


@dataclass(frozen=True, kw_only=True)
class Efficiency(Spec):
    """One description per device; `calibrate` replaces it by a measured one.

    ``gemm`` is the share of the peak that matmuls sustain in a long step, per data type;
    ``gemm_rolloff`` the inner dimension at which half of it is left. ``operand_traffic`` is the share of the
    operands' bytes that is not hidden under the matmul. ``attention_*`` are shares of the 16-bit peak that a
    fused kernel of the newest class reaches; ``older_attention`` is what the class before it reaches of that. A score
    costs ``score_flops`` besides its products (its exponential): on CPUs much, where heads are narrow.
    ``exchange`` is the share of a link's bandwidth that an all-to-all of expert tokens reaches;
    ``overlapped_tp_exposed`` what stays exposed of tensor-parallel communication that is sent tile by tile.
    """

    gemm: Mapping[str, float] = field(default=GENERIC_GEMM, metadata=_SHARE)
    gemm_rolloff: float = field(default=0.0, metadata={"minimum": 0})
    operand_traffic: float = field(default=0.3, metadata={"minimum": 0})
    expert_gemm: float = field(default=0.8, metadata=_SHARE)
    memory: float = field(default=0.85, metadata=_SHARE)
    elementwise_traffic: float = field(default=1.0, metadata={"minimum": 0})
    attention_forward: float = field(default=0.6, metadata=_SHARE)
    attention_backward: float = field(default=0.5, metadata=_SHARE)
    older_attention: float = field(default=0.6, metadata=_SHARE)
    score_flops: float = field(default=0.0, metadata={"minimum": 0})
    stored_scores_traffic: float = field(default=1.0, metadata={"minimum": 0})
    exchange: float = field(default=0.3, metadata=_SHARE)
    overlapped_tp_exposed: float = field(default=0.2, metadata={"minimum": 0, "maximum": 1})
    operator_seconds: float = quantity("seconds", 5e-6, minimum=0)
    stage_call_seconds: float = quantity("seconds", 0.0, minimum=0)
    step_seconds: float = quantity("seconds", 0.02, minimum=0)
    source: str = "generic prior: no measurement of this device"

    def gemm_share(self, data_type: str) -> float:
        """Share of the peak of ``data_type``; a type that is not described takes the 16-bit share."""
        return self.gemm.get(data_type, self.gemm.get("bf16", GENERIC_GEMM["bf16"]))
