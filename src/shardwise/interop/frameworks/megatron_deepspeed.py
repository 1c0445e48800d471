"""Megatron-DeepSpeed, that of BigScience too: options of Megatron-LM's scripts that DeepSpeed's forks of it have."""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks.target import Reading

_FLASH = ("--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton")
_GATED = {"geglu": "geglu", "swiglu": "swiglu", "reglu": "swiglu", "liglu": "swiglu"}


def interpret(reading: Reading, fields: dict[str, Any]) -> None:
    """What differs where a script starts them, which ``--deepspeed`` shows."""
    if not reading.flag("--deepspeed"):
        return
    reading.notes.append("--deepspeed: its model's kernels and loss are priced as Megatron-Core's")
    fields["strategy.zero"] = reading.zero("--zero-stage", 3, 1)
    flash = [reading.flag(option) for option in _FLASH]
    fields["training.attention"] = "flash" if any(flash) else "unfused"
    if reading.flag("--cpu-optimizer"):
        fields.update({"strategy.offload.optimizer": 1.0, "strategy.offload.gradients": 1.0})
    ulysses = reading.count("--ds-sequence-parallel-size", 1)
    if ulysses > 1:
        fields.update({"strategy.cp": ulysses, "strategy.context_method": "ulysses"})
    if reading.flag("--no-pipeline-parallel"):
        fields["strategy.pp"] = 1
    if fields["strategy.tp"] > 1 and not reading.flag("--sequence-parallel"):
        fields["strategy.sequence_parallel"] = False
    if reading.text("--position-embedding-type") == "alibi":
        reading.notes.append("--position-embedding-type alibi: what is added to the scores is not priced")
    word = reading.text("--glu-activation")
    if word is not None and "model.activation" in fields:
        fields["model.activation"] = _GATED.get(word, "swiglu")
    padded = reading.count("--pad-vocab-size-to", None)
    if padded is not None and "model.vocab" in fields:
        fields["model.vocab"] = padded
    if reading.flag("--embed-layernorm") and "model.layers" in fields:
        fields["model.embedding_norm"] = True
    _read_experts(reading, fields)
    _read_stages(reading, fields)


def _read_stages(reading: Reading, fields: dict[str, Any]) -> None:
    """DeepSpeed divides layers evenly, by type; BLOOM counts the embedding and the head among them."""
    stages, layers = fields["strategy.pp"], fields.get("model.layers")
    ends = "embedding" in str(reading.value("--pp-partition-method", ""))
    if stages == 1 or layers is None:
        return
    each = (layers + 2) // stages
    if ends and (layers + 2) % stages == 0 and each > 1:
        fields["strategy.stage_layers"] = (each - 1, *(each,) * (stages - 2), each - 1)
    elif layers % stages:
        fields["strategy.stage_layers"] = "balanced"


def _read_experts(reading: Reading, fields: dict[str, Any]) -> None:
    chosen, ep = reading.count("--topk", 2), reading.count("--moe-expert-parallel-size", 1)
    if "model.moe.experts" not in fields:
        return
    if fields["model.moe.experts"] == 1:
        for path in [path for path in fields if path.startswith("model.moe.")]:
            del fields[path]
        fields.pop("strategy.expert_tp", None)
        return
    fields.update({"model.moe.top_k": chosen, "strategy.ep": ep, "model.moe.every": reading.count(
        "--expert-interval", 2)})  # fmt: skip
    if reading.text("--mlp-type", "standard") == "residual":
        fields["model.moe.shared_ffn"] = fields["model.ffn"]
