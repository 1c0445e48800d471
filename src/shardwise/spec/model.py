"""What a transformer is: its shape, and the matrices that follow from it.

`Model` is the noun a user writes. `Model.attention_matrices` and its siblings list every weight matrix once,
with how tensor parallelism splits it; parameter counts, FLOPs, memory and communication all read that list.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
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
    """Constants of the computation, which change no count, memory or time; the defaults are those of a plain Llama.

    ``router_scale`` multiplies the weights of the chosen experts, which ``renormalise_top_k`` first makes sum to
    one. ``norm_plus_one``: norms multiply by one more than their weight (Gemma). ``embedding_scale`` multiplies the
    token embeddings. Attention scores are divided by the root of ``attention_scalar``, or of the head size.
    ``attention_softcap`` and ``logit_softcap`` c make c·tanh(x/c) of scores and logits (Gemma 2, arXiv 2408.00118);
    ``clip_qkv`` bounds queries, keys and values (OLMo). Rope rotates the first ``rotary_share`` of a head's features,
    in layers with a sliding window by ``windowed_rope_theta`` where it is given (Gemma 3).

    ``balance_loss`` is the coefficient of the sequence-wise balance loss and ``bias_rate`` the step of the
    bias that balances without a loss (DeepSeek-V3, arXiv 2412.19437 section 2.1.2). ``prediction_loss`` is the weight
    of the loss of prediction modules, of which each has an equal share (section 4.2: 0.3, and 0.1 after 10T tokens).
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
    prediction_loss: float = _not_negative(0.3)


Split = Literal["column", "row", "none"]
# Far beyond any model: anything larger is a mistake, and would keep a search busy for ever.
MOST_LAYERS, WIDEST, MOST_HEADS, LONGEST = 2048, 2**24, 2**16, 2**30


class MatrixRole(Enum):
    """What a weight matrix is for."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_OUTPUT = "attention output"
    QUERY_DOWN = "query down"
    QUERY_UP = "query up"
    KEY_VALUE_DOWN = "key-value down"
    KEY_VALUE_UP = "key-value up"
    UP = "up"
    GATE = "gate"
    DOWN = "down"
    SHARED_GATE = "shared gate"
    ROUTER = "router"
    HEAD = "head"


UP_PROJECTIONS = (MatrixRole.QUERY_UP, MatrixRole.KEY_VALUE_UP)  # of latent attention


@dataclass(frozen=True)
class Matrix:
    """One linear layer: ``inputs`` → ``outputs`` features.

    ``split`` is what tensor parallelism cuts: a column-parallel matrix its outputs (and bias), a
    row-parallel one its inputs (the bias stays whole). ``groups`` is the number of heads the outputs
    are made of: fewer groups than ranks are replicated (KV heads under GQA).
    """

    role: MatrixRole
    inputs: int
    outputs: int
    split: Split
    bias: bool = False
    groups: int = 0

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)

    def parameters_per_rank(self, tensor_parallel: int) -> float:
        """Parameters of this matrix that one of ``tensor_parallel`` ranks holds."""
        weights, bias = self.inputs * self.outputs, self.outputs if self.bias else 0
        if self.split == "none":
            return weights + bias
        share = self.share(tensor_parallel)
        return weights * share + (bias * share if self.split == "column" else bias)

    def share(self, tensor_parallel: int) -> float:
        """The part of this matrix one rank holds and computes with."""
        if self.split == "none":
            return 1.0
        return 1 / min(tensor_parallel, self.groups) if self.groups else 1 / tensor_parallel


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head sizes."""

    kv_rank: int = count(maximum=WIDEST)
    nope_dim: int = count(maximum=WIDEST)
    rope_dim: int = count(maximum=WIDEST)
    value_dim: int = count(maximum=WIDEST)
    q_rank: int | None = count(None, maximum=WIDEST)

    @property
    def narrow_features(self) -> int:
        """Latent features of a token: compressed queries, keys and values, and the rotated key."""
        return (self.q_rank or 0) + self.kv_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Spec):
    """Routed experts: how many, how many per token, how wide, and in which layers."""

    experts: int = count(maximum=MOST_HEADS)
    top_k: int = count(maximum=MOST_HEADS)
    ffn: int = count(maximum=WIDEST)
    shared_ffn: int = count(0, minimum=0, maximum=WIDEST)
    shared_gate: bool = False
    dense_layers: int = count(0, minimum=0, maximum=MOST_LAYERS)
    every: int = count(1, maximum=MOST_LAYERS)
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    groups: int = count(1, maximum=MOST_HEADS)
    groups_used: int = count(1, maximum=MOST_HEADS)

    def check(self) -> None:
        if self.top_k > self.experts:
            raise SpecError("top_k", f"{self.top_k} is more than {self.experts} experts", "lower top_k")
        if self.experts % self.groups:
            raise SpecError("groups", f"{self.groups} does not divide {self.experts} experts", "use a divisor")
        if self.groups_used > self.groups:
            raise SpecError("groups_used", f"{self.groups_used} is more than {self.groups} groups", "lower it")
        reached = self.groups_used * self.experts // self.groups
        if self.top_k > reached:
            problem = f"{self.top_k} is more than the {reached} experts of {self.groups_used} groups"
            raise SpecError("top_k", problem, "lower it, or use more groups")
        if self.shared_gate and not self.shared_ffn:
            raise SpecError("shared_gate", "there is no shared expert", "give shared_ffn, or set shared_gate: false")


@dataclass(frozen=True, kw_only=True)
class Model(Spec):
    """A decoder (or BERT-like encoder) by its shape; every size is a whole number of features.

    ``sliding_window`` limits the keys of a query; with ``sliding_window_every: n`` above 1 every n-th layer
    attends to all keys instead (Gemma), with 1 none does (Mistral). A layer's norms stand before attention and MLP,
    with ``norm_after`` behind them (OLMo-2), and four on both sides (Gemma 2); those of a ``parallel_block`` read the
    same hidden states (GPT-NeoX), or one serves both (Phi). ``norm_weight: false`` is a norm that learns nothing
    (OLMo). ``qk_norm_whole`` norms the queries of all heads together, and the keys (OLMo-2). ``numerics`` holds what
    only computing needs.
    ``published_parameters`` is what the source prints: a whole number is exact, text such as "174.6B" right to its
    digits.
    """

    layers: int = count(maximum=MOST_LAYERS)
    hidden: int = count(maximum=WIDEST)
    heads: int = count(maximum=MOST_HEADS)
    ffn: int = count(maximum=WIDEST)
    vocab: int = count(maximum=2**30)
    name: str = "custom"
    max_seq: int = count(2048, maximum=LONGEST)
    kv_heads: int | None = count(None, maximum=MOST_HEADS)
    head_dim: int | None = count(None, maximum=WIDEST)
    activation: Literal["gelu", "relu", "swiglu", "geglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    positions: Literal["learned", "rope", "none"] = "rope"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norms_per_layer: int = count(2, minimum=0, maximum=16)
    norm_after: bool = False
    norm_weight: bool = True
    norm_bias: bool = True
    parallel_block: bool = False
    final_norm: bool = True
    causal: bool = True
    sliding_window: int | None = count(None, maximum=LONGEST)
    sliding_window_every: int = count(1, maximum=MOST_LAYERS)
    token_types: int = count(0, minimum=0, maximum=MOST_HEADS)
    embedding_norm: bool = False
    pooler: bool = False
    mlm_head: bool = False
    mtp_layers: int = count(0, minimum=0, maximum=MOST_LAYERS)
    mla: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    numerics: Numerics = Numerics()
    published_parameters: str | int | None = None
    source: str = ""

    def check(self) -> None:
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            raise SpecError("kv_heads", f"{kv_heads} does not divide {self.heads} query heads", "use a divisor")
        if self.head_dim is None and self.mla is None and self.hidden % self.heads:
            problem = f"{self.heads} does not divide hidden {self.hidden}"
            raise SpecError("heads", problem, "give head_dim or use a divisor")
        if self.qk_norm_whole and not self.qk_norm:
            raise SpecError("qk_norm_whole", "true, but queries and keys are not normed", "set qk_norm: true")
        if self.norm_after and (self.norms_per_layer != 2 or self.parallel_block):
            problem = "true needs a layer of two norms, attention first"
            raise SpecError("norm_after", problem, "set norms_per_layer: 2 and parallel_block: false")
        if self.moe and self.moe.dense_layers > self.layers:
            raise SpecError("moe.dense_layers", f"{self.moe.dense_layers} is more than {self.layers} layers")
        object.__setattr__(self, "kv_heads", kv_heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", max(1, self.hidden // self.heads))

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def rotated_features(self) -> int:
        """Features of a head that rope rotates."""
        return self.mla.rope_dim if self.mla else int(self.head_size * self.numerics.rotary_share)

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @cached_property
    def moe_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return sum(self.is_moe_layer(index) for index in range(self.layers)) if self.moe else 0

    def is_moe_layer(self, index: int) -> bool:
        if self.moe is None or index < self.moe.dense_layers:
            return False
        return (index - self.moe.dense_layers) % self.moe.every == self.moe.every - 1

    @property
    def query_key_dim(self) -> int:
        """Features of one query or key head."""
        return self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_size

    @property
    def value_dim(self) -> int:
        return self.mla.value_dim if self.mla else self.head_size

    @cached_property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        h, a, kv, d = self.hidden, self.heads, self.key_value_heads, self.head_size
        if self.mla:
            return self._latent_attention_matrices()
        return (
            Matrix(MatrixRole.QUERY, h, a * d, "column", self.qkv_bias),
            Matrix(MatrixRole.KEY, h, kv * d, "column", self.qkv_bias, groups=kv),
            Matrix(MatrixRole.VALUE, h, kv * d, "column", self.qkv_bias, groups=kv),
            Matrix(MatrixRole.ATTENTION_OUTPUT, a * d, h, "row", self.attention_out_bias),
        )

    def _latent_attention_matrices(self) -> tuple[Matrix, ...]:
        assert self.mla
        h, a, mla, queries = self.hidden, self.heads, self.mla, self.heads * self.query_key_dim
        if mla.q_rank is None:
            query: tuple[Matrix, ...] = (Matrix(MatrixRole.QUERY, h, queries, "column"),)
        else:
            query = (
                Matrix(MatrixRole.QUERY_DOWN, h, mla.q_rank, "none"),
                Matrix(MatrixRole.QUERY_UP, mla.q_rank, queries, "column"),
            )
        return (
            *query,
            Matrix(MatrixRole.KEY_VALUE_DOWN, h, mla.kv_rank + mla.rope_dim, "none"),
            Matrix(MatrixRole.KEY_VALUE_UP, mla.kv_rank, a * (mla.nope_dim + mla.value_dim), "column"),
            Matrix(MatrixRole.ATTENTION_OUTPUT, a * mla.value_dim, h, "row", self.attention_out_bias),
        )

    def mlp_matrices(self, width: int) -> tuple[Matrix, ...]:
        """The MLP of one layer, or one expert, of the given width."""
        up = Matrix(MatrixRole.UP, self.hidden, width, "column", self.mlp_bias)
        gate = (Matrix(MatrixRole.GATE, self.hidden, width, "column", self.mlp_bias),) if self.gated else ()
        return (*gate, up, Matrix(MatrixRole.DOWN, width, self.hidden, "row", self.mlp_bias))

    @cached_property
    def router_matrices(self) -> tuple[Matrix, ...]:
        if self.moe is None:
            return ()
        gate = (Matrix(MatrixRole.SHARED_GATE, self.hidden, 1, "none"),) if self.moe.shared_gate else ()
        return (Matrix(MatrixRole.ROUTER, self.hidden, self.moe.experts, "none"), *gate)

    @cached_property
    def head_matrix(self) -> Matrix:
        """The output projection to the vocabulary; with tied embeddings its weights are the embedding's."""
        return Matrix(MatrixRole.HEAD, self.hidden, self.vocab, "column", self.lm_head_bias)
