"""What the words in a table mean: precision, recompute, schedule, sharding, context parallelism, and what is counted.

Tables name one thing in many ways; every reader here takes all of them, and says nothing (None) where the cell does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardwise.spec.schedules import job_schedules


def precision(text: str, fp32_gradients: bool) -> str:
    """The recipe that a cell names; ``fp32_gradients`` is what 16-bit training accumulates in unless it says."""
    words = text.lower().replace("_", "-")
    if "fp4" in words:
        return "nvfp4"
    if re.search(r"mx-?fp8|fp8-?mx|\bmx", words):
        return "mxfp8"
    if re.search(r"fp8|float8|e4m3", words):
        return "fp8"
    if re.match(r"(tf|fp|float)32", words):
        return "fp32"
    if re.match(r"(fp|float)16|half", words):
        return "fp16"
    if re.search(r"(bf16|16-bit) grad", words):
        return "bf16"
    return "bf16-fp32-grads" if fp32_gradients or re.search(r"(fp|float)32 grad", words) else "bf16"


_UNSAID = re.compile(r"(unknown|see |n/?a\b|not |\?|-|$)")
_OPERATORS = (
    ("attention", r"att"),
    ("up-projection", r"up.?proj"),
    ("activation", r"\b(moe.)?act\b|swiglu|gelu|act(ivation)?.?func"),
    ("norm", r"norm"),
)


def recompute(text: str, precision_text: str) -> dict[str, Any] | None:
    """The fields of the strategy that a cell names."""
    words = _of_this_precision(text.lower(), precision_text).replace("_", "-").strip()
    if _UNSAID.match(words):
        return None
    if re.match(r"(no|none|off|false|0)\b", words):
        return {"recompute": "none"}
    if re.search(r"full|^(all|yes|on|true|1)\b|checkpoint", words) and "selective" not in words:
        block = re.search(r"block\D*(\d+)", words)
        return {"recompute": "full", **({"recompute_layers": int(block[1])} if block else {})}
    if re.search(r"per-?op|\bsac\b|alternate|every other", words):
        return {"recompute": "selective", "recompute_operators": ["alternate-products"]}
    named = [name for name, pattern in _OPERATORS if re.search(pattern, words)]
    if named or "selective" in words:
        return {"recompute": "selective", "recompute_operators": named or ["attention"]}
    return None


def _of_this_precision(text: str, precision_text: str) -> str:
    """Of "5 layers (FP8) / none (BF16)" the part for the row's own precision."""
    for part in text.split(" / "):
        named = re.findall(r"fp4|fp8|bf16", part)
        if named and any(name in precision_text.lower() for name in named):
            return part
    return text.split(" / ")[0]


def schedule(text: str) -> str | None:
    """The schedule that a cell names."""
    words = re.sub(r" (if|when) .*", "", text.lower()).strip()
    if "interleav" in words or words.endswith(("-i", "vpp")):
        return "interleaved"
    squeezed = re.sub(r"[^a-z0-9]", "", words)
    return {re.sub(r"[^a-z0-9]", "", name): name for name in job_schedules()}.get(squeezed)


def zero(text: str) -> int | None:
    """The stage of ZeRO that a cell names."""
    words = text.lower()
    stage = re.search(r"zero.?(\d)", words) or re.match(r"\s*(\d)(?:\.0)?\b", words)
    if stage:
        return min(3, int(stage[1]))
    if re.search(r"[fh]sdp", words):
        return 3
    if "distributed" in words and "opt" in words:
        return 1
    return 0 if re.match(r"(none|no|ddp|off)\b", words) else None


def context_method(text: str) -> str | None:
    """How a note says that context parallelism runs."""
    found = re.search(r"cp ?= ?([a-z0-9-]+)|(ring|ulysses|all-?gather)[- ]?(?:attention )?cp", text.lower())
    words = (found[1] or found[2]) if found else ""
    methods = {"a": "ulysses", "u": "ulysses", "r": "ring", "p": "ring"}
    return "all-gather" if re.match(r"all-?gather", words) else methods.get(words[:1])


@dataclass(frozen=True)
class Counted:
    """What a TFLOP/s or MFU figure counts: the convention, whether recomputed FLOPs are in it, and over which peak."""

    convention: str | None = None
    recomputed: bool = False
    peak: float | None = None


def counted(text: str) -> Counted:
    """What the row's own flops_convention says; a formula for hardware FLOPs beside one for model FLOPs is not it."""
    words = ";".join(part for part in text.lower().split(";") if not part.strip().startswith("hfu"))
    convention = None
    if re.search(r"causal|halve|half", words):
        convention = "causal"
    elif re.search(r"(72|96) ?\*?bl|full.?attention|non-?causal", words):
        convention = "full-attention"
    elif re.search(r"6 ?\*? ?n ?\*? ?d\b", words):
        convention = "6nd"
    elif "palm" in words:
        convention = "palm"
    # 96·B·L·s·h² is Narayanan et al. 2021 (arXiv 2104.04473) eq. 3: four passes, one of them recomputed.
    recomputed = bool(re.search(r"96 ?\*?bl|hardware|hfu|(with|incl\w*|plus|\+) (the )?recomput", words))
    peak = re.search(r"(\d+(?:\.\d+)?) ?tf|/ ?(\d+(?:\.\d+)?e1[2-6])", words)
    value = None if peak is None else float(peak[1]) * 1e12 if peak[1] else float(peak[2])
    return Counted(convention, recomputed, value)
