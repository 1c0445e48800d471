"""What a transformer is: its shape, and the matrices that follow from it.

`Model` is the noun a user writes. `Model.attention_matrices` and its siblings list every weight matrix once,
with how tensor parallelism splits it; parameter counts, FLOPs, memory and communication all read that list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Literal

from shardwise.spec.codec import Spec, count
from shardwise.spec.counted import CodeCounts
from shardwise.spec.errors import SpecError
from shardwise.spec.layers import (
    LONGEST,
    MOST_HEADS,
    MOST_LAYERS,
    WIDEST,
    DeltaNet,
    LatentAttention,
    LayerRecord,
    Mixer,
    layers_of_pattern,
)
from shardwise.spec.numerics import Numerics

Split = Literal["column", "row", "none"]


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
    STATE_INPUTS = "inputs of states"
    STATE_RATES = "rates of states"
    STATE_OUTPUT = "output of states"
    SHARED_GATE = "shared gate"
    ROUTER = "router"
    HEAD = "head"


UP_PROJECTIONS = (MatrixRole.QUERY_UP, MatrixRole.KEY_VALUE_UP)  # of latent attention


@dataclass(frozen=True)
class Matrix:
    """A linear layer: `inputs` → `outputs` features."""

    role: MatrixRole
    """What it is for."""
    inputs: int
    """Input features."""
    outputs: int
    """Output features."""
    split: Split
    """What tensor parallelism cuts: the outputs with their bias (`column`), the inputs while the bias stays whole
    (`row`), or nothing."""
    bias: bool = False
    """Whether it adds one."""
    groups: int = 0
    """Heads that the outputs consist of; with fewer heads than ranks they are replicated (KV heads under GQA)."""

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
class MixtureOfExperts(Spec):
    """Routed experts: how many, how many per token, how wide, and in which layers."""

    experts: int = count(maximum=MOST_HEADS)
    """Routed experts of a layer."""
    top_k: int = count(maximum=MOST_HEADS)
    """Experts that a token is sent to."""
    ffn: int = count(maximum=WIDEST)
    """Inner features of an expert."""
    shared_ffn: int = count(0, minimum=0, maximum=WIDEST)
    """Inner features of the shared experts together. 0: there are none."""
    shared_gate: bool = False
    """A gate weighs the shared experts' output."""
    dense_layers: int = count(0, minimum=0, maximum=MOST_LAYERS)
    """First layers without experts."""
    every: int = count(1, maximum=MOST_LAYERS)
    """Of the layers behind these, every n-th has experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How scores become weights."""
    router_bias: bool = False
    """A bias that balances the load is added to scores where experts are chosen, not to their weights (DeepSeek-V3)."""
    router_logit_bias: bool = False
    """The router's linear layer has a bias, which is trained (gpt-oss)."""
    weighs_inputs: bool = False
    """A token's expert reads it times its weight, in place of a weighted output (Llama 4); with `top_k: 1` only."""
    groups: int = count(1, maximum=MOST_HEADS)
    """Groups that experts are divided into."""
    groups_used: int = count(1, maximum=MOST_HEADS)
    """Groups that a token's experts may come from."""

    def check(self) -> None:
        if self.top_k > self.experts:
            raise SpecError("top_k", f"{self.top_k} is more than {self.experts} experts", "lower top_k")
        if self.weighs_inputs and self.top_k > 1:
            raise SpecError("weighs_inputs", f"true, but tokens are sent to {self.top_k} experts", "set top_k: 1")
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
    """A decoder (or BERT-like encoder) by its shape; every size is a whole number of features."""

    layers: int = count(maximum=MOST_LAYERS)
    """Transformer layers."""
    hidden: int = count(maximum=WIDEST)
    """Features of the hidden states."""
    heads: int = count(maximum=MOST_HEADS)
    """Query heads."""
    ffn: int = count(maximum=WIDEST)
    """Inner features of a dense MLP."""
    vocab: int = count(maximum=2**30)
    """Tokens of the vocabulary."""
    name: str = "custom"
    """What reports call it."""
    max_seq: int = count(2048, maximum=LONGEST)
    """Longest sequence; with learned positions also their number."""
    kv_heads: int | None = count(None, maximum=MOST_HEADS)
    """Key-value heads; by default as many as query heads."""
    head_dim: int | None = count(None, maximum=WIDEST)
    """Features of a head; by default `hidden` / `heads`."""
    activation: Literal["gelu", "relu", "relu2", "xielu", "swiglu", "geglu"] = "gelu"
    """Activation of the MLP; `relu2` is the square of `relu` (arXiv 2109.08668); `xielu` learns two numbers in each
    layer (arXiv 2411.13010); `swiglu` and `geglu` have a gate."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of the norms."""
    positions: Literal["learned", "rope", "none"] = "rope"
    """How positions enter."""
    tied_embeddings: bool = False
    """The head shares the embedding's weights."""
    qkv_bias: bool = False
    """Queries, keys and values have biases."""
    attention_out_bias: bool = False
    """The projection after attention has a bias."""
    mlp_bias: bool = False
    """The MLP has biases."""
    lm_head_bias: bool = False
    """The head has a bias."""
    qk_norm: bool = False
    """Queries and keys are normed, each head by itself."""
    qk_norm_rotated: bool = False
    """They are normed behind rope, in layers that have it (Hunyuan)."""
    qk_norm_weight: bool = True
    """These norms have a weight (not in Llama 4)."""
    qk_norm_whole: bool = False
    """The queries of all heads are normed together, and the keys (OLMo-2)."""
    attention_gate: bool = False
    """Queries bring a gate, as wide as they are, of attention's output (Qwen3-Next)."""
    attention_sinks: bool = False
    """Heads have a trained logit in the denominator of their softmax, which takes weight without a value (gpt-oss)."""
    norms_per_layer: int = count(2, minimum=0, maximum=16)
    """Two: before attention and before the MLP. Four: also behind both (Gemma 2). One, in a parallel block, serves both
    (Phi)."""
    norm_after: bool = False
    """The two norms stand behind attention and MLP instead (OLMo-2)."""
    norm_weight: bool = True
    """Norms have a weight; without, they learn nothing (OLMo)."""
    norm_bias: bool = True
    """Norms have a bias."""
    parallel_block: bool = False
    """Attention and MLP read the same hidden states (GPT-NeoX)."""
    final_norm: bool = True
    """A norm before the head."""
    causal: bool = True
    """A query attends to earlier keys only."""
    sliding_window: int | None = count(None, maximum=LONGEST)
    """Number of keys that a query attends to."""
    sliding_window_every: int = count(1, maximum=MOST_LAYERS)
    """Above 1: every n-th layer attends to all keys instead (Gemma). 1: none does (Mistral)."""
    attention_chunk: int | None = count(None, maximum=LONGEST)
    """Tokens of a chunk, for layers whose queries attend to keys of their own chunk only (Llama 4)."""
    pattern: tuple[LayerRecord, ...] = ()
    """Layers in order, from the first again until there are `layers`. By default they follow from `sliding_window`,
    `sliding_window_every`, `moe.dense_layers` and `moe.every`."""
    token_types: int = count(0, minimum=0, maximum=MOST_HEADS)
    """Embeddings of token types (BERT)."""
    embedding_norm: bool = False
    """A norm behind the embeddings (BERT)."""
    pooler: bool = False
    """A dense layer on the first token (BERT)."""
    mlm_head: bool = False
    """A dense layer and a norm before the head (BERT)."""
    mtp_layers: int = count(0, minimum=0, maximum=MOST_LAYERS)
    """Multi-token prediction modules."""
    mla: LatentAttention | None = None
    """Latent attention, in place of heads of keys and values."""
    delta: DeltaNet | None = None
    """Gated delta nets, in place of attention in layers with that mixer."""
    moe: MixtureOfExperts | None = None
    """Experts, in place of some or all dense MLPs."""
    numerics: Numerics = Numerics()
    """What only computing needs."""
    counted: CodeCounts | None = None
    """What its code has beyond these fields, where it is priced from that."""
    published_parameters: str | int | None = None
    """Parameters that the source prints: a whole number is exact, text such as "174.6B" right to its digits."""
    source: str = ""
    """Where the shape is published."""

    def __hash__(self) -> int:
        """Of what mostly distinguishes models, as prices look one up thousands of times."""
        return hash((self.layers, self.hidden, self.ffn))

    def check(self) -> None:
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            raise SpecError("kv_heads", f"{kv_heads} does not divide {self.heads} query heads", "use a divisor")
        if self.head_dim is None and self.mla is None and self.hidden % self.heads:
            problem = f"{self.heads} does not divide hidden {self.hidden}"
            raise SpecError("heads", problem, "give head_dim or use a divisor")
        if self.qk_norm_whole and not self.qk_norm:
            raise SpecError("qk_norm_whole", "true, but queries and keys are not normed", "set qk_norm: true")
        if self.qk_norm_rotated and (not self.qk_norm or self.qk_norm_whole):
            problem = "true needs queries and keys that are normed head by head"
            raise SpecError("qk_norm_rotated", problem, "set qk_norm: true and qk_norm_whole: false")
        if self.activation == "xielu" and self.moe:
            raise SpecError("activation", "xielu is not for mixtures of experts", "use another one")
        if self.norm_after and (self.norms_per_layer != 2 or self.parallel_block):
            problem = "true needs a layer of two norms, attention first"
            raise SpecError("norm_after", problem, "set norms_per_layer: 2 and parallel_block: false")
        if self.moe and self.moe.dense_layers > self.layers:
            raise SpecError("moe.dense_layers", f"{self.moe.dense_layers} is more than {self.layers} layers")
        if self.pattern:
            self._check_pattern()
        object.__setattr__(self, "kv_heads", kv_heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", max(1, self.hidden // self.heads))

    def _check_pattern(self) -> None:
        named = {"sliding_window_every": self.sliding_window_every > 1}
        if self.moe:
            named |= {"moe.dense_layers": self.moe.dense_layers > 0, "moe.every": self.moe.every > 1}
        for field in (field for field, given in named.items() if given):
            raise SpecError(field, "says what pattern says too", "give one of the two")
        needs = {
            "sliding_window": (self.sliding_window, any(layer.mixer == "window" for layer in self.pattern)),
            "attention_chunk": (self.attention_chunk, any(layer.mixer == "chunk" for layer in self.pattern)),
            "delta": (self.delta, any(layer.mixer == "delta" for layer in self.pattern)),
            "moe": (self.moe, any(layer.feed_forward == "mixture" for layer in self.pattern)),
        }
        for field, (value, used) in needs.items():
            if used and value is None:
                raise SpecError(field, "is missing, and a layer of the pattern needs it", "give it, or another pattern")
            if value is not None and not used:
                raise SpecError(field, "is used by no layer of the pattern", "leave it out, or add such a layer")
        if self.mla and self.attention_chunk:
            raise SpecError("attention_chunk", "is not for latent attention", "use full or window as mixer")
        if self.mla and self.delta:
            raise SpecError("delta", "is not described beside latent attention", "leave out mla")

    @cached_property
    def every_layer(self) -> tuple[LayerRecord, ...]:
        """The layers in order; those of prediction modules follow: they are like the last, with experts if any has."""
        layers = layers_of_pattern(self.pattern or tuple(map(self._usual_layer, range(self.layers))), self.layers)
        prediction = replace(layers[-1], feed_forward="mixture" if self.moe else "dense")
        return layers + self.mtp_layers * (prediction,)

    def _usual_layer(self, index: int) -> LayerRecord:
        """A layer of a model without a pattern."""
        windowed = self.sliding_window is not None and (
            self.sliding_window_every == 1 or (index + 1) % self.sliding_window_every > 0
        )
        behind = -1 if self.moe is None else index - self.moe.dense_layers
        mixture = self.moe is not None and behind >= 0 and behind % self.moe.every == self.moe.every - 1
        return LayerRecord(mixer="window" if windowed else "full", feed_forward="mixture" if mixture else "dense")

    @cached_property
    def kinds(self) -> tuple[LayerRecord, ...]:
        """The distinct layers, those without experts first."""
        return tuple(sorted(dict.fromkeys(self.every_layer), key=lambda layer: layer.feed_forward))

    @cached_property
    def kind_of_layer(self) -> tuple[int, ...]:
        """The place of every layer in `kinds`."""
        places = {kind: place for place, kind in enumerate(self.kinds)}
        return tuple(places[layer] for layer in self.every_layer)

    def count_kinds(self, layers: range) -> tuple[int, ...]:
        """How many of some layers in a row are of each of `kinds`."""
        held = self.kind_of_layer[layers.start : layers.stop]
        return tuple(held.count(place) for place in range(len(self.kinds)))

    @cached_property
    def layers_of_kinds(self) -> tuple[tuple[LayerRecord, int], ...]:
        """How many layers of each kind there are, without those of prediction modules."""
        return tuple(zip(self.kinds, self.count_kinds(range(self.layers))))

    def rotates(self, kind: LayerRecord) -> bool:
        """Whether such a layer rotates queries and keys by their positions."""
        return self.positions == "rope" and kind.rotary

    def experts_of(self, kind: LayerRecord) -> MixtureOfExperts | None:
        """What follows attention in such a layer, if that is a mixture."""
        return self.moe if kind.feed_forward == "mixture" else None

    def span_of(self, mixer: Mixer) -> int | None:
        """Keys that a query of such a layer attends to at most; None: all."""
        return {"window": self.sliding_window, "chunk": self.attention_chunk}.get(mixer)

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

    @property
    def activation_parameters(self) -> int:
        """Parameters of the activation of an MLP."""
        return 2 if self.activation == "xielu" else 0

    def is_moe_layer(self, index: int) -> bool:
        return self.every_layer[index].feed_forward == "mixture"

    @property
    def query_key_dim(self) -> int:
        """Features of one query or key head."""
        return self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_size

    @property
    def value_dim(self) -> int:
        return self.mla.value_dim if self.mla else self.head_size

    def mixer_matrices(self, kind: LayerRecord) -> tuple[Matrix, ...]:
        """The matrices of what mixes the tokens in such a layer."""
        return self._delta_matrices if kind.mixer == "delta" else self.attention_matrices

    @cached_property
    def _delta_matrices(self) -> tuple[Matrix, ...]:
        assert self.delta
        inputs, values = self.delta.convolved_features, self.delta.value_features
        return (  # with the gate of the output; rates of decay and of correction
            Matrix(MatrixRole.STATE_INPUTS, self.hidden, inputs + values, "column"),
            Matrix(MatrixRole.STATE_RATES, self.hidden, 2 * self.delta.value_heads, "column"),
            Matrix(MatrixRole.STATE_OUTPUT, values, self.hidden, "row"),
        )

    @cached_property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        h, a, kv, d = self.hidden, self.heads, self.key_value_heads, self.head_size
        if self.mla:
            return self._latent_attention_matrices()
        return (
            Matrix(MatrixRole.QUERY, h, (1 + self.attention_gate) * a * d, "column", self.qkv_bias),
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
        return (Matrix(MatrixRole.ROUTER, self.hidden, self.moe.experts, "none", self.moe.router_logit_bias), *gate)

    @cached_property
    def head_matrix(self) -> Matrix:
        """The output projection to the vocabulary; with tied embeddings its weights are the embedding's."""
        return Matrix(MatrixRole.HEAD, self.hidden, self.vocab, "column", self.lm_head_bias)
