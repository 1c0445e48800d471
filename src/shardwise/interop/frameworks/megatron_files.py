"""Megatron-LM's arguments in a file: a command line or script, ``--yaml-cfg``, ``model_config.yaml`` of its tests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.documents import COMMAND, Format, Names, Settings, command_words
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import parse_yaml

_ARGUMENTS, _MODE = "MODEL_ARGS", "MODE"
# What Megatron-LM's scripts run that is not training of a decoder-only model, by what their name contains.
_OTHER_SCRIPTS = {
    "inference": "generates text and trains nothing",
    "train_rl": "generates text between its steps, which is not priced",
    "bert": "trains an encoder (BERT)",
    "t5": "trains an encoder and a decoder (T5)",
    "mamba": "trains a model with state-space layers",
    "hybrid": "trains a model with state-space layers",
    "vlm": "trains a model that reads pictures too",
    "mimo": "trains a model that reads pictures too",
    "vision": "trains a model of pictures",
    "retro": "trains a model that looks texts up (Retro)",
    "ict": "trains an encoder for retrieval (ICT)",
    "nemo": "is a configuration of NeMo, whose models are named elsewhere",
    "convert": "converts a checkpoint and trains nothing",
}
_OTHER_MODES = {"inference": _OTHER_SCRIPTS["inference"], "rl": _OTHER_SCRIPTS["train_rl"]}
_REMEDY = "only runs of pretrain_gpt.py are read"


def _parse(text: str, what: str, names: Names) -> Settings:
    if re.search(rf"^{_ARGUMENTS}:", text, re.MULTILINE):
        return COMMAND.parse(_command_of(parse_yaml(text, what), what), what, names)
    if re.search(r"^(language_model|model_parallel):", text, re.MULTILINE):
        return COMMAND.parse(_command_of_settings(parse_yaml(text, what), names), what, names)
    words = command_words(text, what)
    script = words[0].rpartition("/")[2] if words and words[0].endswith(".py") else ""
    for part, reason in _OTHER_SCRIPTS.items():
        if part in re.split(r"[^a-z0-9]+", script.lower()) or part == script.removesuffix(".py"):
            raise SpecError(script, reason, _REMEDY)
    if script and len(words) == 1:
        raise SpecError(script, "is given no options to read", _REMEDY)
    return COMMAND.parse(text, what, names)


def _command_of(tree: Any, what: str) -> str:
    """The command line that Megatron-LM's runner makes of a test (``shell_test_utils/_run_training.sh``)."""
    arguments = tree.get(_ARGUMENTS) if isinstance(tree, Mapping) else None
    if not isinstance(arguments, Mapping) or not arguments:
        raise SpecError(_ARGUMENTS, f"{shown(arguments)} should be a mapping of options", f"give a whole {what}")
    mode = tree.get(_MODE)
    if mode in _OTHER_MODES:
        raise SpecError(f"{_MODE} {mode}", _OTHER_MODES[mode], _REMEDY)
    if any(str(name).startswith("trainer.") for name in arguments):
        raise SpecError(_ARGUMENTS, _OTHER_SCRIPTS["nemo"], _REMEDY)
    return "\n".join(
        shlex.join([str(name), *argument_words(value)]) for name, value in arguments.items() if value is not False
    )


# The settings of a ``--yaml-cfg`` that have other names than their options (megatron/training/yaml_arguments.py).
_RENAMED = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "fp8": "--fp8-format",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}
_WORDS = {
    ("add_bias_linear", False): "--disable-bias-linear",
    ("activation_func", "swiglu"): "--swiglu",
    ("activation_func", "squaredrelu"): "--squared-relu",
    ("overlap_p2p_comm", False): "--no-overlap-p2p-communication",
}


def _command_of_settings(tree: Any, names: Names) -> str:
    """The command line that says the same as a ``--yaml-cfg``, whose other settings are those of no option."""
    if not isinstance(tree, Mapping):
        raise SpecError("language_model", f"{shown(tree)} should be a mapping of settings", "give the whole file")
    parts = (
        part for part in (tree.get("language_model"), tree.get("model_parallel"), tree) if isinstance(part, Mapping)
    )
    settings = {str(name): value for part in parts for name, value in part.items()}
    return command_of_settings(settings, names)[0]


def command_of_settings(settings: Mapping[str, Any], names: Names) -> tuple[str, list[str]]:
    """The command line that says the same as settings by the names that options have inside, and those of no option."""
    lines: dict[str, list[str]] = {}
    unknown = []
    for name, value in settings.items():
        option = _RENAMED.get(name, "--" + name.replace("_", "-"))
        if isinstance(value, (str, bool)) and (name, value) in _WORDS:
            lines[_WORDS[name, value]] = []
        elif option not in names:
            unknown.append(name)
        elif value is None or value is False or value in ("", {}) or (option in names.switches and value == 0):
            continue
        else:
            lines[option] = [] if option in names.switches else argument_words(value)
    return "\n".join(shlex.join([option, *words]) for option, words in lines.items()), unknown


def argument_words(value: object) -> list[str]:
    """A value as words of the command line: none for a switch, several for a list."""
    if value is True or value in (None, ""):
        return []
    if isinstance(value, list):
        return [str(item) for item in value]
    listed = re.fullmatch(r"\[([^]]+)\]", str(value).strip())
    return re.split(r"[\s,]+", listed[1].strip()) if listed else [str(value)]


ARGUMENTS = Format((*COMMAND.suffixes, ".yaml", ".yml"), _parse, COMMAND.render)
