"""Any other model of transformers: its network is counted by a process of its own, and a decoder fitted to the counts.

The fitted decoder has the layers, the hidden and vocabulary sizes, the attention and the experts of the network, on
average over its layers where they differ, and MLPs as wide as all other matrices. What that leaves of the parameters,
less than 64 features of an MLP in each layer, and what the forward pass computes beyond its matrices, is stated in
`CodeCounts`: so parameters are exact, and FLOPs those of the traced forward pass.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.interop.huggingface import model_from_hf_config, name_in, read_config
from shardwise.interop.keys import NotDescribed
from shardwise.spec.counted import CodeCounts
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import parse_json
from shardwise.spec.installation import is_installed
from shardwise.spec.layers import (
    LONGEST,
    MOST_HEADS,
    MOST_LAYERS,
    WIDEST,
    LatentAttention,
    LayerRecord,
    pattern_of_layers,
)
from shardwise.spec.model import Matrix, MixtureOfExperts, Model
from shardwise.spec.parameters import embedding_parameters, head_parameters, layer_parameters

SECONDS = 180.0  # of all; the process gives itself fewer of processor time
_BARE = "give ⟨params=13B⟩ ⟨layers=40⟩ ⟨hidden=5120⟩"
# Features of MLPs, and of experts, that stand for matrices of other sizes: multiples, which ranks and kernels divide.
_EVEN, _EVEN_EXPERT = 64, 16
_LONGEST_LIST = 4 * MOST_LAYERS
_LONG_SEQUENCE = 8192  # at which FLOPs of scores below a hundredth of the others are left out
# The sizes that make a network large: least and most.
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), (1, MOST_LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, WIDEST)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "head_dim"), (0, WIDEST)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), (0, MOST_HEADS)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, MOST_HEADS)),
    "vocab_size": (1, 2**30),
}


def described_or_counted(config: Mapping[str, Any] | Path) -> Model:
    """The model that a ``config.json`` describes, or else the one that is counted of its code."""
    try:
        return model_from_hf_config(config)
    except NotDescribed as error:
        path, content = (config, read_config(config)) if isinstance(config, Path) else (None, config)
        return _counted(content, name_in(content, path), error)


def _counted(config: Mapping[str, Any], name: str, error: NotDescribed) -> Model:
    model_type = config.get("model_type")
    _check_sizes(config)
    for package in ("torch", "transformers"):
        if not is_installed(package):
            problem = f"{shown(model_type)} has no description here, and {package}, which could count it, is missing"
            raise SpecError("model_type", problem, f"pip install torch transformers, or {_BARE}")
    if not any(map(_is_in_transformers, (model_type, _inner(config).get("model_type")))):
        own = " and its own code (auto_map) is not run" if "auto_map" in config else ", nor known to transformers"
        raise SpecError(error.field, error.problem + own, f"{error.remedy}; or {_BARE}")
    return replace(_fitted(json.dumps(config, sort_keys=True, default=str)), name=name or str(model_type))


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def _is_in_transformers(model_type: Any) -> bool:
    """Whether the installed code names a type; read and not imported, which takes seconds."""
    found = importlib.util.find_spec("transformers")
    folders = (found.submodule_search_locations if found else None) or ()
    files = [file for folder in folders for file in Path(folder).glob("models/auto/*.py")]
    return any(f'"{model_type}"' in file.read_text("utf-8") for file in files)


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Raises SpecError for what would take a network too large to be described, or none."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("_config"):
            try:
                _check_sizes(value)
            except SpecError as error:
                raise error.under(key) from None
        if isinstance(value, list) and len(value) > _LONGEST_LIST:
            raise SpecError(key, f"has {len(value):,} entries", "correct that value of the config")
        if key not in _SIZES or value is None:
            continue
        least, most = _SIZES[key]
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool) or not isinstance(each, int) or not least <= each <= most:
                problem = f"{shown(each)} is not a whole number from {least} to {most:,}"
                raise SpecError(key, problem, "correct that value of the config")


@lru_cache(maxsize=32)  # a page asks for every change of a control
def _fitted(config: str) -> Model:
    counts = Counts.of(_answer(config))
    try:
        return fitted(counts)
    except SpecError as error:
        problem = f"no decoder has the sizes of {counts.code}: {error.line}"
        raise SpecError("model_type", problem, _BARE) from None


def _answer(config: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "shardwise.models.huggingface.counting"]
    model_type = shown(parse_json(config, "config").get("model_type"))
    try:
        done = subprocess.run(command, input=config.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        problem = f"takes more than {SECONDS:g} s"
    else:
        if done.stdout.endswith(b"\n"):
            answer: dict[str, Any] = parse_json(done.stdout, "counts")
            if "problem" not in answer:
                return answer
            problem = str(answer["problem"])
        elif done.returncode == -signal.SIGXCPU:
            problem = "takes too long to count"
        else:
            problem = f"its process ended ({done.returncode}); it may have needed too much memory"
    raise SpecError("model_type", f"{model_type} cannot be counted: {problem}", _BARE)


# -- what was counted ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of one layer: of matrices that every token passes, of vectors, and of all its ``experts``."""

    matrices: int
    vectors: int
    in_experts: int
    experts: int


@dataclass(frozen=True)
class NotedAttention:
    """One call of attention; ``window`` 0: a query sees all keys."""

    heads: int
    key_value_heads: int
    query: int
    value: int
    window: int


@dataclass(frozen=True)
class Counts:
    """The answer of the process (`models/huggingface/counting.py`); FLOPs are those of a token's forward pass."""

    code: str
    parameters: int
    layers: tuple[LayerCounts, ...]
    shape: Mapping[str, Any]
    flops: float | None  # of matmuls, but for experts; None where the code could not be traced
    flops_of_a_key: float
    attention: tuple[NotedAttention, ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Counts:
        return cls(
            f"{answer['code']} of transformers {answer['version']}",
            answer["parameters"],
            tuple(LayerCounts(**layer) for layer in answer["layers"]),
            answer,
            answer.get("flops"),
            answer.get("flops_of_a_key", 0.0),
            tuple(NotedAttention(*call) for call in answer.get("attention", ())),
        )

    @property
    def attends(self) -> float:
        """Heads times features of queries and values, of all attention together."""
        noted = sum(call.heads * (call.query + call.value) for call in self.attention)
        hidden = self.flops_of_a_key
        if self.flops and hidden * _LONG_SEQUENCE < self.flops / 100:
            hidden = 0.0  # states that its code passes on in plain PyTorch
        return noted + hidden / 2

    @property
    def in_layers(self) -> int:
        return sum(layer.matrices + layer.vectors + layer.in_experts for layer in self.layers)


# -- the decoder that is fitted to it ------------------------------------------------------------------------------


def fitted(counts: Counts) -> Model:
    """A decoder with these parameters to the digit, and these FLOPs."""
    model = _with_mlps(_with_norms(_with_attention(_outline(counts), counts), counts), counts)
    in_layers = sum(count * layer_parameters(model, kind).total for kind, count in model.layers_of_kinds)
    left = round(counts.in_layers - in_layers)
    ends = counts.parameters - counts.in_layers - embedding_parameters(model) - head_parameters(model)
    beyond = 0.0
    if counts.flops is not None:
        beyond = counts.flops / model.layers - _plain_flops(model) / model.layers
    assumed = tuple(_assumed(model, counts, beyond))
    return replace(
        model,
        counted=CodeCounts(
            code=counts.code,
            assumed=assumed,
            layer_parameters=left,
            end_parameters=round(ends),
            layer_flops=max(0.0, beyond),
        ),
    )


def _outline(counts: Counts) -> Model:
    shape = counts.shape
    return Model(
        layers=len(counts.layers),
        hidden=shape["hidden"],
        heads=1,
        ffn=1,
        vocab=shape["vocab"],
        max_seq=min(shape["max_seq"] or _LONG_SEQUENCE, LONGEST),
        activation="swiglu" if shape["gated"] else "gelu",
        norm="rmsnorm" if shape["rms"] else "layernorm",
        positions="rope" if shape["rotary"] else "none",
        tied_embeddings=shape["tied"],
        source=f"counted of {counts.code}",
    )


def _with_attention(model: Model, counts: Counts) -> Model:
    """Its heads, as narrow as the mean over all layers, and no wider than the layers' matrices allow."""
    shape, most = counts.shape, _weights_for_attention(model, counts)
    attends, heads, shared = counts.attends / model.layers, shape["heads"], shape["key_value_heads"]
    calls = counts.attention
    if calls:
        heads, shared = (max(getattr(call, name) for call in calls) for name in ("heads", "key_value_heads"))
    heads = heads or max(number for number in (1, 2, 4, 8, 16, 32, 64) if model.hidden % number == 0)
    shared = shared if shared and heads % shared == 0 else heads
    latent = shape["latent"]
    if latent and (counts.flops is None or len(calls) in (0, model.layers)):
        mla = LatentAttention(
            kv_rank=latent["kv_lora_rank"], nope_dim=latent["qk_nope_head_dim"], rope_dim=latent["qk_rope_head_dim"],
            value_dim=latent["v_head_dim"], q_rank=latent["q_lora_rank"],
        )  # fmt: skip
        found = replace(model, heads=heads, kv_heads=heads, head_dim=None if model.hidden % heads == 0 else 1, mla=mla)
        if _weights(found.attention_matrices) <= most:
            return found
    if counts.flops is None and not calls:
        features = float(max(1, model.hidden // heads))
    elif attends == 0:  # none at all: a key each, of one feature
        return replace(model, heads=heads, kv_heads=1, head_dim=1, sliding_window=1, positions="none")
    else:
        features = attends / (2 * heads)
    windows = Counter(call.window for call in calls if call.window)
    if windows:
        model = replace(model, sliding_window=windows.most_common(1)[0][0])
    for kept in dict.fromkeys((shared, 1)):
        narrow = min(max(1, round(features)), most // (2 * model.hidden * (heads + kept)))
        if narrow >= round(features) or kept == 1:
            break
    turned = model.positions if narrow % 2 == 0 else "none"
    return replace(model, heads=heads, kv_heads=kept, head_dim=max(1, narrow), positions=turned)


def _weights_for_attention(model: Model, counts: Counts) -> int:
    """How many weights a layer's attention may have: a feature of an MLP, or a router, is left of the mean layer."""
    return _mean(layer.matrices for layer in counts.layers) - max(
        _each_feature(model), model.hidden * max(layer.experts for layer in counts.layers)
    )


def _with_norms(model: Model, counts: Counts) -> Model:
    """Its norms, as far as the layers' vectors suffice, and one behind the layers if these have some."""
    vectors, hidden = _mean(layer.vectors for layer in counts.layers), model.hidden
    if model.mla:
        vectors -= (model.mla.q_rank or 0) + model.mla.kv_rank
    elif model.norm == "rmsnorm":
        query, key, *_ = (matrix.outputs for matrix in model.attention_matrices)
        for whole, each in ((False, 2 * model.head_size), (True, query + key)):
            widest = query if whole else model.head_size
            if counts.shape["normed_queries"] == widest and vectors >= each and not model.qk_norm:
                model, vectors = replace(model, qk_norm=True, qk_norm_whole=whole), vectors - each
    norms = min(counts.shape["norms"] or 2, 4, vectors // hidden)
    with_bias = model.norm == "layernorm" and vectors >= 2 * norms * hidden
    return replace(model, norms_per_layer=norms or 2, norm_weight=norms > 0, norm_bias=with_bias, final_norm=norms > 0)


def _with_mlps(model: Model, counts: Counts) -> Model:
    """MLPs of all other matrices; experts in all layers, and fewer, where those with experts have no attention."""
    attention, each = _weights(model.attention_matrices), _each_feature(model)
    layers, experts = counts.layers, max(layer.experts for layer in counts.layers)
    if not experts:
        model = replace(model, ffn=max(1, _width(_mean(layer.matrices for layer in layers) - attention, each)))
        return _in_order(model, counts, [False] * len(layers))
    router, chosen = model.hidden * experts, min(counts.shape["top_k"] or experts, experts)
    routed = [layer for layer in layers if layer.experts]
    plain = [layer for layer in layers if not layer.experts]
    inner = _width(_mean(layer.in_experts for layer in routed), experts * each, _EVEN_EXPERT)
    shared = _width(_mean(layer.matrices for layer in routed) - attention - router, each)
    dense = _width(_mean(layer.matrices for layer in plain) - attention, each) if plain else inner
    if min(inner, shared + 1, dense) < 1:  # some layers have less than the mean attention
        shared = _width(_mean(layer.matrices for layer in layers) - attention - router, each)
        dense = inner = _width(_mean(layer.in_experts for layer in layers), experts * each, _EVEN_EXPERT)
        routed = list(layers)
    mixture = MixtureOfExperts(experts=experts, top_k=chosen, ffn=max(1, inner), shared_ffn=max(0, shared))
    model = replace(model, ffn=max(1, dense), moe=mixture)
    return _in_order(model, counts, [len(routed) == len(layers) or layer.experts > 0 for layer in layers])


def _in_order(model: Model, counts: Counts, routed: list[bool]) -> Model:
    """The model with its layers in the order of the network."""
    windowed = [call.window > 0 for call in counts.attention]
    if len(windowed) != model.layers:  # of several calls a layer, or of none, the share
        share = sum(windowed) / len(windowed) if windowed else float(model.sliding_window is not None)
        windowed = [index < round(share * model.layers) for index in range(model.layers)]
    layers = tuple(
        LayerRecord(mixer="window" if window else "full", feed_forward="mixture" if experts else "dense")
        for window, experts in zip(windowed, routed)
    )
    return model if model.every_layer == layers else replace(model, pattern=pattern_of_layers(layers))


def _plain_flops(model: Model) -> float:
    """FLOPs of a token by all matrices but those of experts."""
    attention = _weights(model.attention_matrices)
    dense = (model.layers - model.moe_layers) * _weights(model.mlp_matrices(model.ffn))
    shared = model.mlp_matrices(model.moe.shared_ffn) if model.moe and model.moe.shared_ffn else ()
    routed = model.moe_layers * (_weights(shared) + _weights(model.router_matrices))
    return 2.0 * (model.layers * attention + dense + routed + _weights((model.head_matrix,)))


def _assumed(model: Model, counts: Counts, beyond: float) -> Iterator[str]:
    """What the fit takes as given, for the note."""
    calls, number = counts.attention, model.layers
    if counts.flops is None:
        yield "its forward pass is not traced: every matrix is multiplied once, and every layer attends to all keys"
    elif not counts.attends:
        yield "no layer attends: states are priced by their matmuls"
    elif calls and len(calls) < number:
        yield f"{len(calls)} of {number} layers attend, the others are priced by their matmuls; a mean layer is priced"
    if model.moe and not counts.shape["top_k"]:
        yield "all experts are taken to run for every token"
    if beyond * number < -0.02 * (counts.flops or 0.0):
        unused = -beyond * number / _plain_flops(model)
        yield f"{unused:.0%} of its matrices, which its code does not multiply by every token, are priced as if it did"
    wanted = counts.attends / number
    if counts.flops is not None and model.mla is None and wanted > 1.1 * model.heads * 2 * model.head_size:
        yield "attention is priced as narrow as its weights"
    if counts.shape["without_head"]:
        yield "a head is added to its text model"


def _weights(matrices: tuple[Matrix, ...]) -> int:
    return sum(matrix.parameters for matrix in matrices)


def _width(weights: int, each: int, multiple: int = _EVEN) -> int:
    """The features that so many weights make; where they make no whole number, so many that ranks can divide them."""
    width, left = divmod(weights, each)
    return width - width % multiple if width > multiple and (left or width % 16) else width


def _each_feature(model: Model) -> int:
    """Weights of one feature of an MLP."""
    return (3 if model.gated else 2) * model.hidden


def _mean(values: Iterator[int]) -> int:
    """The whole part of the mean."""
    numbers = list(values)
    return sum(numbers) // len(numbers)
