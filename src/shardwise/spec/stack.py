"""The software that runs a job, as flags and kinds; never as fitted numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.spec import presets
from shardwise.spec.codec import Spec
from shardwise.spec.strategy import Overlap


@dataclass(frozen=True, kw_only=True)
class Stack(Spec):
    """What a training framework does by itself: kernels it fuses, what it overlaps, in which format it reduces.

    ``overlap`` is what a job on this stack hides unless its strategy says otherwise. ``tp_overlap`` tells how:
    "decomposed" cuts the product into pieces (async TP), "buffers" sends tiles as they are made (user buffers).
    ``tp_gradients`` says whether the collectives of a split product's backward pass run "beside" the one of its two
    products that does not need them. ``scattered_messages``: tensor-parallel ranks that hold the same activations send a
    part each to the next stage, which gathers the parts.
    ``float_logits``: the loss is a plain cross entropy on an fp32 copy of the logits. ``fused_loss`` is described, not
    priced yet.
    """

    name: str = "custom"
    attention: Literal["unfused", "flash-2", "fused"] = "fused"
    overlap: Overlap = field(default_factory=Overlap)
    tp_overlap: Literal["decomposed", "buffers"] = "decomposed"
    tp_gradients: Literal["beside", "in turn"] = "beside"
    scattered_messages: bool = False
    gradient_reduce: Literal["fp32", "bf16"] = "fp32"
    parameter_gather: Literal["bf16", "fp8"] = "bf16"
    dispatch: Literal["all-to-all", "deduplicated"] = "all-to-all"
    fp8_dispatch: bool = False
    cuda_graphs: Literal["none", "partial", "full"] = "none"
    elementwise: Literal["fused", "eager"] = "fused"
    fused_moe_mlp: bool = False
    fused_permute: bool = False
    fused_loss: bool = False
    float_logits: bool = False
    fused_casts: bool = False
    fused_weight_gradient: bool = True
    per_parameter_collectives: bool = False
    source: str = ""


def stack_from(value: Any) -> Stack:
    """The stack that a preset name, a file or a mapping describes."""
    return presets.resolve("stack", Stack, value)


def default_stack() -> Stack:
    """This project's own engine."""
    return stack_from("shardwise")
