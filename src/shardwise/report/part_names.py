"""How tables name the parallel dimensions, the parts of a step and those of a device's memory."""

from __future__ import annotations

from shardwise.cost.step.simulation import COMMUNICATION

DIMENSIONS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "pipeline parallel",
    "dp": "data parallel",
    "offload": "offload",
}
MEMORY_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "recomputed": "recomputed layer",
    "gathered": "gathered layers",
    "communication": "communication buffers",
    "temporary": "logits, temporary",
    "allowance": "framework (allowance)",
}
STEP_WORDS = {
    "products": "matmuls",
    "attention": "attention",
    "memory-bound": "memory-bound operators",
    "launches": "kernel launches",
    "recompute": "recomputed operators",
    **{name: f"exposed {name} communication" for name in COMMUNICATION},
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "overhead": "fixed cost of a step",
    "stragglers": "waiting for the slowest",
}
PLAN_WORDS = {
    "compute": "compute",
    "recompute": "recompute",
    **{name: f"{words}, exposed" for name, words in DIMENSIONS.items()},
    "bubble": "pipeline bubble and messages",
    "optimizer": "optimizer and step overhead",
    "stragglers": "waiting for the slowest",
}
MEASURED_WORDS = {
    "pp": "pp messages",
    "late ranks": "waits for late ranks",
    "host": "host, the rest",
    "checkpoint": "checkpoint stall",
    "data": "data wait",
}
