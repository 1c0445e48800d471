"""The model in Megatron-LM's arguments: its dimensions, and the few switches that decide biases and layer kinds."""

from __future__ import annotations

import ast
from typing import Any

from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.target import Reading, word_for
from shardwise.interop.keys import integer
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.model import MixtureOfExperts, Model

# -- The constants a model computes with -------------------------------------------------------------
# Some are fixed in ``megatron/core``: Llama 3's scaling has 8192 original positions and frequency factors 1 and 4
# (``rotary_pos_embedding.py``), YaRN has 4096 original positions, beta 32 and 1, and needs latent attention
# (``MLATransformerConfig``). Softmax routing normalises over the chosen experts unless ``--moe-router-pre-softmax``;
# the fused bias and gelu of a layer with biases is the tanh form.

_BALANCE = "--moe-router-load-balancing-type"
_LLAMA3_SEQ, _YARN_SEQ = 8192, 4096

NUMERIC_REASONS = {
    "model.numerics.rope_scaling": "frequency factors and original length are fixed in Megatron's code",
    "model.numerics.renormalise_top_k": "sigmoid scores of several experts are always normalised",
    "model.numerics.gelu": "the fused gelu of layers with biases is the tanh form, the other the exact one",
}


def compose_numerics(model: Model) -> Settings:
    numerics = model.numerics
    settings: Settings = {"--norm-epsilon": numerics.norm_epsilon, **_rotary(model)}
    if model.activation == "gelu" and model.mlp_bias and numerics.gelu == "exact":
        settings["--no-bias-gelu-fusion"] = True
    if model.moe is not None:
        unnormalised = model.moe.router == "softmax" and not numerics.renormalise_top_k
        settings["--moe-router-pre-softmax"] = unnormalised or None
        settings["--moe-router-topk-scaling-factor"] = numerics.router_scale if numerics.router_scale != 1 else None
        settings[_BALANCE] = "seq_aux_loss" if numerics.balance_loss else "none"
        settings["--moe-aux-loss-coeff"] = numerics.balance_loss or None
        settings["--moe-router-bias-update-rate"] = numerics.bias_rate if _balancing_bias(model.moe) else None
    return settings


def _rotary(model: Model) -> Settings:
    if model.positions != "rope":
        return {}
    scaling = model.numerics.rope_scaling
    settings: Settings = {"--rotary-base": integer(model.numerics.rope_theta, model)}
    if model.mla is not None:
        settings["--rope-type"] = "rope"
    if scaling is None:
        return settings
    if scaling.kind == "linear" and scaling.factor.is_integer():
        settings["--rotary-seq-len-interpolation-factor"] = int(scaling.factor)
    elif scaling.kind == "llama3" and model.mla is None:
        settings.update({"--use-rope-scaling": True, "--rope-scaling-factor": scaling.factor})
    elif scaling.kind == "yarn" and model.mla is not None:
        settings.update({"--rope-type": "yarn", "--rotary-scaling-factor": scaling.factor})
        settings.update({"--mscale": scaling.mscale, "--mscale-all-dim": scaling.mscale_all})
    return settings


def interpret_numerics(reading: Reading, *, latent: bool, gelu: bool, biased: bool, experts: bool) -> dict[str, Any]:
    """Fields of ``model.numerics`` by their name in the model."""
    unfused = reading.flag("--no-bias-gelu-fusion")
    numerics: dict[str, Any] = {
        "norm_epsilon": reading.number("--norm-epsilon", 1e-5),
        "rope_theta": reading.number("--rotary-base", 10_000),
        **_read_scaling(reading, latent),
    }
    if gelu:
        numerics["gelu"] = "exact" if unfused or not biased else "tanh"
    if experts:
        balanced = reading.text(_BALANCE, "aux_loss") != "none"
        numerics["balance_loss"] = reading.number("--moe-aux-loss-coeff", 0) if balanced else 0
        numerics["bias_rate"] = reading.number("--moe-router-bias-update-rate", 1e-3)
        numerics["router_scale"] = reading.number("--moe-router-topk-scaling-factor", 1)
        numerics["renormalise_top_k"] = not reading.flag("--moe-router-pre-softmax")
    return {f"numerics.{name}": value for name, value in numerics.items()}


def _read_scaling(reading: Reading, latent: bool) -> dict[str, Any]:
    linear = reading.number("--rotary-seq-len-interpolation-factor")
    factor = reading.number("--rotary-scaling-factor", 1)
    scales = {"mscale": reading.number("--mscale", 1), "mscale_all": reading.number("--mscale-all-dim", 0)}
    llama3, by = reading.flag("--use-rope-scaling"), reading.number("--rope-scaling-factor", 8)
    stretched = reading.text("--rope-type", "yarn" if latent else "rope") == "yarn"
    scaling: dict[str, Any] = {}
    if latent and stretched and factor != 1:
        scaling = {"kind": "yarn", "factor": factor, "original_seq": _YARN_SEQ, **scales}
    elif llama3 and not latent:
        scaling = {"kind": "llama3", "factor": by, "original_seq": _LLAMA3_SEQ}
    elif linear is not None:
        scaling = {"kind": "linear", "factor": linear}
    return {f"rope_scaling.{name}": value for name, value in scaling.items()}


# -- dimensions and switches -------------------------------------------------------------------------

_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# Our field -> its option and default there.
_LATENT = {
    "kv_rank": ("--kv-lora-rank", 32), "nope_dim": ("--qk-head-dim", 128), "rope_dim": ("--qk-pos-emb-head-dim", 64),
    "value_dim": ("--v-head-dim", 128), "q_rank": ("--q-lora-rank", None),
}  # fmt: skip

REASONS = {
    "model.activation": "only gelu, squared relu, swiglu and quick-geglu",
    "model.attention_out_bias": "linear layers have all biases, none, or those of query, key and value",
    "model.mlp_bias": "linear layers have all biases, none, or those of query, key and value",
    "model.max_seq": "--max-position-embeddings covers at least the sequence",
    "model.moe.router_bias": "only sigmoid scores take a bias (a softmax router with one is gpt-oss's, whose attention "
    "sinks and clamped SwiGLU a job does not describe either)",
    **NUMERIC_REASONS,
}


def compose(job: Job) -> Settings:
    model = job.model
    settings: Settings = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--vocab-size": model.vocab,
        "--max-position-embeddings": max(model.max_seq, job.training.seq),
        "--position-embedding-type": word_for(_POSITIONS, model.positions),
        "--normalization": word_for(_NORMS, model.norm),
        "--swiglu": model.activation == "swiglu" or None,
        "--quick-geglu": model.activation == "geglu" or None,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings or None,
        "--qk-layernorm": model.qk_norm or model.mla is not None or None,  # there also the norms of latent features
        "--mtp-num-layers": model.mtp_layers or None,
        "--mtp-loss-scaling-factor": model.numerics.prediction_loss if model.mtp_layers else None,
    }
    if not (model.qkv_bias and model.attention_out_bias and model.mlp_bias):
        settings["--disable-bias-linear"] = True
        settings["--add-qkv-bias"] = model.qkv_bias or None
    if model.sliding_window is not None:
        # Keys before a query's own, which Megatron does not count (``get_sliding_window_causal_mask``).
        settings["--window-size"] = f"{model.sliding_window - 1},0"
        settings["--window-attn-skip-freq"] = model.sliding_window_every if model.sliding_window_every > 1 else None
    return {**settings, **_attention(model), **_experts(model), **compose_numerics(model)}


def _attention(model: Model) -> Settings:
    if model.mla is not None:
        latent = {option: getattr(model.mla, name) for name, (option, _) in _LATENT.items()}
        return {"--multi-latent-attention": True, **latent}
    settings: Settings = {"--kv-channels": model.head_size}
    if model.key_value_heads != model.heads:
        settings.update({"--group-query-attention": True, "--num-query-groups": model.key_value_heads})
    return settings


def _experts(model: Model) -> Settings:
    moe = model.moe
    if moe is None:
        return {}
    grouped = moe.groups > 1 or moe.groups_used > 1
    return {
        "--num-experts": moe.experts,
        "--moe-router-topk": moe.top_k,
        "--moe-ffn-hidden-size": moe.ffn,
        "--moe-shared-expert-intermediate-size": moe.shared_ffn or None,
        "--moe-shared-expert-gate": moe.shared_gate or None,
        "--moe-layer-freq": _pattern(model),
        "--moe-router-score-function": moe.router,
        "--moe-router-enable-expert-bias": _balancing_bias(moe) or None,
        "--moe-router-num-groups": moe.groups if grouped else None,
        "--moe-router-group-topk": moe.groups_used if grouped else None,
    }


def _balancing_bias(moe: MixtureOfExperts) -> bool:
    """Whether the router's bias is the one that balances; ``TransformerConfig`` refuses it for softmax scores."""
    return moe.router_bias and moe.router == "sigmoid"


def _pattern(model: Model) -> str | None:
    """Which layers have experts, as the list expression that Megatron evaluates; None if all have."""
    moe = model.moe
    if moe is None or model.moe_layers == model.layers:
        return None
    rounds, rest = divmod(model.layers - moe.dense_layers, moe.every)
    parts = [f"[0]*{moe.dense_layers}", f"([0]*{moe.every - 1}+[1])*{rounds}", f"[0]*{rest}"]
    return "+".join(part for part, used in zip(parts, (moe.dense_layers, rounds, rest)) if used)


_GPT2_VOCAB = 50257
# Options of models, and of training, that a job does not describe.
_NOT_DESCRIBED = {
    "--hybrid-layer-pattern": "state-space layers",
    "--hybrid-override-pattern": "state-space layers",
    "--is-hybrid-model": "state-space layers",
    "--experimental-attention-variant": "an attention that is not softmax over all keys or a window",
    "--linear-attention-freq": "linear attention",
    "--decoder-num-layers": "an encoder and a decoder",
    "--heterogeneous-layers-config-path": "layers that differ from each other",
    "--moe-latent-size": "experts of latent features",
    "--export-te-mcore-model": "distillation, with a teacher beside the model",
    "--fine-grained-activation-offloading": "activations moved to the host by module",
}


def _refuse_other_models(reading: Reading) -> None:
    for option, what in _NOT_DESCRIBED.items():
        if reading.has(option):
            raise SpecError(option, f"asks for {what}, which is not priced here", "leave it out for a run without")


def interpret(reading: Reading, fields: dict[str, Any]) -> None:
    """Adds ``model.*`` if the arguments describe a model, which --num-layers shows."""
    _refuse_other_models(reading)
    layers = reading.count("--num-layers", reading.count("--encoder-num-layers"))
    if layers is None:
        return
    shape = {"layers": layers, "hidden": _needed(reading, "--hidden-size"),
             "heads": _needed(reading, "--num-attention-heads")}  # fmt: skip
    swiglu, quick = reading.flag("--swiglu"), reading.flag("--quick-geglu")
    if reading.flag("--squared-relu"):
        reading.notes.append("--squared-relu is priced as relu")
        shape["activation"] = "relu"
    else:
        shape["activation"] = "swiglu" if swiglu else "geglu" if quick else "gelu"
    four = shape["hidden"] * 4
    shape["ffn"] = reading.count("--ffn-hidden-size", int(four * 2 / 3 / 64) * 64 if swiglu else four)
    shape["vocab"] = reading.count("--vocab-size", reading.count("--padded-vocab-size", _GPT2_VOCAB))
    tokenizer = reading.settings.get("--tokenizer-type", "GPT2BPETokenizer")
    if not (reading.has("--vocab-size") or reading.has("--padded-vocab-size")) and tokenizer != "GPT2BPETokenizer":
        reading.notes.append(f"the vocabulary is the tokenizer's: {_GPT2_VOCAB:,} is assumed (--set model.vocab=N)")
    shape["max_seq"] = reading.count("--max-position-embeddings", 2048)
    positions = reading.choice("--position-embedding-type", _POSITIONS, "learned")
    shape["positions"] = "rope" if reading.flag("--use-rotary-position-embeddings") else positions
    shape["norm"] = reading.choice("--normalization", _NORMS, "layernorm")
    shape["tied_embeddings"] = not reading.flag("--untie-embeddings-and-output-weights")
    normed = reading.flag("--qk-layernorm")
    shape["qk_norm"] = normed and not reading.settings.get("--multi-latent-attention")
    shape["mtp_layers"] = reading.integer("--mtp-num-layers", 0)
    biased, queries = not reading.flag("--disable-bias-linear"), reading.flag("--add-qkv-bias")
    shape.update({"qkv_bias": biased or queries, "attention_out_bias": biased, "mlp_bias": biased})
    _read_attention(reading, shape)
    _read_window(reading, shape)
    shape.update(interpret_numerics(
        reading, latent="mla.kv_rank" in shape, gelu=shape["activation"] == "gelu", biased=biased,
        experts=bool(reading.integer("--num-experts")),
    ))  # fmt: skip
    if shape["mtp_layers"]:
        shape["numerics.prediction_loss"] = reading.number("--mtp-loss-scaling-factor", 0.1)
    fields.update({f"model.{name}": value for name, value in shape.items()})
    _read_experts(reading, fields, layers, shape["ffn"])


def _read_attention(reading: Reading, shape: dict[str, Any]) -> None:
    groups = reading.count("--num-query-groups", 1)
    shape["kv_heads"] = groups if reading.flag("--group-query-attention") else shape["heads"]
    shape["head_dim"] = reading.count("--kv-channels")
    if reading.flag("--multi-latent-attention"):
        shape.update({f"mla.{name}": reading.count(option, usual) for name, (option, usual) in _LATENT.items()})
        if not reading.flag("--qk-layernorm"):
            reading.notes.append("without --qk-layernorm latent features are not normed: priced as if they were")


def _read_window(reading: Reading, shape: dict[str, Any]) -> None:
    window = reading.text("--window-size")
    if window is None:
        return
    left = window.strip("()").split(",")[0].strip()
    if not left.isdigit():
        raise SpecError("--window-size", f"{shown(window)} is not understood", "write it like 4095,0")
    shape["sliding_window"] = int(left) + 1
    shape["sliding_window_every"] = reading.count("--window-attn-skip-freq", 1)


def _read_experts(reading: Reading, fields: dict[str, Any], layers: int, ffn: int) -> None:
    experts = reading.integer("--num-experts")
    if not experts:
        return
    moe = {
        "experts": experts,
        "top_k": reading.count("--moe-router-topk", 2),
        "ffn": reading.count("--moe-ffn-hidden-size", ffn),
        "shared_ffn": reading.integer("--moe-shared-expert-intermediate-size", 0),
        "shared_gate": reading.flag("--moe-shared-expert-gate"),
        "router": reading.text("--moe-router-score-function", "softmax"),
        "router_bias": reading.flag("--moe-router-enable-expert-bias"),
        "groups": reading.count("--moe-router-num-groups", 1),
        "groups_used": reading.count("--moe-router-group-topk", 1),
    }
    dense, every = expert_layers(reading.text("--moe-layer-freq", "1"), layers)
    fields.update({f"model.moe.{name}": value for name, value in moe.items()})
    fields.update({"model.moe.dense_layers": dense, "model.moe.every": every})


def expert_layers(text: str, layers: int) -> tuple[int, int]:
    """(leading dense layers, every how many of the rest) behind ``--moe-layer-freq``: a number or a list expression."""
    key = "--moe-layer-freq"
    if text.strip().isdigit():
        # Of N layers Megatron makes the first an expert layer.
        pattern = [1 if index % max(1, int(text)) == 0 else 0 for index in range(layers)]
    else:
        try:
            pattern = _evaluated(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise SpecError(key, f"{shown(text)} is not understood", "write it like 2 or [0]*3+[1]*58") from None
    if len(pattern) != layers or not set(pattern) <= {0, 1}:
        raise SpecError(key, f"{shown(text)} names {len(pattern)} layers", f"the model has {layers}")
    for every in range(1, layers + 1):
        for dense in range(layers + 1) if every == 1 else range(every):
            made = [int(i >= dense and (i - dense) % every == every - 1) for i in range(layers)]
            if made == pattern:
                return dense, every
    raise SpecError(key, f"{shown(text)} is not a regular pattern", "a job has leading dense layers, then every n-th")


def _evaluated(node: ast.expr) -> list[int]:
    """The list that an expression of lists, + and * makes; nothing else is evaluated."""
    if isinstance(node, ast.List):
        return [_count(item.value) for item in node.elts if isinstance(item, ast.Constant)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluated(node.left) + _evaluated(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = node.right.value if isinstance(node.right, ast.Constant) else None
        items = _evaluated(node.left)
        if len(items) * _count(times) <= 100_000:
            return items * _count(times)
    raise ValueError("no list expression")


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value > 100_000:
        raise ValueError("no count")
    return value


def _needed(reading: Reading, option: str) -> int:
    value = reading.count(option)
    if value is None:
        raise SpecError(option, "is missing", "--num-layers names a model: give its sizes too")
    return int(value)
