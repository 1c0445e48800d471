"""What recipes of fine-tuning have in common: model, batch, adapters, optimizer, sharding, kernels.

They are read, not written. A recipe says which model it starts from; how many devices run it is said beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.interop.frameworks.deepspeed import DEEPSPEED
from shardwise.interop.frameworks.documents import YAML, Format, Names, Settings
from shardwise.interop.frameworks.target import Move, Reading, Target
from shardwise.interop.frameworks.training_values import OPTIMIZATION, SCHEDULE, read_length
from shardwise.interop.jobs import model_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import parse_yaml
from shardwise.spec.fine_tuning import TARGETS, Part
from shardwise.spec.job import Job
from shardwise.spec.model import Model

Fields = dict[str, Any]


def _parse(text: str, what: str, names: Names) -> Settings:
    """As YAML; a key without a value is as one that is not there."""
    return {key: value for key, value in YAML.parse(text, what, names).items() if value is not None}


RECIPE: Format = replace(YAML, parse=_parse)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*))?\}")


def interpolated(settings: Settings) -> Settings:
    """Settings with what OmegaConf's ``${a.b}`` and ``${oc.select:a.b,usual}`` stand for; others are unset."""

    def value_of(value: Any, hops: int = 0) -> Any:
        found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return None if isinstance(value, str) and value.startswith("${") else value
        other = value_of(settings.get(found[1]), hops + 1) if hops < _MOST_HOPS else None
        return other if other is not None or found[2] is None else parse_yaml(found[2])

    known = {key: value_of(value) for key, value in settings.items()}
    return {key: value for key, value in known.items() if value is not None}


_MOST_HOPS = 8


def reader(name: str, title: str, interpret: Callable[[Reading, Fields], None], **rest: Any) -> Target:
    """A framework whose files are read, not written, by code alone; keys that nobody knows are notes."""
    shape: dict[str, Any] = {"format": RECIPE, "options": (), "unknown_keys": "noted", **rest}
    return Target(name=name, title=title, interpret=interpret, **shape)


def note(reading: Reading, unpriced: Mapping[str, str]) -> None:
    """Says of settings that are on what their price leaves out."""
    for key, words in unpriced.items():
        below = [path for path in reading.settings if path == key or path.startswith(f"{key}.")]
        reading.used.update(below)
        value = reading.settings.get(key)
        if below == [key] and (value in (False, None, 1, "", "none", [], {}) or _is_switched_off(value)):
            continue
        if below:
            reading.notes.append(f"{key}{'' if below != [key] or value is True else ' ' + shown(value)}: {words}")


def _is_switched_off(value: Any) -> bool:
    return isinstance(value, int | float) and value <= 0


# -- the model -----------------------------------------------------------------------------------------------


def read_model(reading: Reading, fields: Fields, key: str) -> None:
    """The model that a recipe names, unless another is given: a preset by its name on the hub, or a folder."""
    named = reading.text(key)
    if named is not None:
        read_model_called(reading, fields, key, named)


def read_model_called(reading: Reading, fields: Fields, key: str, name: str) -> None:
    """The same of a setting that means the model ``name``."""
    if reading.model is not None:
        return
    try:
        model = model_from(name)
    except SpecError as error:
        reading.no_model = f"{key} {shown(name)}: {error.problem}"
        return
    fields["model"] = model
    reading.notes.append(f"{key} {shown(name)}: {model.name}")


def model_of(reading: Reading, fields: Fields) -> Model | None:
    """The model that is trained, if it is known."""
    return reading.model or fields.get("model")


# -- number formats --------------------------------------------------------------------------------------------

# torch's AdamW has moments in the format of what it updates (torch/optim/adamw.py).
IN_16_BIT = {"stack.masters": "none", "stack.gradient_reduce": "bf16"}


def keep_all_in_16_bit(fields: Fields) -> None:
    """Weights that are loaded and trained in bf16, with gradients and moments of that format."""
    fields.update(IN_16_BIT)
    if fields.get("training.optimizer") == "adamw":
        fields["training.optimizer"] = "adamw-bf16-moments"


def is_on(reading: Reading, key: str) -> bool:
    """Whether a switch is on that may be `auto`: where the device can, and those of this decade can."""
    reading.used.add(key)
    value = reading.settings.get(key)
    if value not in (None, True, False, "auto", "full"):
        raise SpecError(key, f"{shown(value)} is neither true nor false", "write true, false or auto")
    return value in (True, "auto", "full")


# -- batch and length ------------------------------------------------------------------------------------------


def read_batch(reading: Reading, fields: Fields, microbatch: str, accumulation: str, *, usual: int) -> None:
    """Sequences of a device at a time, and how often before an update; the batch follows where devices are known."""
    size, times = reading.count(microbatch, usual), reading.count(accumulation, 1)
    fields["strategy.microbatch"] = size
    ranks = reading.data_ranks(fields)
    if ranks is not None:
        fields["training.global_batch"] = size * times * ranks


_MOST_TRIED = 4096


def dividing(sequences: int, most: int) -> int:
    """The largest microbatch up to ``most`` that divides a rank's sequences."""
    return next((size for size in range(min(most, sequences, _MOST_TRIED), 0, -1) if sequences % size == 0), 1)


def note_lengths(reading: Reading, *, packed: bool, tokens: int | None) -> None:
    """What is assumed of the samples' lengths, which no recipe says; of those that nothing cuts ``tokens`` is None."""
    if packed:
        reading.notes.append(
            "samples are packed: attention is priced over whole sequences, an upper bound (training.lengths says more)"
        )
    else:
        each = "the longest sample's" if tokens is None else f"{tokens:,}"
        reading.notes.append(f"every sample is priced as if it had {each} tokens: shorter ones take less")


# -- optimizer and schedule ------------------------------------------------------------------------------------

# Words of transformers.training_args.OptimizerNames, of Axolotl and of bitsandbytes.
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla",
                     "adamw_torch_npu_fused", "adamw", "adam", "fusedadam", "cpu_adam", "optimi_adamw", "paged_adamw",
                     "paged_adamw_32bit", "adamw_anyprecision", "adopt_adamw", "flash_adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "ao_adamw_8bit", "adamw_torch_8bit"),
                    "adam8bit"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "rmsprop", "flash_lion"), "sgd-momentum"),
    "sgd": "sgd", "muon": "muon",
}  # fmt: skip
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
              "cosine_with_restarts": "cosine", "rex": "linear", "cosine_with_min_lr": "cosine"}  # fmt: skip


def read_optimizer(reading: Reading, fields: Fields, key: str, usual: str) -> None:
    word = str(reading.value(key, usual)).lower()
    if word in OPTIMIZERS:
        fields["training.optimizer"] = OPTIMIZERS[word]
    else:
        fields["training.optimizer"] = "adamw"
        reading.notes.append(f"{key} {word}: priced as AdamW, whose states may be larger or smaller")
    if "paged" in word:
        reading.notes.append(f"{key} {word}: states that leave for the host under pressure are priced on the device")
    if word == "adamw_torch":
        fields["stack.adamw"] = "foreach"  # torch's choice where none is made


def read_learning(reading: Reading, fields: Fields, keys: Mapping[str, str]) -> None:
    """Learning rate, decay and moments, by our names; and the kind of schedule. What is not a number is left out."""
    for name, key in keys.items():
        value = reading.value(key)
        if name == "kind":
            if str(value).lower() in _SCHEDULES:
                fields[SCHEDULE + "kind"] = _SCHEDULES[str(value).lower()]
        elif value is not None:
            number = reading.number(key)
            fields[OPTIMIZATION + name] = (number or None) if name == "clip_norm" else number


def read_steps(reading: Reading, fields: Fields, key: str) -> None:
    """The length of a run that is given in steps: epochs are of data that no recipe holds."""
    steps = reading.integer(key, -1)
    read_length(fields, steps if steps > 0 else None)


# -- adapters ----------------------------------------------------------------------------------------------------

_ALL = ("all", "all-linear", "all_linear")
_SAVED: dict[str, Part] = {"embed_tokens": "embedding", "lm_head": "head"}


def _names_of_layers(key: str, named: Any) -> list[str]:
    words = named.split(",") if isinstance(named, str) else named
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise SpecError(key, f"{shown(named)} are not names of layers", "use [q_proj, v_proj]")
    return [word.strip().rpartition(".")[2] for word in words]


def read_saved_modules(reading: Reading, fields: Fields, key: str) -> None:
    """Modules that are trained whole beside the adapters."""
    if (named := reading.value(key)) is None:
        return
    names, model = _names_of_layers(key, named), model_of(reading, fields)
    parts = {_SAVED[name] for name in names if name in _SAVED}
    if model is not None and model.tied_embeddings and "head" in parts:
        parts = parts - {"head"} | {"embedding"}  # one tensor
    fields["training.trained"] = sorted(parts)
    if left := sorted({name for name in names if name not in _SAVED}):
        reading.notes.append(f"{key}: {', '.join(left)[:80]} trained whole is not priced, which takes more memory")


def targets_of(reading: Reading, key: str, named: Any) -> list[str]:
    """The linear layers that have adapters; others than those of layers are left out, with a note."""
    names = _names_of_layers(key, named)
    if any(name in _ALL for name in names):
        return ["all-linear"]
    known = sorted({name for name in names if name in TARGETS})
    if left := sorted({name for name in names if name and name not in TARGETS}):
        reading.notes.append(f"{key}: adapters on {', '.join(left)[:80]} are not priced, which take a little more")
    if not known:
        reading.notes.append(f"{key}: no linear layer is recognised, so all have adapters")
    return known or ["all-linear"]


def read_base(fields: Fields, *, bits: int | None, double: bool) -> None:
    """A frozen base in bitsandbytes' 4 or 8 bits, or in 16 bits where it is loaded so; `None`: in fp32."""
    if bits is not None:
        words = {4: "nf4-double" if double else "nf4", 8: "int8", 16: "bf16"}
        fields["training.base_precision"] = words[bits]


# -- sharding ----------------------------------------------------------------------------------------------------


def read_deepspeed(reading: Reading, fields: Fields, key: str) -> None:
    """The stack is DeepSpeed; its file is read where it lies beside the recipe, else its name says the stage."""
    named = reading.value(key)
    if not isinstance(named, str):
        raise SpecError(key, f"{shown(named)} is not the path of a file", "name DeepSpeed's configuration file")
    fields["stack"] = "deepspeed"
    text = reading.beside(named) or reading.beside(named.rpartition("/")[2])
    if text is None:
        said = re.search(r"(?:z|zero|stage)[_-]?([0-3])", named.rpartition("/")[2], re.IGNORECASE)
        stage = int(said[1]) if said else 2
        fields["strategy.zero"] = stage
        if "offload" in named:
            fields.update({"strategy.offload.optimizer": 1.0, "strategy.offload.gradients": 1.0})
            if stage == 3:
                fields["strategy.offload.weights"] = 1.0
        reading.notes.append(f"{key} {shown(named)} is not beside this file: ZeRO-{stage} is taken from its name")
        return
    try:
        read = DEEPSPEED.read(text, model_of(reading, fields), reading.cluster, reading.given)
    except SpecError as error:
        raise SpecError(f"{named}: {error.field}", error.problem, error.remedy) from None
    kept = {path: value for path, value in read.fields.items() if path.startswith(("strategy.", "stack"))}
    fields.update({path: value for path, value in kept.items() if path != "strategy.microbatch"})
    reading.notes.append(f"{named} is read as the configuration of DeepSpeed")


def read_fsdp(reading: Reading, fields: Fields, section: str, version: int) -> None:
    """``fsdp_config`` of Accelerate, with or without the prefix of its keys."""

    def key(name: str) -> str:
        return next((path for path in (f"{section}.fsdp_{name}", f"{section}.{name}") if reading.has(path)),
                    f"{section}.{name}")  # fmt: skip

    fields["strategy.zero"] = 3
    if version == 1:
        fields["stack"] = "accelerate@0.34"
    words = str(reading.value(key("sharding_strategy"), "FULL_SHARD")).upper()
    if words in ("SHARD_GRAD_OP", "2"):
        fields["strategy.zero"] = 2
    if words in ("NO_SHARD", "3"):
        fields["strategy.zero"] = 0
    if words.startswith("HYBRID") and reading.cluster is not None:
        fields["strategy.shard_group"] = reading.cluster.node_devices
    if version == 2:
        fields["strategy.keep_parameters"] = not reading.flag(key("reshard_after_forward"), True)
    if reading.flag(key("offload_params")):
        fields.update({f"strategy.offload.{name}": 1.0 for name in ("weights", "gradients", "optimizer")})
    if reading.flag(key("activation_checkpointing")):
        fields["strategy.recompute"] = "full"


# -- kernels -----------------------------------------------------------------------------------------------------


def read_attention(reading: Reading, fields: Fields, key: str) -> None:
    word = str(reading.value(key, "sdpa")).lower()
    fields["training.attention"] = "unfused" if word in ("eager", "disabled") else "flash"


LIGER = {"stack.elementwise": "fused", "stack.gated_activation": "fused", "stack.norms": "fused"}
LOSS_IN_PIECES = {"stack.loss": "pieces"}


# -- what advice may change ----------------------------------------------------------------------------------------


def has_adapters(job: Job) -> bool:
    return job.training.adapters is not None


def has_replicas(job: Job) -> bool:
    return job.strategy.data_parallel > 1


def in_bf16(key: str = "bf16", instead_of: str = "fp16") -> Move:
    return Move({key: True, instead_of: None}, lambda job: job.training.precision == "fp32")


def by_deepspeed(*files: str) -> tuple[Move, ...]:
    """Sharding by one of DeepSpeed's files that come with the framework, in place of FSDP."""
    return tuple(Move({"deepspeed": file, "fsdp": None, "fsdp_config": None}, has_replicas) for file in files)
