"""Constants of a model's computation, which change no count, memory or time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.spec.codec import Spec, count, setting
from shardwise.spec.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Spec):
    """How rotary positions are stretched to sequences longer than those first trained with."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    """`linear` divides every position by `factor` (arXiv 2306.15595); `llama3` slows only the slow frequencies (arXiv
    2407.21783); `yarn` does so too and scales the attention logits (arXiv 2309.00071); `longrope` divides every
    frequency by a factor of its own (arXiv 2402.13753)."""
    factor: float = setting(above=0)
    """By how much positions are stretched."""
    original_seq: int | None = count(None)
    """Sequence length first trained with."""
    low_frequency: float = setting(1.0, above=0)
    """`llama3`: frequencies of fewer turns per original sequence are slowed by the whole factor."""
    high_frequency: float = setting(4.0, above=0)
    """`llama3`: frequencies of more turns are left as they are."""
    beta_fast: float = setting(32.0, above=0)
    """`yarn`: the same upper bound."""
    beta_slow: float = setting(1.0, above=0)
    """`yarn`: the same lower bound."""
    attention_factor: float | None = setting(None, above=0)
    """`yarn`: scale of the rotated features; by default it follows from `factor` and the two below."""
    mscale: float = setting(0.0, minimum=0)
    """`yarn`: coefficient of that formula for the rotated features."""
    mscale_all: float = setting(0.0, minimum=0)
    """`yarn`: the same for the whole logit (DeepSeek)."""
    truncate: bool = True
    """`yarn`: round the bounds between frequencies to whole ones."""
    short_factors: tuple[float, ...] = ()
    """`longrope`: a factor per frequency, for batches within `original_seq`."""
    long_factors: tuple[float, ...] = ()
    """`longrope`: the same for batches with positions beyond it."""

    def check(self) -> None:
        if (self.kind == "longrope") != bool(self.short_factors and self.long_factors):
            problem = "and long_factors belong to longrope, one for each frequency"
            raise SpecError("short_factors", problem, "give both, or another kind")
        if self.kind != "linear" and self.original_seq is None:
            raise SpecError("original_seq", "is missing", f"{self.kind} needs the length first trained with")
        if self.kind == "llama3" and self.high_frequency < self.low_frequency:
            raise SpecError("high_frequency", "is below low_frequency", "swap them")


@dataclass(frozen=True, kw_only=True)
class Numerics(Spec):
    """Constants of the computation, which change no count, memory or time; the defaults are those of a plain Llama."""

    norm_epsilon: float = setting(1e-5, above=0)
    """Epsilon of norms."""
    gelu: Literal["tanh", "exact"] = "tanh"
    """How gelu is computed."""
    rope_theta: float = setting(10_000.0, above=0)
    """Base of rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched."""
    rotary_share: float = setting(1.0, above=0, maximum=1)
    """Share of a head's features, the first ones, that rope rotates."""
    windowed_rope_theta: float | None = setting(None, above=0)
    """`rope_theta` of layers with a sliding window, where it differs (Gemma 3)."""
    norm_plus_one: bool = False
    """Norms multiply by one more than their weight (Gemma)."""
    embedding_scale: float = setting(1.0, above=0)
    """Factor of the token embeddings."""
    attention_scalar: float | None = setting(None, above=0)
    """Attention scores are divided by its square root; by default by that of the head size."""
    attention_softcap: float | None = setting(None, above=0)
    """Cap c of attention scores, as c·tanh(x/c) (Gemma 2, arXiv 2408.00118)."""
    logit_softcap: float | None = setting(None, above=0)
    """The same of the logits."""
    swiglu_limit: float | None = setting(None, above=0)
    """Bound of the gate from above and of the up projection on both sides, to which one is added then (gpt-oss)."""
    swiglu_alpha: float = setting(1.702, above=0)
    """Factor in the sigmoid of a gate with such a bound."""
    logit_scale: float = setting(1.0, above=0)
    """Factor of the logits (Cohere, Granite)."""
    residual_scale: float = setting(1.0, above=0)
    """Factor of what attention and MLP add to the hidden states (Granite)."""
    long_query_scale: float | None = setting(None, above=0)
    """s, where queries of layers without rope grow along a sequence: by 1 + s·log(1 + ⌊(position + 1) / floor⌋) (Llama
    4, arXiv 2501.19399)."""
    long_query_floor: int = count(8192, maximum=2**30)
    """That floor: the first tokens, whose queries do not grow."""
    long_query_layers: Literal["without-rope", "with-rope"] = "without-rope"
    """The layers whose queries grow; those `with-rope` count positions in that formula from -1 (Ministral 3)."""
    clip_qkv: float | None = setting(None, above=0)
    """Bound of queries, keys and values (OLMo)."""
    renormalise_top_k: bool = True
    """Weights of a token's chosen experts are made to sum to one."""
    router_scale: float = setting(1.0, above=0)
    """Factor of these weights, afterwards."""
    balance_loss: float = setting(1e-3, minimum=0)
    """Coefficient of the sequence-wise balance loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    bias_rate: float = setting(1e-3, minimum=0)
    """Step of the router's bias, which balances experts without a loss (same section)."""
    prediction_loss: float = setting(0.3, minimum=0)
    """Weight of the loss of all prediction modules together (section 4.2: 0.3, and 0.1 after 10T tokens)."""
