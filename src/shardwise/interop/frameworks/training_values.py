"""The optimization settings of every framework: learning rate and its schedule, decay, clipping, loss scale.

A job has them in `training.optimization`, `run.schedule` and the run's length; what both sides have is carried both
ways. Writers give settings, readers fill fields by dotted path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.job_fields import steps_of
from shardwise.interop.frameworks.target import Reading
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job

OPTIMIZATION, SCALING, SCHEDULE = "training.optimization.", "training.optimization.loss_scaling.", "run.schedule."
Fields = dict[str, Any]


def read_length(fields: Fields, steps: int | None) -> None:
    """The run's length: tokens where the batch is known, as a job says it, and else steps."""
    batch, seq = fields.get("training.global_batch"), fields.get("training.seq")
    if steps and batch and seq:
        fields["training.tokens"] = steps * batch * seq
    elif steps:
        fields["run.steps"] = steps


_NONE: Mapping[str, float] = {}


def read_numbers(
    reading: Reading, fields: Fields, keys: Mapping[str, str], absent: Mapping[str, float] = _NONE
) -> None:
    """Fields below ``training.optimization`` from the keys that hold them, or ``absent`` ones."""
    for name, key in keys.items():
        value = reading.number(key, absent.get(name))
        if value is not None:
            fields[OPTIMIZATION + name] = value


def read_clip(fields: Fields, value: Any) -> None:
    """Zero, or nothing, is no clipping."""
    fields[OPTIMIZATION + "clip_norm"] = value or None


def read_scaling(reading: Reading, fields: Fields, keys: Mapping[str, str], absent: Mapping[str, float]) -> None:
    """The loss scale, where the file trains in fp16; a static scale of zero is none."""
    values = {name: reading.number(key, absent.get(name)) for name, key in keys.items()}
    if fields.get("training.precision") != "fp16":
        return
    static = values.pop("static", None)
    for name, value in {**values, "static": static or None}.items():
        fields[SCALING + name] = int(value) if name in ("window", "hysteresis") else value


def share(part: float, whole: float) -> float:
    """A quotient of two decimal numbers, without the noise of their binary forms."""
    return float(f"{part / whole:.12g}")


def product(first: float, second: float) -> float:
    return float(f"{first * second:.12g}")


# -- DeepSpeed ----------------------------------------------------------------------------------------------

_DS_PARAMS, _DS_RATE = "optimizer.params.", "scheduler.params."
_DS_SCALE = {"static": "fp16.loss_scale", "initial": "fp16.initial_scale_power", "window": "fp16.loss_scale_window",
             "hysteresis": "fp16.hysteresis", "minimum": "fp16.min_loss_scale"}  # fmt: skip
_DS_SCALE_DEFAULTS = {"static": 0, "initial": 16, "window": 1000, "hysteresis": 2, "minimum": 1}
_DS_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def deepspeed_settings(job: Job) -> Settings:
    training, optimization, schedule = job.training, job.training.optimization, job.run.schedule
    rate, adam = optimization.learning_rate, not training.optimizer.startswith("sgd")
    moving = training.optimizer in ("sgd-momentum", "muon")
    settings: Settings = {
        _DS_PARAMS + "lr": rate,
        _DS_PARAMS + "betas": [optimization.beta1, optimization.beta2] if adam else None,
        _DS_PARAMS + "eps": optimization.epsilon if adam else None,
        _DS_PARAMS + "weight_decay": optimization.decay,
        _DS_PARAMS + "momentum": optimization.momentum if moving else None,
        "gradient_clipping": optimization.clip_norm or 0.0,
    }
    scaling, power = optimization.loss_scaling, math.log2(optimization.loss_scaling.initial)
    if training.precision == "fp16":
        settings.update({"fp16.loss_scale": scaling.static or 0, "fp16.loss_scale_window": scaling.window,
                         "fp16.hysteresis": scaling.hysteresis, "fp16.min_loss_scale": scaling.minimum,
                         "fp16.initial_scale_power": round(power)})  # fmt: skip
    word = next((word for word, kind in _DS_SCHEDULES.items() if kind == schedule.kind), None)
    if word is None or (schedule.kind == "linear" and schedule.final > 0):
        return settings  # the training script brings one
    settings.update({"scheduler.type": word, _DS_RATE + "warmup_num_steps": max(1, schedule.warmup)})
    settings[_DS_RATE + "warmup_type"] = "linear"
    if schedule.kind != "constant":
        settings[_DS_RATE + "total_num_steps"] = steps_of(job)
    if schedule.kind == "cosine":
        settings[_DS_RATE + "cos_min_ratio"] = schedule.final
    else:
        settings.update({_DS_RATE + "warmup_min_lr": 0.0, _DS_RATE + "warmup_max_lr": rate})
    return settings


def read_deepspeed(reading: Reading, fields: Fields) -> None:
    names = {"learning_rate": "lr", "epsilon": "eps", "decay": "weight_decay", "momentum": "momentum"}
    read_numbers(reading, fields, {ours: _DS_PARAMS + theirs for ours, theirs in names.items()})
    betas = reading.value(_DS_PARAMS + "betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2 or not all(isinstance(one, int | float) for one in betas):
            raise SpecError(_DS_PARAMS + "betas", f"{shown(betas)} are not two numbers", "write [0.9, 0.95]")
        fields.update({OPTIMIZATION + "beta1": betas[0], OPTIMIZATION + "beta2": betas[1]})
    if reading.settings.get("gradient_clipping") != "auto":
        read_clip(fields, reading.number("gradient_clipping", 0.0))
    read_scaling(reading, fields, _DS_SCALE, _DS_SCALE_DEFAULTS)
    if SCALING + "initial" in fields:
        fields[SCALING + "initial"] = 2.0 ** min(float(fields[SCALING + "initial"]), 60.0)
    _read_deepspeed_scheduler(reading, fields)


def _read_deepspeed_scheduler(reading: Reading, fields: Fields) -> None:
    name = reading.text("scheduler.type")
    keys = ("warmup_num_steps", "total_num_steps", "cos_min_ratio", "warmup_max_lr")
    values = {key: reading.number(_DS_RATE + key) for key in keys}
    starts = [reading.number(_DS_RATE + key, 0.0) for key in ("warmup_min_lr", "warmup_min_ratio")]
    word = reading.text(_DS_RATE + "warmup_type", "log")
    if name is None:
        return
    kind = {known.lower(): ours for known, ours in _DS_SCHEDULES.items()}.get(name.lower())
    if kind is None:
        reading.notes.append(f"scheduler.type {shown(name)} has no counterpart")
        return
    if word != "linear":
        reading.notes.append(f"scheduler.params.warmup_type {word} is read as linear")
    if any(starts):
        reading.notes.append("scheduler.params: the warm-up is read as one from zero")
    fields[SCHEDULE + "kind"] = kind
    warmup = 1000 if values["warmup_num_steps"] is None else int(values["warmup_num_steps"])
    fields[SCHEDULE + "warmup"] = warmup if warmup > 1 else 0  # two steps are the least it takes
    if values["warmup_max_lr"] is not None:
        fields[OPTIMIZATION + "learning_rate"] = values["warmup_max_lr"]
    if kind == "linear":
        fields[SCHEDULE + "final"] = 0.0
    if kind == "cosine":
        fields[SCHEDULE + "final"] = 1e-4 if values["cos_min_ratio"] is None else values["cos_min_ratio"]
    read_length(fields, None if values["total_num_steps"] is None else int(values["total_num_steps"]))


# -- Megatron-LM --------------------------------------------------------------------------------------------

_MEGATRON = {"learning_rate": "--lr", "decay": "--weight-decay", "beta1": "--adam-beta1", "beta2": "--adam-beta2",
             "epsilon": "--adam-eps"}  # fmt: skip
_MEGATRON_DEFAULTS = {"decay": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
_MEGATRON_SCALE = {"static": "--loss-scale", "initial": "--initial-loss-scale", "window": "--loss-scale-window",
                   "hysteresis": "--hysteresis", "minimum": "--min-loss-scale"}  # fmt: skip
_MEGATRON_SCALE_DEFAULTS = {"initial": 2.0**32, "window": 1000, "hysteresis": 2, "minimum": 1.0}
_MEGATRON_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}


def megatron_settings(job: Job) -> Settings:
    """In samples where the job says tokens, else in iterations: Megatron-LM refuses a mixture."""
    optimization, schedule, training = job.training.optimization, job.run.schedule, job.training
    batch, tokens = job.sequences, training.tokens
    unit, each = ("samples", batch) if tokens else ("iters", 1)
    settings: Settings = {option: getattr(optimization, name) for name, option in _MEGATRON.items()}
    settings["--clip-grad"] = optimization.clip_norm or 0.0
    settings["--train-samples" if tokens else "--train-iters"] = -(-tokens // training.seq) if tokens else job.run.steps
    settings["--lr-decay-style"] = {ours: word for word, ours in _MEGATRON_STYLES.items()}[schedule.kind]
    settings[f"--lr-warmup-{unit}"] = schedule.warmup * each or None
    if schedule.kind != "constant":
        settings["--min-lr"] = product(schedule.final, optimization.learning_rate)
    if schedule.kind == "wsd":
        settings[f"--lr-wsd-decay-{unit}"] = math.ceil(schedule.decay * steps_of(job)) * each
        settings["--lr-wsd-decay-style"] = "linear"
    if training.precision == "fp16":
        scaling = optimization.loss_scaling
        values = {option: getattr(scaling, name) for name, option in _MEGATRON_SCALE.items()}
        settings.update(values if scaling.static is None else {"--loss-scale": scaling.static})
    return settings


def read_megatron(reading: Reading, fields: Fields, steps: int | None) -> None:
    """``steps`` of the run, where they are known."""
    read_numbers(reading, fields, _MEGATRON, _MEGATRON_DEFAULTS)
    read_clip(fields, reading.number("--clip-grad", 1.0))
    momenta = {"sgd-momentum": ("--sgd-momentum", 0.9), "muon": ("--muon-momentum", 0.9)}
    for optimizer, (option, usual) in momenta.items():
        value = reading.number(option, usual)
        if fields["training.optimizer"] == optimizer:
            fields[OPTIMIZATION + "momentum"] = value
    read_scaling(reading, fields, _MEGATRON_SCALE, _MEGATRON_SCALE_DEFAULTS)
    style = reading.text("--lr-decay-style", "linear")
    lowest, batch = reading.number("--min-lr", 0.0), fields.get("training.global_batch") or 0
    warmup, decay = (_megatron_steps(reading, f"--lr-{name}", batch) for name in ("warmup", "wsd-decay"))
    fraction, falls = reading.number("--lr-warmup-fraction"), reading.text("--lr-wsd-decay-style", "exponential")
    rate = fields.get(OPTIMIZATION + "learning_rate")
    if not rate or rate < 0:
        return
    if style not in _MEGATRON_STYLES:
        reading.notes.append(f"--lr-decay-style {shown(style)} has no counterpart")
        return
    fields[SCHEDULE + "kind"] = _MEGATRON_STYLES[style]
    fields[SCHEDULE + "warmup"] = round(fraction * steps) if fraction and steps else warmup
    fields[SCHEDULE + "final"] = share(lowest, rate)
    if style == "WSD":
        if falls != "linear":
            reading.notes.append(f"--lr-wsd-decay-style {shown(falls)} is read as linear")
        if decay and steps:
            fields[SCHEDULE + "decay"] = share(decay, steps)


def _megatron_steps(reading: Reading, option: str, batch: int) -> int:
    steps, samples = reading.whole(f"{option}-iters", 0), reading.whole(f"{option}-samples", 0)
    return int(steps or (-(-samples // batch) if batch else 0))


# -- The rest of `training_values`: frameworks whose configuration is YAML or TOML, or leaves most to the script

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
