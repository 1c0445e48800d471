"""How tables name the parallel dimensions and the parts of a device's memory."""

from __future__ import annotations

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
