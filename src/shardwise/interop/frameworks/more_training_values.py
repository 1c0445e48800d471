"""The rest of `training_values`: frameworks whose configuration is YAML or TOML, or leaves most to the script."""

from __future__ import annotations

import math

from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.said import steps_of
from shardwise.interop.frameworks.target import Reading
from shardwise.interop.frameworks.training_values import (
    OPTIMIZATION,
    SCHEDULE,
    Fields,
    product,
    read_clip,
    read_length,
    read_numbers,
    read_scaling,
    share,
)
from shardwise.spec.errors import shown
from shardwise.spec.job import Job

# -- TorchTitan ---------------------------------------------------------------------------------------------

_TITAN = {"learning_rate": "optimizer.lr", "beta1": "optimizer.beta1", "beta2": "optimizer.beta2",
          "epsilon": "optimizer.eps", "decay": "optimizer.weight_decay"}  # fmt: skip
_TITAN_DEFAULTS = {"learning_rate": 8e-4, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "decay": 0.1}
_TITAN_RATE = "lr_scheduler."


def torchtitan_settings(job: Job) -> Settings:
    optimization, schedule = job.training.optimization, job.run.schedule
    settings: Settings = {key: getattr(optimization, name) for name, key in _TITAN.items()}
    settings["training.steps"] = steps_of(job)
    settings["training.max_norm"] = optimization.clip_norm
    settings[_TITAN_RATE + "warmup_steps"] = schedule.warmup
    settings[_TITAN_RATE + "decay_type"] = "cosine" if schedule.kind == "cosine" else "linear"
    settings[_TITAN_RATE + "decay_ratio"] = schedule.decay if schedule.kind == "wsd" else None
    # It always decays: a constant rate is one that falls to itself.
    settings[_TITAN_RATE + "min_lr_factor"] = 1.0 if schedule.kind == "constant" else schedule.final
    return settings


def read_torchtitan(reading: Reading, fields: Fields) -> None:
    read_numbers(reading, fields, _TITAN, _TITAN_DEFAULTS)
    read_clip(fields, reading.number("training.max_norm", 1.0))
    kind = reading.text(_TITAN_RATE + "decay_type", "linear")
    ratio, lowest = reading.number(_TITAN_RATE + "decay_ratio"), reading.number(_TITAN_RATE + "min_lr_factor", 0.0)
    warmup, steps = reading.whole(_TITAN_RATE + "warmup_steps", 200), reading.count("training.steps", 10_000)
    read_length(fields, steps)
    if reading.has(_TITAN_RATE + "total_steps"):
        reading.notes.append("lr_scheduler.total_steps is not used: the rate falls until training.steps")
        reading.used.add(_TITAN_RATE + "total_steps")
    if kind not in ("linear", "cosine") or (ratio is not None and kind != "linear"):
        reading.notes.append(f"lr_scheduler.decay_type {shown(kind)} is read as linear")
        kind = "linear"
    named = "constant" if lowest == 1 else "wsd" if ratio is not None else kind
    fields.update({SCHEDULE + "kind": named, SCHEDULE + "warmup": warmup, SCHEDULE + "final": lowest})
    if ratio:
        fields[SCHEDULE + "decay"] = ratio


# -- nanotron -----------------------------------------------------------------------------------------------

_NANO_RATE, _NANO_ADAM = "optimizer.learning_rate_scheduler.", "optimizer.optimizer_factory.adam_"
_NANO = {"learning_rate": _NANO_RATE + "learning_rate", "decay": "optimizer.weight_decay",
         "beta1": _NANO_ADAM + "beta1", "beta2": _NANO_ADAM + "beta2", "epsilon": _NANO_ADAM + "eps"}  # fmt: skip


def nanotron_settings(job: Job) -> Settings:
    optimization, schedule, steps = job.training.optimization, job.run.schedule, steps_of(job)
    adam = job.training.optimizer not in ("sgd", "sgd-momentum")
    settings: Settings = {
        key: getattr(optimization, name) for name, key in _NANO.items() if adam or not key.startswith(_NANO_ADAM)
    }
    final = 1.0 if schedule.kind == "constant" else schedule.final
    falling = math.ceil(schedule.decay * steps) if schedule.kind == "wsd" else steps - schedule.warmup
    settings["tokens.train_steps"] = steps
    settings["optimizer.clip_grad"] = optimization.clip_norm
    settings[_NANO_RATE + "lr_warmup_steps"] = schedule.warmup
    settings[_NANO_RATE + "lr_warmup_style"] = "linear"
    settings[_NANO_RATE + "lr_decay_style"] = "cosine" if schedule.kind == "cosine" else "linear"
    settings[_NANO_RATE + "lr_decay_starting_step"] = steps - falling
    settings[_NANO_RATE + "lr_decay_steps"] = falling
    settings[_NANO_RATE + "min_decay_lr"] = product(final, optimization.learning_rate)
    return settings


def read_nanotron(reading: Reading, fields: Fields) -> None:
    read_numbers(reading, fields, _NANO)
    read_clip(fields, reading.number("optimizer.clip_grad"))
    rate, steps = fields.get(OPTIMIZATION + "learning_rate"), reading.count("tokens.train_steps")
    warmup, word = reading.whole(_NANO_RATE + "lr_warmup_steps", 0), reading.text(_NANO_RATE + "lr_warmup_style")
    style = reading.text(_NANO_RATE + "lr_decay_style", "linear")
    lowest = reading.number(_NANO_RATE + "min_decay_lr", rate)
    start = reading.whole(_NANO_RATE + "lr_decay_starting_step", warmup)
    falling = reading.whole(_NANO_RATE + "lr_decay_steps")
    read_length(fields, steps)
    if not rate or rate < 0:
        return
    if style not in ("linear", "cosine"):
        reading.notes.append(f"lr_decay_style {shown(style)} is read as linear")
        style = "linear"
    if word == "constant":
        warmup = 0
    stable = start > warmup and steps is not None
    kind = "constant" if lowest == rate else "wsd" if stable else style
    fields.update({SCHEDULE + "kind": kind, SCHEDULE + "warmup": warmup, SCHEDULE + "final": share(lowest, rate)})
    if kind == "wsd" and falling:
        fields[SCHEDULE + "decay"] = share(falling, steps)


# -- Colossal-AI, Accelerate --------------------------------------------------------------------------------

_COLOSSAL_SCALE = {"initial": "arguments.initial_scale", "window": "arguments.growth_interval",
                   "hysteresis": "arguments.hysteresis", "minimum": "arguments.min_scale"}  # fmt: skip
_COLOSSAL_SCALE_DEFAULTS = {"initial": 2.0**16, "window": 1000, "hysteresis": 2, "minimum": 1.0}


def colossalai_settings(job: Job) -> Settings:
    optimization = job.training.optimization
    settings: Settings = {"arguments.max_norm": optimization.clip_norm or 0.0}
    if job.training.precision == "fp16":
        settings.update({key: getattr(optimization.loss_scaling, name) for name, key in _COLOSSAL_SCALE.items()})
    return settings


def read_colossalai(reading: Reading, fields: Fields) -> None:
    read_clip(fields, reading.number("arguments.max_norm", 0.0))
    read_scaling(reading, fields, _COLOSSAL_SCALE, _COLOSSAL_SCALE_DEFAULTS)


def read_accelerate(reading: Reading, fields: Fields) -> None:
    """Of the mode that DeepSpeed runs: the only one whose configuration clips."""
    if reading.has("deepspeed_config.gradient_clipping"):
        read_clip(fields, reading.number("deepspeed_config.gradient_clipping"))
