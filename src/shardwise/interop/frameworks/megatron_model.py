"""The model in Megatron-LM's arguments, and what they change of its software stack."""

from __future__ import annotations

import ast
from typing import Any

from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.target import Reading, Table, word_for, written
from shardwise.interop.keys import integer
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.model import MixtureOfExperts, Model
from shardwise.spec.training import RECIPES

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

_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none", "alibi": "none", "absolute": "learned",
              "rotary": "rope"}  # fmt: skip
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_LATENT: Table = {
    "kv_rank": ("--kv-lora-rank", 32), "nope_dim": ("--qk-head-dim", 128), "rope_dim": ("--qk-pos-emb-head-dim", 64),
    "value_dim": ("--v-head-dim", 128), "q_rank": ("--q-lora-rank", None),
}  # fmt: skip
_EXPERTS: Table = {
    "experts": ("--num-experts", None), "top_k": ("--moe-router-topk", 2), "ffn": ("--moe-ffn-hidden-size", None),
    "shared_ffn": ("--moe-shared-expert-intermediate-size", 0), "shared_gate": ("--moe-shared-expert-gate", False),
}  # fmt: skip
_ROUTER: Table = {
    "router": ("--moe-router-score-function", "softmax"), "router_bias": ("--moe-router-enable-expert-bias", False),
}  # fmt: skip
_GROUPS: Table = {"groups": ("--moe-router-num-groups", 1), "groups_used": ("--moe-router-group-topk", 1)}

REASONS = {
    "model.activation": "only gelu, squared relu, swiglu and quick-geglu",
    "model.attention_out_bias": "linear layers have all biases, none, or those of query, key and value",
    "model.mlp_bias": "linear layers have all biases, none, or those of query, key and value",
    "model.max_seq": "--max-position-embeddings covers at least the sequence",
    "model.moe.router_bias": "only sigmoid scores take a bias that balances",
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
        "--squared-relu": model.activation == "relu2" or None,
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
        return {"--multi-latent-attention": True, **written(model.mla, _LATENT)}
    settings: Settings = {"--kv-channels": model.head_size}
    if model.key_value_heads != model.heads:
        settings.update({"--group-query-attention": True, "--num-query-groups": model.key_value_heads})
    return settings


def _experts(model: Model) -> Settings:
    moe = model.moe
    if moe is None:
        return {}
    router = {**written(moe, _ROUTER), "--moe-router-enable-expert-bias": _balancing_bias(moe)}
    grouped = written(moe, _GROUPS) if moe.groups > 1 or moe.groups_used > 1 else {}
    settings = {**written(moe, _EXPERTS), "--moe-layer-freq": _pattern(model), **router, **grouped}
    return {option: value or None for option, value in settings.items()}


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


def interpret(reading: Reading, fields: dict[str, Any]) -> None:
    """Adds ``model.*`` if the arguments describe a model, which --num-layers shows."""
    for option, what in _NOT_DESCRIBED.items():
        if reading.has(option):
            raise SpecError(option, f"asks for {what}, which is not priced here", "leave it out for a run without")
    layers = reading.count("--num-layers", reading.count("--encoder-num-layers"))
    if layers is None:
        return
    shape = {"layers": layers, "hidden": _needed(reading, "--hidden-size"),
             "heads": _needed(reading, "--num-attention-heads")}  # fmt: skip
    swiglu, quick = reading.flag("--swiglu"), reading.flag("--quick-geglu")
    if reading.flag("--squared-relu"):
        shape["activation"] = "relu2"
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
        shape.update({f"mla.{name}": value for name, value in reading.table(_LATENT).items()})
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
    if not reading.integer("--num-experts"):
        return
    moe = reading.table({**_EXPERTS, **_ROUTER, **_GROUPS})
    moe["dense_layers"], moe["every"] = expert_layers(reading.text("--moe-layer-freq", "1"), layers)
    fields.update({f"model.moe.{name}": ffn if value is None else value for name, value in moe.items()})


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


# -- What Megatron-LM's arguments change of its software stack: formats of gradients, masters and gathers, loss, graphs
# An option is read only where it has an effect; elsewhere it is named among the settings that are not used.

# Our value -> its options; the first that is written (megatron/core/model_parallel_config.py, transformer_config.py).
_LOSSES = {"native": "steps", "te": "fused"}
_GRAPHS = {"none": "none", "local": "partial", "transformer_engine": "partial", "full_iteration": "full"}
_OLD_GRAPHS = ("--enable-cuda-graph", "--external-cuda-graph")
AWARE = "--use-precision-aware-optimizer"


def reads_bf16_gradients(reading: Reading) -> bool:
    """Whether gradients are kept and reduced in bf16 (``arguments.py``: only where the weights are)."""
    if not reading.settings.get("--bf16"):
        return False
    narrow = reading.flag("--grad-reduce-in-bf16")
    if reading.settings.get(AWARE):
        narrow = narrow or reading.choice("--main-grads-dtype", ("fp32", "bf16"), "fp32") == "bf16"
    return narrow


def interpret_stack(reading: Reading, fields: dict[str, Any]) -> None:
    """Adds what of the stack is not as its preset has it, as ``stack.*``."""
    changes: dict[str, Any] = {}
    recipe = RECIPES[fields["training.precision"]]
    if recipe.compute in ("fp8", "fp4") and reads_bf16_gradients(reading):
        changes["gradient_reduce"] = "bf16"
    if recipe.compute == "fp8" and reading.flag("--fp8-param-gather"):
        changes["parameter_gather"] = "fp8"
    if reading.flag("--cross-entropy-loss-fusion"):
        changes["loss"] = reading.choice("--cross-entropy-fusion-impl", _LOSSES, "steps")
    if reading.flag("--no-gradient-accumulation-fusion"):
        changes["dummy_gradients"] = False
    if reading.flag("--deterministic-mode"):
        changes["deterministic"] = True
    if fields.get("model.moe.experts") and not reading.flag("--moe-grouped-gemm"):
        changes["experts"] = "in turn"
    if fields["strategy.pp"] > 1 and reading.flag("--defer-embedding-wgrad-compute"):
        if (limit := reading.integer("--wgrad-deferral-limit", 0)) > 0:
            changes["deferred_head_gradients"] = limit
        else:
            reading.notes.append("gradients of the head wait for the end of all microbatches: not priced")
    changes |= _masters(reading, fields) | _layers(reading, fields) | _graphs(reading)
    fields.update({f"stack.{name}": value for name, value in changes.items()})


def _masters(reading: Reading, fields: dict[str, Any]) -> dict[str, Any]:
    """A precision-aware optimizer keeps the lower halves of fp32 masters, or masters in fp16: 2 bytes either way.

    Not beside FP8 weights, which are not upper halves, nor on the host (megatron/core/optimizer/optimizer_config.py).
    """
    adam, offloaded = fields["training.optimizer"].startswith("adam"), fields.get("strategy.offload.optimizer")
    if not (adam and reading.settings.get(AWARE) and reading.settings.get("--bf16")) or offloaded:
        return {}
    half = reading.choice("--main-params-dtype", ("fp32", "fp16"), "fp32") == "fp16"
    if reading.settings.get("--fp8-param-gather") and not half:
        return {}
    reading.flag(AWARE)
    return {"masters": "rest"}


def _layers(reading: Reading, fields: dict[str, Any]) -> dict[str, Any]:
    """Megatron's own layers have no fused attention, and no empty gradients of Transformer Engine's."""
    changes: dict[str, Any] = {}
    if reading.choice("--transformer-impl", ("local", "transformer_engine", "inference_optimized")) == "local":
        fields["training.attention"] = "unfused"
        changes = {"layers": "megatron", "dummy_gradients": False}
    return {**changes, "attention": "unfused"} if fields.get("training.attention") == "unfused" else changes


def _graphs(reading: Reading) -> dict[str, Any]:
    old = True in list(map(reading.flag, _OLD_GRAPHS))
    graphs = reading.choice("--cuda-graph-impl", _GRAPHS, "partial" if old else "none")
    if graphs == "none":
        return {}
    scopes = [reading.value(option, []) for option in ("--cuda-graph-scope", "--cuda-graph-modules")]
    whole = any("full_iteration" in scope for scope in scopes)
    return {"cuda_graphs": "full" if whole else graphs}


def compose_stack(job: Job) -> Settings:
    """The options of what differs from its defaults in a stack of Megatron-LM's."""
    stack, compute = job.stack, job.training.recipe.compute
    settings: Settings = {
        "--cuda-graph-impl": {"partial": "local", "full": "full_iteration"}.get(stack.cuda_graphs),
        "--no-gradient-accumulation-fusion": not stack.dummy_gradients or None,
        "--deterministic-mode": stack.deterministic or None,
        "--transformer-impl": "local" if stack.layers == "megatron" else None,
    }
    word = word_for(_LOSSES, stack.loss)
    settings |= {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": word} if word else {}
    if compute in ("fp8", "fp4"):
        settings["--grad-reduce-in-bf16"] = stack.gradient_reduce == "bf16" or None
    if compute == "fp8" and stack.parameter_gather == "fp8" and job.strategy.zero:  # which the option needs
        settings["--fp8-param-gather"] = True
    if stack.deferred_head_gradients and job.strategy.pp > 1:
        settings["--defer-embedding-wgrad-compute"] = True
        settings["--wgrad-deferral-limit"] = stack.deferred_head_gradients
    return settings
