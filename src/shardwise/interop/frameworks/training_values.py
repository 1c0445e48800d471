"""The optimization settings of every framework: learning rate and its schedule, decay, clipping, loss scale.

A job has them in `training.optimization`, `run.schedule` and the run's length. Writers return settings, readers fill
fields by dotted path.
"""

from __future__ import annotations

import math
from typing import Any

from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.job_fields import steps_of
from shardwise.interop.frameworks.target import Reading, Table, word_for, written
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job

OPTIMIZATION, SCALING, SCHEDULE = "training.optimization.", "training.optimization.loss_scaling.", "run.schedule."
Fields = dict[str, Any]


def read_length(fields: Fields, steps: int | None) -> None:
    """The run's length: in tokens if the batch is known, else in steps."""
    batch, seq = fields.get("training.global_batch"), fields.get("training.seq")
    if steps and batch and seq:
        fields["training.tokens"] = steps * batch * seq
    elif steps:
        fields["run.steps"] = steps


def read_numbers(reading: Reading, fields: Fields, table: Table) -> None:
    """Fields below ``training.optimization``, or their defaults in the framework."""
    for name, (key, usual) in table.items():
        value = reading.number(key, usual)
        if value is not None:
            fields[OPTIMIZATION + name] = value


def read_clip(fields: Fields, value: Any) -> None:
    """Zero, or nothing, means no clipping."""
    fields[OPTIMIZATION + "clip_norm"] = value or None


def read_scaling(reading: Reading, fields: Fields, table: Table) -> None:
    """The loss scale if the file trains in fp16; a static scale of zero means none."""
    values = {name: reading.number(key, usual) for name, (key, usual) in table.items()}
    if fields.get("training.precision") != "fp16":
        return
    values["static"] = values.get("static") or None
    for name, value in values.items():
        fields[SCALING + name] = int(value) if name in ("window", "hysteresis") else value


def decimal(value: float) -> float:
    """A quotient or product of decimal numbers without the noise of their binary forms."""
    return float(f"{value:.12g}")


# -- DeepSpeed ----------------------------------------------------------------------------------------------

_DS_PARAMS, _DS_RATE = "optimizer.params.", "scheduler.params."
_DS_NUMBERS: Table = {
    "learning_rate": (_DS_PARAMS + "lr", None), "epsilon": (_DS_PARAMS + "eps", None),
    "decay": (_DS_PARAMS + "weight_decay", None), "momentum": (_DS_PARAMS + "momentum", None),
}  # fmt: skip
_DS_SCALE: Table = {
    "static": ("fp16.loss_scale", 0), "window": ("fp16.loss_scale_window", 1000), "hysteresis": ("fp16.hysteresis", 2),
    "minimum": ("fp16.min_loss_scale", 1), "initial": ("fp16.initial_scale_power", 16),
}  # fmt: skip
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
    scaling = optimization.loss_scaling
    if training.precision == "fp16":
        power = round(math.log2(scaling.initial))
        settings |= written(scaling, _DS_SCALE)
        settings |= {"fp16.loss_scale": scaling.static or 0, "fp16.initial_scale_power": power}
    word = word_for(_DS_SCHEDULES, schedule.kind)
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
    read_numbers(reading, fields, _DS_NUMBERS)
    betas = reading.value(_DS_PARAMS + "betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2 or not all(isinstance(beta, int | float) for beta in betas):
            raise SpecError(_DS_PARAMS + "betas", f"{shown(betas)} are not two numbers", "write [0.9, 0.95]")
        fields.update({OPTIMIZATION + "beta1": betas[0], OPTIMIZATION + "beta2": betas[1]})
    if reading.settings.get("gradient_clipping") != "auto":
        read_clip(fields, reading.number("gradient_clipping", 0.0))
    read_scaling(reading, fields, _DS_SCALE)
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

_MEGATRON: Table = {
    "learning_rate": ("--lr", None), "decay": ("--weight-decay", 0.01), "beta1": ("--adam-beta1", 0.9),
    "beta2": ("--adam-beta2", 0.999), "epsilon": ("--adam-eps", 1e-8),
}  # fmt: skip
_MEGATRON_SCALE: Table = {
    "static": ("--loss-scale", None), "initial": ("--initial-loss-scale", 2.0**32),
    "window": ("--loss-scale-window", 1000), "hysteresis": ("--hysteresis", 2), "minimum": ("--min-loss-scale", 1.0),
}  # fmt: skip
_MEGATRON_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}


def megatron_settings(job: Job) -> Settings:
    """In samples if the job counts tokens, else in iterations: Megatron-LM rejects a mixture."""
    optimization, schedule, training = job.training.optimization, job.run.schedule, job.training
    batch, tokens = job.sequences, training.tokens
    unit, each = ("samples", batch) if tokens else ("iters", 1)
    settings = written(optimization, _MEGATRON)
    settings["--clip-grad"] = optimization.clip_norm or 0.0
    settings["--train-samples" if tokens else "--train-iters"] = -(-tokens // training.seq) if tokens else job.run.steps
    settings["--lr-decay-style"] = word_for(_MEGATRON_STYLES, schedule.kind)
    settings[f"--lr-warmup-{unit}"] = schedule.warmup * each or None
    if schedule.kind != "constant":
        settings["--min-lr"] = decimal(schedule.final * optimization.learning_rate)
    if schedule.kind == "wsd":
        settings[f"--lr-wsd-decay-{unit}"] = math.ceil(schedule.decay * steps_of(job)) * each
        settings["--lr-wsd-decay-style"] = "linear"
    if training.precision == "fp16":
        scaling = optimization.loss_scaling
        dynamic = scaling.static is None
        settings |= written(scaling, _MEGATRON_SCALE) if dynamic else {"--loss-scale": scaling.static}
    return settings


def read_megatron(reading: Reading, fields: Fields, steps: int | None) -> None:
    """``steps`` of the run, if known."""
    read_numbers(reading, fields, _MEGATRON)
    read_clip(fields, reading.number("--clip-grad", 1.0))
    for optimizer, option in {"sgd-momentum": "--sgd-momentum", "muon": "--muon-momentum"}.items():
        value = reading.number(option, 0.9)
        if fields["training.optimizer"] == optimizer:
            fields[OPTIMIZATION + "momentum"] = value
    read_scaling(reading, fields, _MEGATRON_SCALE)
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
    fields[SCHEDULE + "final"] = decimal(lowest / rate)
    if style == "WSD":
        if falls != "linear":
            reading.notes.append(f"--lr-wsd-decay-style {shown(falls)} is read as linear")
        if decay and steps:
            fields[SCHEDULE + "decay"] = decimal(decay / steps)


def _megatron_steps(reading: Reading, option: str, batch: int) -> int:
    steps, samples = reading.integer(f"{option}-iters", 0), reading.integer(f"{option}-samples", 0)
    return int(steps or (-(-samples // batch) if batch else 0))


# -- TorchTitan ---------------------------------------------------------------------------------------------

_TITAN: Table = {
    "learning_rate": ("optimizer.lr", 8e-4), "beta1": ("optimizer.beta1", 0.9), "beta2": ("optimizer.beta2", 0.95),
    "epsilon": ("optimizer.eps", 1e-8), "decay": ("optimizer.weight_decay", 0.1),
}  # fmt: skip
_TITAN_RATE = "lr_scheduler."


def torchtitan_settings(job: Job) -> Settings:
    optimization, schedule = job.training.optimization, job.run.schedule
    settings = written(optimization, _TITAN)
    settings["training.steps"] = steps_of(job)
    settings["training.max_norm"] = optimization.clip_norm
    settings[_TITAN_RATE + "warmup_steps"] = schedule.warmup
    settings[_TITAN_RATE + "decay_type"] = "cosine" if schedule.kind == "cosine" else "linear"
    settings[_TITAN_RATE + "decay_ratio"] = schedule.decay if schedule.kind == "wsd" else None
    # It always decays: a constant rate decays to itself.
    settings[_TITAN_RATE + "min_lr_factor"] = 1.0 if schedule.kind == "constant" else schedule.final
    return settings


def read_torchtitan(reading: Reading, fields: Fields) -> None:
    read_numbers(reading, fields, _TITAN)
    read_clip(fields, reading.number("training.max_norm", 1.0))
    kind = reading.text(_TITAN_RATE + "decay_type", "linear")
    ratio, lowest = reading.number(_TITAN_RATE + "decay_ratio"), reading.number(_TITAN_RATE + "min_lr_factor", 0.0)
    warmup, steps = reading.integer(_TITAN_RATE + "warmup_steps", 200), reading.count("training.steps", 10_000)
    read_length(fields, steps)
    if reading.has(_TITAN_RATE + "total_steps"):
        reading.notes.append("lr_scheduler.total_steps is not used: the rate decays until training.steps")
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
_NANO: Table = {
    "learning_rate": (_NANO_RATE + "learning_rate", None), "decay": ("optimizer.weight_decay", None),
    "beta1": (_NANO_ADAM + "beta1", None), "beta2": (_NANO_ADAM + "beta2", None), "epsilon": (_NANO_ADAM + "eps", None),
}  # fmt: skip


def nanotron_settings(job: Job) -> Settings:
    optimization, schedule, steps = job.training.optimization, job.run.schedule, steps_of(job)
    adam = job.training.optimizer not in ("sgd", "sgd-momentum")
    numbers = written(optimization, _NANO)
    settings = {key: value for key, value in numbers.items() if adam or not key.startswith(_NANO_ADAM)}
    final = 1.0 if schedule.kind == "constant" else schedule.final
    falling = math.ceil(schedule.decay * steps) if schedule.kind == "wsd" else steps - schedule.warmup
    settings["tokens.train_steps"] = steps
    settings["optimizer.clip_grad"] = optimization.clip_norm
    settings[_NANO_RATE + "lr_warmup_steps"] = schedule.warmup
    settings[_NANO_RATE + "lr_warmup_style"] = "linear"
    settings[_NANO_RATE + "lr_decay_style"] = "cosine" if schedule.kind == "cosine" else "linear"
    settings[_NANO_RATE + "lr_decay_starting_step"] = steps - falling
    settings[_NANO_RATE + "lr_decay_steps"] = falling
    settings[_NANO_RATE + "min_decay_lr"] = decimal(final * optimization.learning_rate)
    return settings


def read_nanotron(reading: Reading, fields: Fields) -> None:
    read_numbers(reading, fields, _NANO)
    read_clip(fields, reading.number("optimizer.clip_grad"))
    rate, steps = fields.get(OPTIMIZATION + "learning_rate"), reading.count("tokens.train_steps")
    warmup, word = reading.integer(_NANO_RATE + "lr_warmup_steps", 0), reading.text(_NANO_RATE + "lr_warmup_style")
    style = reading.text(_NANO_RATE + "lr_decay_style", "linear")
    lowest = reading.number(_NANO_RATE + "min_decay_lr", rate)
    start = reading.integer(_NANO_RATE + "lr_decay_starting_step", warmup)
    falling = reading.integer(_NANO_RATE + "lr_decay_steps")
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
    fields.update({SCHEDULE + "kind": kind, SCHEDULE + "warmup": warmup, SCHEDULE + "final": decimal(lowest / rate)})
    if kind == "wsd" and falling:
        fields[SCHEDULE + "decay"] = decimal(falling / steps)


# -- Colossal-AI --------------------------------------------------------------------------------------------

_COLOSSAL_SCALE: Table = {
    "initial": ("arguments.initial_scale", 2.0**16), "window": ("arguments.growth_interval", 1000),
    "hysteresis": ("arguments.hysteresis", 2), "minimum": ("arguments.min_scale", 1.0),
}  # fmt: skip


def colossalai_settings(job: Job) -> Settings:
    optimization = job.training.optimization
    scaling = written(optimization.loss_scaling, _COLOSSAL_SCALE) if job.training.precision == "fp16" else {}
    return {"arguments.max_norm": optimization.clip_norm or 0.0, **scaling}


def read_colossalai(reading: Reading, fields: Fields) -> None:
    read_clip(fields, reading.number("arguments.max_norm", 0.0))
    read_scaling(reading, fields, _COLOSSAL_SCALE)
