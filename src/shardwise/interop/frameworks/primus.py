"""Primus and Megatron-Bridge: YAML whose settings are those of the framework that runs. They are read, not written.

Primus runs Megatron-LM, TorchTitan, MaxText and others on AMD devices: what a module overrides is read as theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.automodel import AUTOMODEL
from shardwise.interop.frameworks.documents import Names, Settings
from shardwise.interop.frameworks.maxtext import MAXTEXT, MODELS
from shardwise.interop.frameworks.megatron import MEGATRON
from shardwise.interop.frameworks.megatron_files import command_of_settings
from shardwise.interop.frameworks.target import Reading, Target
from shardwise.interop.frameworks.torchtitan import TORCHTITAN
from shardwise.interop.keys import unflatten
from shardwise.spec.errors import SpecError, shown

_VARIABLE = re.compile(r"\$\{\w+(?::([^{}]*))?\}")
_MODELS = {**MODELS, "deepseek-v3-671b": "deepseek-v3", "deepseek-v3-16b": "deepseek-v2-lite", "deepseek-v3-236b":
           "deepseek-v2", "deepseek-v2-16b": "deepseek-v2-lite", "mixtral-8x7b-v0.1": "mixtral-8x7b",
           "mixtral-8x22b-v0.1": "mixtral-8x22b", "llama31-70b": "llama3.1-70b"}  # fmt: skip
# What differs from Megatron-LM's own defaults (primus/configs/modules/megatron: trainer_base.yaml, pre_trainer.yaml;
# configs/models/megatron/language_model.yaml and what extends it).
_OF_PRIMUS = {
    "bf16": True, "seq_length": 1024, "global_batch_size": 16, "micro_batch_size": 2, "use_flash_attn": True,
    "use_distributed_optimizer": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "sequence_parallel": True,
    "train_iters": 1000, "lr": 2e-5,
}  # fmt: skip
_FP8 = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
# training/mixed_precision.py, bf16_mixed; training/config.py.
_OF_BRIDGE = {"bf16": True, "use_distributed_optimizer": True, "hidden_dropout": 0.0,
              "attention_dropout": 0.0, "micro_batch_size": 1, "overlap_grad_reduce": True,
              "overlap_param_gather": True}  # fmt: skip
# Of an override of Primus, by the name of its option in Megatron-LM.
_OWN = {"use_turbo_deepep": {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}}
_KERNELS = ("turbo", "fla_", "use_cpp_", "fused_ce", "_backend")


def _parse(text: str, what: str, names: Names) -> Settings:
    """With the defaults of its variables: ``${PRIMUS_TP:1}``."""
    return recipes.RECIPE.parse(_VARIABLE.sub(lambda found: found[1] or found[0], text), what, names)


# -- Primus ----------------------------------------------------------------------------------------------------------


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    key = next((key for key in reading.settings if re.fullmatch(r"modules\.\w+\.framework", key)), "")
    section = key.removesuffix("framework")
    framework = reading.text(key) if key else None
    if framework not in _RUN:
        problem = f"{shown(framework)} is not among those that are priced"
        raise SpecError(key or "modules", problem, f"priced are {', '.join(_RUN)}")
    named = reading.text(f"{section}model", "").removesuffix(".yaml")
    model = _name_of(named)
    recipes.read_model_called(reading, fields, f"{section}model", model)
    overrides = {
        path.removeprefix(f"{section}overrides."): value for path, value in reading.settings.items()
        if path.startswith(f"{section}overrides.")
    }  # fmt: skip
    reading.used |= {path for path in reading.settings if path.startswith(section)}
    _RUN[framework](reading, fields, overrides)
    if named.endswith("-fp8"):
        fields["training.precision"] = "fp8"


def _name_of(stem: str) -> str:
    name = stem.removesuffix("-fp8").lower().replace("_", "-")
    return _MODELS.get(name, name)


def _whole(settings: Mapping[str, Any], key: str, usual: int) -> int:
    """A count among settings that are not read by a `Reading`."""
    value = settings.get(key) or usual
    if not re.fullmatch(r"[1-9]\d{0,8}", str(value)):
        raise SpecError(key, f"{shown(value)} is not a positive whole number", f"write {usual}")
    return int(value)


def _run_megatron(reading: Reading, fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    settings = {**_OF_PRIMUS, **(_FP8 if overrides.get("fp8") else {}), **overrides}
    kind = str(settings.pop("model_type", "gpt"))
    if kind not in ("gpt", "mamba"):
        raise SpecError("model_type", f"{shown(kind)} is not a text model", "only language models are priced")
    for name, options in _OWN.items():
        if settings.pop(name, False) is True:
            settings |= options
    if settings.get("recompute_layer_ids"):
        layers = settings.pop("recompute_layer_ids")
        number = len(layers if isinstance(layers, list) else str(layers).split(","))
        stages = _whole(settings, "pipeline_model_parallel_size", 1)
        settings |= {"recompute_granularity": "full", "recompute_method": "block",
                     "recompute_num_layers": max(1, number // stages)}  # fmt: skip
    _read_lora(reading, fields, {key: settings.pop(key) for key in list(settings) if key.startswith("lora.")})
    if settings.pop("stage", None) == "sft" or "training.adapters.rank" in fields:
        fields["training.task"] = "sft"
    as_megatron(reading, fields, settings, "primus")


def _read_lora(reading: Reading, fields: dict[str, Any], lora: Mapping[str, Any]) -> None:
    if lora.get("lora.enabled") is not True:
        return
    fields.update({"training.adapters.rank": _whole(lora, "lora.dim", 8), "training.adapters.alpha":
                   float(_whole(lora, "lora.alpha", 16)), "training.adapters.targets": ["all-linear"]})  # fmt: skip
    named = lora.get("lora.target_modules")
    if named is not None:
        reading.notes.append(f"lora.target_modules {shown(named)}: priced as adapters on every linear layer")


def as_megatron(reading: Reading, fields: dict[str, Any], settings: Mapping[str, Any], stack: str) -> None:
    """What Megatron-LM makes of the same settings, on another ``stack``."""
    settings = _shaped(reading, fields, dict(settings))
    text, unknown = command_of_settings(settings, MEGATRON.names)
    kernels = [key for key in unknown if settings[key] not in (False, None, 0) and any(w in key for w in _KERNELS)]
    if kernels:
        reading.notes.append(f"{', '.join(kernels)[:120]}: kernels whose speed and memory are not priced by themselves")
    left = [key for key in unknown if key not in kernels and settings[key] not in (False, None, "") and
            not PRIMUS.names.ignores(key)]  # fmt: skip
    reading.notes += [f"{key} = {shown(settings[key])} is no option of Megatron-LM: left out" for key in left]
    _as(replace(MEGATRON, stacks=(stack,)), text, reading, fields)


def _shaped(reading: Reading, fields: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those of a model that is known by name, or that they describe in part."""
    if "hidden_size" in settings and "num_layers" in settings:
        fields.pop("model", None)
        return settings
    layers, model = settings.pop("num_layers", None), fields.get("model")
    if layers is not None and model is not None and reading.model is None:
        number = _whole({"num_layers": layers}, "num_layers", 1)
        named = f"{model.name}, {number} layers"
        fields["model"] = replace(model, name=named, layers=number, pattern=(), published_parameters=None)
    return {key: value for key, value in settings.items() if not PRIMUS.names.ignores(key)}


def _run_torchtitan(reading: Reading, fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    known = {key: value for key, value in overrides.items() if key in TORCHTITAN.names and value is not None}
    left = [key for key, value in overrides.items()
            if key not in known and value not in (False, None) and not PRIMUS.names.ignores(key)]  # fmt: skip
    if left:
        reading.notes.append(f"{', '.join(left)[:160]}: not settings of TorchTitan, left out")
    _as(TORCHTITAN, TORCHTITAN.format.render(known, TORCHTITAN.names), reading, fields)


def _run_maxtext(reading: Reading, fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    _as(MAXTEXT, json.dumps(unflatten({"hardware": "gpu", **overrides})), reading, fields)


def _run_automodel(reading: Reading, fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    _as(AUTOMODEL, json.dumps(unflatten(dict(overrides))), reading, fields)


def _run_bridge(reading: Reading, fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    settings = {key.rpartition(".")[2]: value for key, value in overrides.items() if _counts(key)}
    if overrides.get("peft") == "lora" or any(key.startswith("peft.") for key in overrides):
        settings.pop("peft", None)
        fields.update({"training.adapters.rank": _whole(overrides, "peft.dim", 32), "training.adapters.targets":
                       ["all-linear"], "training.task": "sft", "training.base_precision": "bf16"})  # fmt: skip
    settings["grad_reduce_in_bf16"] = settings.pop("grad_reduce_in_fp32", True) is False
    as_megatron(reading, fields, {**_OF_BRIDGE, **settings}, "megatron-bridge")


def _counts(key: str) -> bool:
    """Whether a setting of a ConfigContainer is in a section that may change what a step costs."""
    section, _, name = key.rpartition(".")
    return section in _SECTIONS or name == "seq_length"


_SECTIONS = ("", "model", "train", "optimizer", "ddp", "comm_overlap", "mixed_precision", "scheduler")


def _as(target: Target, text: str, reading: Reading, fields: dict[str, Any]) -> None:
    model = recipes.model_of(reading, fields)
    read = target.read(text, model, reading.cluster, reading.given, reading.beside)
    shape = any(path.startswith("model") for path in read.fields)
    named = {path: value for path, value in fields.items() if not (shape and path == "model")}
    fields.clear()
    fields.update({**read.fields, **named})
    reading.notes += [*read.notes, *read.not_priced]
    reading.devices = read.devices


_RUN = {"megatron": _run_megatron, "torchtitan": _run_torchtitan, "maxtext": _run_maxtext,
        "megatron_bridge": _run_bridge, "nemo_automodel": _run_automodel}  # fmt: skip

PRIMUS = recipes.reader(
    "primus", "Primus", _interpret, format=replace(recipes.RECIPE, parse=_parse),
    signature=("modules.pre_trainer.framework", "modules.post_trainer.framework", "modules.sft_trainer.framework"),
    stacks=("primus",), carries_model=True,
)  # fmt: skip

# -- Megatron-Bridge -------------------------------------------------------------------------------------------------

_RECIPE = re.compile(r"(.+?)_(?:pretrain|finetune|sft|peft|lora)\w*_config")


def _interpret_bridge(reading: Reading, fields: dict[str, Any]) -> None:
    """Overrides of a recipe, which is a function of Python: what that sets beside them is not known here."""
    named = reading.text("recipe", reading.text("recipe_name", ""))
    found = _RECIPE.fullmatch(named)
    if found:
        recipes.read_model_called(reading, fields, "recipe", _name_of(found[1]))
    elif reading.model is None:
        reading.no_model = "is that of the recipe, which is not in the file"
    reading.notes.append(f"what the recipe {named} sets itself is not read".replace("  ", " "))
    overrides = {path: value for path, value in reading.settings.items() if "." in path}
    reading.used |= set(overrides)
    _run_bridge(reading, fields, overrides)


BRIDGE = recipes.reader(
    "megatron-bridge", "Megatron-Bridge", _interpret_bridge, stacks=("megatron-bridge",), carries_model=True,
    signature=("train.train_iters", "model.tensor_model_parallel_size"), format=replace(recipes.RECIPE, parse=_parse),
)  # fmt: skip
