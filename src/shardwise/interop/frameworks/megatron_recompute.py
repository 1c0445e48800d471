"""What Megatron-LM's selective recomputation recomputes, in the operators that are priced here.

Megatron-LM's ``transformer_layer.py`` recomputes a norm where it is a module of its own: Transformer Engine fuses the
norm before attention into the matmul after it unless attention is latent, and that before a dense MLP. ``experts.py``
recomputes the activation function of routed experts and of nothing else. ``transformer_config.py`` refuses both with
the delayed scaling of FP8, and says that ``core_attn`` is of no use where attention is fused.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.parts import Imported
from shardwise.interop.frameworks.target import Reading
from shardwise.spec.job import Job
from shardwise.spec.model import Model

MODULES = {"attention": "core_attn", "norm": "layernorm", "activation": "moe_act", "up-projection": "mla_up_proj"}
_FEW = 0.1  # share of dense layers, whose second norm is kept, that changes no price that counts


def exact_modules(model: Model, attention: str, precision: str) -> dict[str, str]:
    """Operators by the module that makes just them again."""
    moe, delayed = model.moe, precision == "fp8"
    experts = model.moe_layers if moe else 0
    exact = {
        "attention": attention == "unfused",
        "norm": model.mla is not None and experts >= (1 - _FEW) * model.layers and not delayed,
        "activation": moe is not None and experts == model.layers and moe.shared_ffn == 0 and not delayed,
        "up-projection": model.mla is not None,
    }
    return {operator: MODULES[operator] for operator, holds in exact.items() if holds}


def selective(job: Job) -> tuple[str, ...]:
    """What is worth recomputing of that: attention where its scores are stored, else the cheap operators around it."""
    exact = exact_modules(job.model, job.training.attention, job.training.precision)
    return ("attention",) if "attention" in exact else tuple(exact)


def compose(job: Job) -> Settings:
    strategy = job.strategy
    if strategy.recompute == "none":
        return {}
    if strategy.recompute == "full":
        method, layers = ("uniform", 1) if strategy.recompute_layers is None else ("block", strategy.recompute_layers)
        return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": layers}
    exact = exact_modules(job.model, job.training.attention, job.training.precision)
    chosen = [exact[operator] for operator in job.selective_operators if operator in exact]
    return {"--recompute-granularity": "selective", "--recompute-modules": chosen} if chosen else {}


def interpret(reading: Reading, fields: dict[str, Any]) -> None:
    kind = "selective" if reading.flag("--recompute-activations") else "none"
    kind = reading.choice("--recompute-granularity", {"full": "full", "selective": "selective"}, kind)
    method, layers = reading.text("--recompute-method"), reading.whole("--recompute-num-layers")
    named = reading.value("--recompute-modules", ["core_attn"])
    if kind == "full" and method == "block" and layers is not None:
        fields["strategy.recompute_layers"] = layers
    if kind == "selective":
        operators = _operators(reading, fields, [named] if isinstance(named, str) else named)
        if operators:
            fields["strategy.recompute_operators"] = operators
        kind = "selective" if operators else "none"
    fields["strategy.recompute"] = kind


def _operators(reading: Reading, fields: dict[str, Any], named: list[str]) -> tuple[str, ...]:
    """The operators that the named modules stand for; of the others a note says what is made of them."""
    model = _model(reading, fields)
    if model is None:
        exact = dict(MODULES)
    else:
        exact = exact_modules(model, fields.get("training.attention", "flash"), fields["training.precision"])
    operators = []
    for operator, module in MODULES.items():
        if module not in named:
            continue
        some = model is not None and model.moe is not None and module in ("layernorm", "moe_act")
        if operator in exact or some:
            operators.append(operator)
        if operator not in exact:
            made = "recomputes some of it: priced as all" if some else "recomputes nothing here: not priced"
            reading.notes.append(f"--recompute-modules {module} {made}")
    unknown = [name for name in named if name not in MODULES.values()]
    reading.notes.extend(f"--recompute-modules {name} has no counterpart" for name in unknown)
    return tuple(operators)


def _model(reading: Reading, fields: dict[str, Any]) -> Model | None:
    named = {path: value for path, value in fields.items() if path.startswith("model.")}
    if not named:
        return reading.model
    return Model.from_dict(Imported("megatron", named).nested()["model"], "model")
