"""What a model computes with beyond its shape: nothing here changes a count, a memory or a time.

The defaults are those of a plain Llama-like model; a Hugging Face ``config.json`` or a catalogue entry gives
the others.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.spec.codec import Spec, count
from shardwise.spec.errors import SpecError


def _positive(default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"above": 0})


def _not_negative(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"minimum": 0})


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Spec):
    """How rotary positions are stretched to sequences longer than those first trained with.

    ``linear`` divides every position by ``factor`` (arXiv 2306.15595). ``llama3`` slows only the slow
    frequencies, between ``low_frequency`` and ``high_frequency`` turns per original sequence (arXiv 2407.21783).
    ``yarn`` does so between ``beta_slow`` and ``beta_fast`` turns and scales the attention logits
    (arXiv 2309.00071): ``attention_factor`` where it is given, else by the formula with ``mscale`` and
    ``mscale_all``, of which DeepSeek moves the second from the rotated features to the whole logit. ``longrope``
    (arXiv 2402.13753) divides each frequency by its own of ``short_factors``, or of ``long_factors`` where a batch has
    positions beyond ``original_seq``.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float = _positive()
    original_seq: int | None = count(None)
    low_frequency: float = _positive(1.0)
    high_frequency: float = _positive(4.0)
    beta_fast: float = _positive(32.0)
    beta_slow: float = _positive(1.0)
    attention_factor: float | None = _positive(None)
    mscale: float = _not_negative(0.0)
    mscale_all: float = _not_negative(0.0)
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def check(self) -> None:
        if (self.kind == "longrope") != bool(self.short_factors and self.long_factors):
            problem = "and long_factors belong to longrope, one for each frequency"
            raise SpecError("short_factors", problem, "give both, or another kind")
        if self.kind != "linear" and self.original_seq is None:
            raise SpecError("original_seq", "is missing", f"{self.kind} needs the length first trained with")
        if self.kind == "llama3" and self.high_frequency <= self.low_frequency:
            raise SpecError("high_frequency", "is not above low_frequency", "swap them")


@dataclass(frozen=True, kw_only=True)
class Numerics(Spec):
    """Constants of the computation.

    ``router_scale`` multiplies the weights of the chosen experts, which ``renormalise_top_k`` first makes sum to
    one. ``norm_plus_one``: norms multiply by one more than their weight (Gemma). ``embedding_scale`` multiplies what is
    looked up. Products of queries and keys are divided by the root of ``attention_scalar``, or of the head size.
    ``attention_softcap`` and ``logit_softcap`` c make c·tanh(x/c) of them, and of the logits (Gemma 2, arXiv
    2408.00118); ``clip_qkv`` bounds queries, keys and values (OLMo). ``rotary_share`` of a head's features, the first,
    are turned by rope, in layers with a sliding window by ``windowed_rope_theta`` where it is given (Gemma 3).

    ``balance_loss`` is the coefficient of the sequence-wise balance loss and ``bias_rate`` the step of the
    bias that balances without a loss (DeepSeek-V3, arXiv 2412.19437 section 2.1.2).
    """

    norm_epsilon: float = _positive(1e-5)
    gelu: Literal["tanh", "exact"] = "tanh"
    rope_theta: float = _positive(10_000.0)
    rope_scaling: RopeScaling | None = None
    rotary_share: float = dataclasses.field(default=1.0, metadata={"above": 0, "maximum": 1})
    windowed_rope_theta: float | None = _positive(None)
    norm_plus_one: bool = False
    embedding_scale: float = _positive(1.0)
    attention_scalar: float | None = _positive(None)
    attention_softcap: float | None = _positive(None)
    logit_softcap: float | None = _positive(None)
    clip_qkv: float | None = _positive(None)
    renormalise_top_k: bool = True
    router_scale: float = _positive(1.0)
    balance_loss: float = _not_negative(1e-3)
    bias_rate: float = _not_negative(1e-3)
