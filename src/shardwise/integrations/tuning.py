"""What of a framework's module is trained: PEFT's adapters, or some parts; and how the frozen rest is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import TARGETS, Part


class NotPriced(SpecError):
    """The framework's run is valid, but this project cannot price it."""


_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
# Parts of a model by the words in the names of their parameters (transformers, modeling_*.py), the first that matches.
_PARTS: tuple[tuple[str, Part], ...] = (
    (r"\.experts\.", "experts"),
    (r"\.(?:gate|router)\.(?:weight|bias|e_score_correction_bias)$", "router"),
    (r"norm|\.ln_|\.ln\d", "norms"),
    (r"lm_head|embed_out", "head"),
    (r"embed|\.wte|\.wpe", "embedding"),
    (r"attn|attention", "attention"),
    (r"mlp|feed_forward|ffn|\.fc", "mlp"),
)


def tuning_fields(network: nn.Module, config: Any) -> dict[str, Any]:
    """Fields of the training for a module that is not trained whole; empty if it is."""
    base = _base_precision(network, config)
    adapters = _adapters(network)
    trained = _trained_parts(network)
    fields: dict[str, Any] = {}
    if adapters:
        fields["training.adapters"] = adapters
    if trained is not None and (trained or not adapters):
        fields["training.trained"] = trained
    if not fields:
        if base:
            raise NotPriced("model", "quantised weights are trained only by adapters", "add adapters (PEFT)")
        return {}
    kept = base or _frozen_format(network)
    return {**fields, **({"training.base_precision": kept} if kept else {})}


def _base_precision(network: nn.Module, config: Any) -> str | None:
    """The format of quantised linear layers (bitsandbytes), None if there are none."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        if getattr(network, "is_quantized", False):
            raise NotPriced("model", "weights quantised in an unknown way are not priced", "use bitsandbytes")
        return None
    said = settings if isinstance(settings, dict) else settings.to_dict()
    if said.get("load_in_8bit"):
        return "int8"
    if said.get("load_in_4bit"):  # FP4's codes take as many bytes
        return "nf4-double" if said.get("bnb_4bit_use_double_quant") else "nf4"
    problem = f"weights quantised by {said.get('quant_method', 'an unknown method')} are not priced"
    raise NotPriced("model", problem, "priced are bitsandbytes in 4 and 8 bits")


def _frozen_format(network: nn.Module) -> str | None:
    """`bf16` where frozen matrices have 16 bits."""
    frozen = [parameter for parameter in network.parameters() if not parameter.requires_grad and parameter.dim() > 1]
    return "bf16" if frozen and all(parameter.element_size() == 2 for parameter in frozen) else None


def _adapters(network: nn.Module) -> dict[str, Any] | None:
    """PEFT's active LoRA adapter as fields of a job."""
    configs = getattr(network, "peft_config", None)
    if configs is None:
        return None
    active = getattr(network, "active_adapter", "default")
    name = active[0] if isinstance(active, (list, tuple)) else active
    config = configs[name]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise NotPriced("model", f"adapters of kind {kind} are not priced", "priced are LoRA and DoRA")
    for setting in ("rank_pattern", "alpha_pattern"):
        if getattr(config, setting, None):
            raise NotPriced("model", f"{setting} of the adapters is not priced", "give all of them the same rank")
    paths = [path for path, module in network.named_modules() if name in getattr(module, "lora_A", {})]
    words = sorted({path.rpartition(".")[2] for path in paths})
    unknown = [word for word in words if word not in TARGETS]
    if unknown:
        raise NotPriced("model", f"adapters on {unknown[0]} are not priced", "use linear layers inside the layers")
    layers = sorted({int(match.group(1)) for path in paths if (match := _LAYER.search(path + "."))})
    count = len({match.group(1) for path, _ in network.named_parameters() if (match := _LAYER.search(path))})
    return {
        "method": "dora" if config.use_dora else "lora",
        "rank": config.r,
        "alpha": float(config.lora_alpha),
        "scaling": "rank-stabilised" if config.use_rslora else "standard",
        "dropout": float(config.lora_dropout),
        "targets": words,
        "experts": any(".experts." in path for path in paths),
        **({"layers": layers} if len(layers) < count else {}),
    }


def _trained_parts(network: nn.Module) -> list[str] | None:
    """Names of the parts whose own weights are trained; None if all are, without adapters."""
    # Of `modules_to_save` the copies are trained, beside the modules that they stand for.
    left_out = (".lora_", ".original_module.")
    named = network.named_parameters()
    own = [(name, parameter) for name, parameter in named if not any(word in f".{name}" for word in left_out)]
    trained = {name for name, parameter in own if parameter.requires_grad}
    if len(trained) == len(own):
        return None
    patterns = list(_patterns([name for name, _ in own], trained))
    return sorted(patterns)


def _patterns(names: list[str], trained: set[str]) -> Iterator[str]:
    """Parts, or parts of single layers, that hold exactly the ``trained`` parameters."""
    places: dict[tuple[str, int | None], list[str]] = {}
    for name in names:
        match = _LAYER.search(f".{name}")
        places.setdefault((part_of(name), int(match.group(1)) if match else None), []).append(name)
    by_part: dict[str, dict[int | None, bool]] = {}
    for (part, layer), members in places.items():
        some = [name in trained for name in members]
        if any(some) and not all(some):
            frozen = next(name for name in members if name not in trained)
            problem = f"{frozen} is frozen, and other parameters of its {part} are trained"
            raise NotPriced("model", problem, "freeze or train whole parts of a layer")
        by_part.setdefault(part, {})[layer] = all(some)
    for part, layers in by_part.items():
        if all(layers.values()):
            yield part
            continue
        for layer, whole in layers.items():
            if whole and layer is not None:
                yield f"layers.{layer}.{part}"
            elif whole:
                raise NotPriced("model", f"{part} outside the layers is trained alone", "freeze or train all of it")


def part_of(name: str) -> Part:
    """The part of a model that a parameter belongs to."""
    for pattern, part in _PARTS:
        if re.search(pattern, f".{name}"):
            return part
    raise NotPriced("model", f"{name} is in no part that is known", "freeze or train all weights")
