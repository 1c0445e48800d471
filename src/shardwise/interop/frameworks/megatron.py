"""Megatron-LM: the command-line arguments of ``pretrain_gpt.py``, one option per line, the model included."""

from __future__ import annotations

import re
from typing import Any

from shardwise.interop.frameworks import megatron_deepspeed, megatron_model, training_values
from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.job_fields import Imported, with_schedule
from shardwise.interop.frameworks.megatron_files import ARGUMENTS
from shardwise.interop.frameworks.target import Option, Reading, Target, word_for
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.rules import stage_layer_counts

# -- What Megatron-LM's selective recomputation recomputes, in the operators that are priced here ----
# Megatron-LM's ``transformer_layer.py`` recomputes a norm where it is a module of its own: Transformer Engine fuses
# the norm before attention into the matmul after it unless attention is latent, and that before a dense MLP.
# ``experts.py`` recomputes the activation function of routed experts and of nothing else. ``transformer_config.py``
# says that ``core_attn`` is of no use where attention is fused. ``moe_layer.py`` recomputes whole mixtures (``moe``).

MODULES = {
    "attention": "core_attn",
    "norm": "layernorm",
    "activation": "moe_act",
    "up-projection": "mla_up_proj",
    "experts": "moe",
}
_FEW = 0.1  # share of dense layers, whose second norm is kept, that does not change a price noticeably


def exact_modules(model: Model, attention: str) -> dict[str, str]:
    """Of every operator that a module recomputes alone, that module."""
    moe = model.moe
    experts = model.moe_layers if moe else 0
    exact = {
        "attention": attention == "unfused",
        "norm": model.mla is not None and experts >= (1 - _FEW) * model.layers,
        "activation": moe is not None and experts == model.layers and moe.shared_ffn == 0,
        "up-projection": model.mla is not None,
        "experts": moe is not None,
    }
    return {operator: MODULES[operator] for operator, holds in exact.items() if holds}


def selective(job: Job) -> tuple[str, ...]:
    """What of that is worth recomputing: attention if its scores are stored, else the cheap operators around it."""
    exact = exact_modules(job.model, job.training.attention)
    return ("attention",) if "attention" in exact else tuple(name for name in exact if name != "experts")


def compose_recompute(job: Job) -> Settings:
    strategy = job.strategy
    if strategy.recompute == "none":
        return {}
    if strategy.recompute == "full":
        method, layers = ("uniform", 1) if strategy.recompute_layers is None else ("block", strategy.recompute_layers)
        return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": layers}
    exact = exact_modules(job.model, job.training.attention)
    chosen = [exact[operator] for operator in job.selective_operators if operator in exact]
    return {"--recompute-granularity": "selective", "--recompute-modules": chosen} if chosen else {}


_CHECKPOINTING = ("--checkpoint-activations", "--deepspeed-activation-checkpointing")  # of Megatron-DeepSpeed: layers
_OLD_CHECKPOINTING = "--activations-checkpoint-method"  # of 2021 and 2022


def interpret_recompute(reading: Reading, fields: dict[str, Any]) -> None:
    kind = "selective" if reading.flag("--recompute-activations") else "none"
    if True in list(map(reading.flag, _CHECKPOINTING)) or reading.text(_OLD_CHECKPOINTING) is not None:
        kind = "full"
    kind = reading.choice("--recompute-granularity", ("full", "selective"), kind)
    if kind == "full" and reading.text("--recompute-method") == "block":
        if (layers := reading.integer("--recompute-num-layers")) is not None:
            fields["strategy.recompute_layers"] = layers
    elif kind == "full" and reading.integer("--recompute-num-layers", 1) > 1:
        reading.notes.append("--recompute-num-layers: priced as one layer at a time")
    if kind == "selective":
        named = reading.value("--recompute-modules", ["core_attn"])
        operators = _operators(reading, fields, [named] if isinstance(named, str) else named)
        if operators:
            fields["strategy.recompute_operators"] = operators
        kind = "selective" if operators else "none"
    fields["strategy.recompute"] = kind


def _operators(reading: Reading, fields: dict[str, Any], named: list[str]) -> tuple[str, ...]:
    """The operators that the named modules recompute; notes say how other modules are treated."""
    model = _model(reading, fields)
    if model is None:
        exact = dict(MODULES)
    else:
        exact = exact_modules(model, fields.get("training.attention", "flash"))
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


# -- arguments read back -----------------------------------------------------------------------------

SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def interpret(reading: Reading, fields: dict[str, Any]) -> None:
    megatron_model.interpret(reading, fields)
    layers = fields.get("model.layers") or (reading.model.layers if reading.model else None)
    if fields["strategy.tp"] == 1:
        fields["strategy.sequence_parallel"] = True  # without effect: our default
    if "model.layers" in fields and "model.moe.experts" not in fields:
        fields.pop("strategy.expert_tp", None)  # without effect too
    if reading.value("--batch-size") is not None or reading.value("--model-parallel-size") is not None:
        raise SpecError("--batch-size", "and --model-parallel-size belong to old versions", "use --micro-batch-size")
    fields["training.precision"] = _read_precision(reading)
    _read_optimizer(reading, fields)
    _read_sharding(reading, fields)
    megatron_deepspeed.interpret(reading, fields)
    _read_pipeline(reading, fields, layers)
    megatron_model.interpret_stack(reading, fields)
    interpret_recompute(reading, fields)
    fields["strategy.order"] = ("tp", "cp", "dp", "pp")
    if reading.flag("--use-tp-pp-dp-mapping"):
        fields["strategy.order"] = ("tp", "cp", "pp", "dp")
    fields["strategy.overlap.cp"] = fields["strategy.context_method"] == "ring"
    dispatcher = reading.choice("--moe-token-dispatcher-type", {"allgather": "", "alltoall": "", "flex": "flex"})
    # The flexible dispatcher's backends all send a token once to a node; before there was a choice DeepEP was switched.
    backend = reading.choice("--moe-flex-dispatcher-backend", ("deepep", "hybridep"))
    if (reading.flag("--moe-enable-deepep") or backend is not None) and dispatcher == "flex":
        fields["strategy.dispatch"] = "deduplicated"
    if layers and (offloaded := reading.integer("--cpu-offloading-num-layers", 0)):
        fields["strategy.offload.activations"] = offloaded / layers
    fields["training.seq"] = reading.count("--seq-length", reading.count("--encoder-seq-length", 2048))
    fields["training.dropout"] = max(reading.number(f"--{name}-dropout", 0.1) for name in ("attention", "hidden")) > 0
    _read_batch(reading, fields)


def _read_precision(reading: Reading) -> str:
    half, brain = reading.flag("--fp16"), reading.flag("--bf16")
    if half and brain:
        raise SpecError("--fp16", "and --bf16 are mutually exclusive", "give one of them")
    in_fp32 = reading.flag("--accumulate-allreduce-grads-in-fp32")
    narrow = _read_narrow(reading)
    if narrow and not brain:
        weights = "fp16" if half else "fp32"
        reading.notes.append(f"{weights} weights beside {narrow} matmuls are priced as bf16 ones")
    elif half and in_fp32:
        reading.notes.append("fp16 with gradients in fp32 is priced with gradients in fp16: 2 bytes a parameter less")
    if narrow or half or not brain:
        return narrow or ("fp16" if half else "fp32")
    # Without --grad-reduce-in-bf16 Megatron accumulates in fp32.
    return "bf16" if megatron_model.reads_bf16_gradients(reading) else "bf16-fp32-grads"


_FP8 = {"tensorwise": "fp8", "delayed": "fp8-delayed", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8", "custom": "fp8"}


def _read_narrow(reading: Reading) -> str | None:
    """The recipe of matmuls in 8 or 4 bits, if there are any."""
    if reading.choice("--fp4-format", {"e2m1": True}, False):
        reading.choice("--fp4-recipe", ("nvfp4", "custom"))
        return "nvfp4"
    if not reading.choice("--fp8-format", {"e4m3": True, "hybrid": True}, False):
        return None
    recipe: str = reading.choice("--fp8-recipe", _FP8, "fp8-delayed")
    if recipe == "fp8-delayed":
        steps, by = reading.count("--fp8-amax-history-len", 1), reading.text("--fp8-amax-compute-algo", "most_recent")
        if (steps, by) != (1024, "max"):
            reading.notes.append(f"scales by the {by} of {steps:,} steps are priced as by the largest of 1,024")
    return recipe


def _read_optimizer(reading: Reading, fields: dict[str, Any]) -> None:
    words = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "dist_muon"}
    name = reading.choice("--optimizer", words, "adamw")
    momentum = reading.number("--sgd-momentum", 0.9)
    if name == "dist_muon":
        fields["strategy.zero"] = 1
    fields["training.optimizer"] = "sgd-momentum" if name == "sgd" and momentum else name.removeprefix("dist_")
    if name == "adamw" and reading.settings.get(megatron_model.AWARE):
        moments = [reading.choice(option, ("fp32", "fp16", "bf16", "fp8"), "fp32") for option in _MOMENTS]
        if moments != ["fp32", "fp32"]:
            reading.flag(megatron_model.AWARE)
            fields["training.optimizer"] = "adamw-bf16-moments"
        if moments not in (["fp32", "fp32"], ["bf16", "bf16"]):
            reading.notes.append(f"moments in {moments[0]} and {moments[1]} are priced as bf16")
    if reading.flag("--optimizer-cpu-offload"):
        reading.flag(megatron_model.AWARE)  # which it needs
        fields["strategy.offload.optimizer"] = reading.number("--optimizer-offload-fraction", 1.0)
        fields["strategy.overlap.offload"] = reading.flag("--overlap-cpu-optimizer-d2h-h2d")


def _read_sharding(reading: Reading, fields: dict[str, Any]) -> None:
    if reading.flag("--use-distributed-optimizer"):
        fields["strategy.zero"] = 1
    if reading.flag("--use-megatron-fsdp"):
        fields["strategy.zero"] = reading.choice("--data-parallel-sharding-strategy", SHARDED, 0)
        fields["strategy.accumulate"] = "sharded"  # after every microbatch, in a pipeline too
    if reading.flag("--use-torch-fsdp2"):
        fields["strategy.zero"] = 3
        fields["strategy.keep_parameters"] = reading.flag("--torch-fsdp2-no-reshard-after-forward")
    fields["strategy.overlap.dp"] = reading.flag("--overlap-grad-reduce")
    gathered = reading.flag("--overlap-param-gather")
    if fields["strategy.overlap.dp"] and not gathered and fields.get("strategy.zero") in (1, 2):
        reading.notes.append("without --overlap-param-gather parameters are waited for: priced as gathered beside work")
    instances, ranks = reading.count("--num-distributed-optimizer-instances", 1), reading.data_ranks(fields)
    if instances > 1 and ranks is not None and fields.get("strategy.zero"):
        fields["strategy.shard_group"] = ranks * fields["strategy.cp"] // instances


def _read_pipeline(reading: Reading, fields: dict[str, Any], layers: int | None) -> None:
    stages, chunks = fields["strategy.pp"], reading.count("--num-virtual-stages-per-pipeline-rank", 1)
    per_chunk = reading.count("--num-layers-per-virtual-pipeline-stage")
    if per_chunk and layers:
        chunks = max(1, layers // (stages * per_chunk))
    layout = reading.text("--pipeline-model-parallel-layout")
    first, last = (reading.integer(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if layout is not None:
        counts = layout_counts(layout)
        chunks = max(1, len(counts) // stages)
        fields["strategy.stage_layers"] = counts
    elif (first or last) and layers and chunks == 1:
        fields["strategy.stage_layers"] = _uneven_ends(layers, stages, first, last)
    embedding, loss = (reading.flag(f"--account-for-{what}-in-pipeline-split") for what in ("embedding", "loss"))
    if (embedding or loss) and layers and layout is None and stages * chunks > 1:
        counts = (layers + embedding + loss) // (stages * chunks)
        fields["strategy.stage_layers"] = (counts - embedding, *(counts,) * (stages * chunks - 2), counts - loss)
    if chunks > 1 and stages > 1:
        fields.update({"strategy.schedule": "interleaved", "strategy.interleave": chunks})
        fields["strategy.overlap.pp"] = not reading.flag("--no-overlap-p2p-communication")


def layout_counts(layout: str) -> tuple[int, ...]:
    """Layers per stage of a layout such as ``Et*3|(tt|)*6t*2L``."""
    key, text = "--pipeline-model-parallel-layout", layout.replace(",", "")
    if len(text) > 10_000 or not re.fullmatch(r"[EtmL|()*\d]+", text):
        raise SpecError(key, f"{shown(layout)} is not understood", "write it like Et*3|t*4|t*4|t*3L")
    while match := re.search(r"\(([^()]*)\)\*(\d{1,4})|([EtmL|])\*(\d{1,4})|\(([^()]*)\)", text):
        group, times, single, repeat, bare = match.groups()
        repeated = group * int(times) if times else single * int(repeat) if repeat else bare or ""
        text = text[: match.start()] + repeated + text[match.end() :]
        if len(text) > 20_000:
            raise SpecError(key, f"{shown(layout)} has too many stages", "shorten it")
    return tuple(stage.count("t") for stage in text.split("|"))


def _uneven_ends(layers: int, stages: int, first: int | None, last: int | None) -> tuple[int, ...]:
    middle = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    counts = (rest // middle,) * middle if middle > 0 else ()
    return (*((first,) if first is not None else ()), *counts, *((last,) if last is not None else ()))


def _read_batch(reading: Reading, fields: dict[str, Any]) -> None:
    micro, ranks = fields.get("strategy.microbatch"), reading.data_ranks(fields)
    batch = reading.count("--global-batch-size", _last_batch(reading))
    if batch is None and micro is not None and ranks is not None:
        batch = micro * ranks  # Megatron's own default
    if batch is not None:
        fields["training.global_batch"] = batch
    samples, steps = reading.count("--train-samples"), reading.count("--train-iters")
    if samples is None and steps is not None and batch is not None:
        samples = steps * batch
    if samples is not None:
        fields["training.tokens"] = samples * fields["training.seq"]
    elif steps is not None:
        fields["run.steps"] = steps
    training_values.read_megatron(reading, fields, steps or (-(-samples // batch) if samples and batch else None))


def _last_batch(reading: Reading) -> int | None:
    """The last and largest batch of a schedule such as ``0:384 200B:768``."""
    key = "--step-batch-size-schedule"
    steps = reading.value(key)
    if steps is None:
        return None
    words = steps.split() if isinstance(steps, str) else list(steps)
    batch = words[-1].rpartition(":")[2] if words else ""
    if not batch.isdigit() or int(batch) < 1:
        raise SpecError(key, f"{shown(steps)} is not understood", "write it like 0:384 200B:768")
    reading.notes.append(f"{key}: priced at its last batch, {batch} sequences")
    return int(batch)


_CONTEXT = {"p2p": "ring", "allgather": "all-gather", "a2a": "ulysses"}
_PRECISION: dict[str, Settings] = {
    "fp32": {},
    "fp16": {"--fp16": True},
    "bf16": {"--bf16": True, "--grad-reduce-in-bf16": True},
    "bf16-fp32-grads": {"--bf16": True, "--accumulate-allreduce-grads-in-fp32": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "fp8-delayed": {
        "--bf16": True,
        "--fp8-format": "hybrid",
        "--fp8-recipe": "delayed",
        "--fp8-amax-history-len": 1024,
        "--fp8-amax-compute-algo": "max",
    },
    "fp8-blockwise": {"--bf16": True, "--fp8-format": "e4m3", "--fp8-recipe": "blockwise"},
    "mxfp8": {"--bf16": True, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--bf16": True, "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}


def _compose(job: Job) -> Settings:
    strategy, training = job.strategy, job.training
    dropout = "0.1" if training.dropout else "0.0"
    settings: Settings = {
        **megatron_model.compose(job),
        **_PRECISION.get(training.precision, _PRECISION["bf16"]),
        **(megatron_model.compose_stack(job) if job.stack.base in MEGATRON.software else {}),
        **_sharding(job),
        **_pipeline(job),
        **compose_recompute(job),
        "--seq-length": training.seq,
        "--attention-dropout": dropout,
        "--hidden-dropout": dropout,
        **training_values.megatron_settings(job),
    }
    settings.update(_optimizer(job))
    if job.model.moe is not None:
        settings["--moe-grouped-gemm"] = True
        settings["--moe-token-dispatcher-type"] = "alltoall"
        if strategy.dispatch == "deduplicated" and strategy.ep > 1:
            settings.update({"--moe-token-dispatcher-type": "flex", "--moe-enable-deepep": True})
    share = strategy.offload.activations
    if share > 0 and strategy.pp == 1:
        settings["--cpu-offloading-num-layers"] = min(round(share * job.model.layers), job.model.layers - 1)
    return settings


def _sharding(job: Job) -> Settings:
    strategy, settings = job.strategy, Settings()
    if strategy.zero == 1 and job.training.optimizer != "muon":
        settings["--use-distributed-optimizer"] = True
    if strategy.zero >= 2:
        settings["--use-megatron-fsdp"] = True
        settings["--data-parallel-sharding-strategy"] = word_for(SHARDED, strategy.zero)
        settings["--ckpt-format"] = "fsdp_dtensor"
    if strategy.zero and strategy.sharding_group < strategy.gradient_group:
        settings["--num-distributed-optimizer-instances"] = strategy.gradient_group // strategy.sharding_group
    if strategy.overlap.dp and strategy.gradient_group > 1:
        settings["--overlap-grad-reduce"] = True
        if strategy.zero and job.training.optimizer != "muon":
            settings["--overlap-param-gather"] = True
    if strategy.order == ("tp", "cp", "pp", "dp"):
        settings["--use-tp-pp-dp-mapping"] = True
    return settings


_SCHEDULES = ("1f1b", "interleaved")  # that it runs


def _pipeline(job: Job) -> Settings:
    job = with_schedule(job, _SCHEDULES)
    strategy, settings = job.strategy, Settings()
    if strategy.pp == 1:
        return settings
    if isinstance(strategy.stage_layers, tuple) or job.model.layers % strategy.stages:
        counts = stage_layer_counts(job.model, strategy)
        settings["--pipeline-model-parallel-layout"] = layout_text(counts, job.model.mtp_layers)
    elif strategy.schedule_record.chooses_chunks:
        settings["--num-virtual-stages-per-pipeline-rank"] = strategy.interleave
    if strategy.schedule_record.chooses_chunks and not strategy.overlap.pp:
        settings["--no-overlap-p2p-communication"] = True
    return settings


def layout_text(counts: tuple[int, ...], mtp_layers: int = 0) -> str:
    """Layers per stage as Megatron's layout: embedding E, t per layer, m per MTP layer, loss L, stages split by |."""
    stages = [f"t*{count}" for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp_layers + "L"
    return "|".join(stages)


_MOMENTS = ("--exp-avg-dtype", "--exp-avg-sq-dtype")


def _optimizer(job: Job) -> Settings:
    strategy, name, momentum = job.strategy, job.training.optimizer, job.training.optimization.momentum
    settings: Settings = {"--optimizer": "adam"}
    if name in ("sgd", "sgd-momentum"):
        settings = {"--optimizer": "sgd", "--sgd-momentum": momentum if name == "sgd-momentum" else "0.0"}
    if name == "muon":
        settings = {"--optimizer": "dist_muon" if strategy.zero == 1 else "muon", "--ckpt-format": "torch"}
        settings["--muon-momentum"] = momentum
    if name == "adamw-bf16-moments" and strategy.zero == 1:  # which the option needs
        settings.update({"--use-precision-aware-optimizer": True, **dict.fromkeys(_MOMENTS, "bf16")})
    if strategy.offload.optimizer > 0:
        settings["--optimizer-cpu-offload"] = True
        settings["--optimizer-offload-fraction"] = strategy.offload.optimizer
        settings["--use-precision-aware-optimizer"] = True
        settings["--overlap-cpu-optimizer-d2h-h2d"] = True if strategy.overlap.offload else None
    return settings


def _notes(job: Job) -> list[str]:
    notes = ["data and checkpoint options are yours to add; Megatron pads the vocabulary to 128·tp"]
    if job.model.activation == "geglu":
        notes.append("geglu is written as --quick-geglu, which approximates the gelu by a sigmoid")
    if job.strategy.tp > 1 or job.strategy.cp > 1:
        notes.append("before Blackwell GPUs set CUDA_DEVICE_MAX_CONNECTIONS=1 (not with Megatron-FSDP)")
    return notes


# fmt: off
MEGATRON = Target(
    name="megatron",
    title="Megatron-LM",
    format=ARGUMENTS,
    signature=("--num-layers", "--micro-batch-size", "--tensor-model-parallel-size", "--global-batch-size"),
    carries_model=True,
    learning=("--lr", "--min-lr", "--adam", "--weight-decay", "--clip-grad", "--train-", "--sgd", "--loss-scale"),
    options=(
        Option("strategy.tp", "--tensor-model-parallel-size", absent=1),
        Option("strategy.sequence_parallel", "--sequence-parallel", absent=False),
        Option("strategy.overlap.tp", "--tp-comm-overlap", absent=False),
        Option("strategy.pp", "--pipeline-model-parallel-size", absent=1),
        Option("strategy.cp", "--context-parallel-size", absent=1),
        Option("strategy.context_method", "--cp-comm-type", _CONTEXT, absent="ring"),
        Option("strategy.ep", "--expert-model-parallel-size", absent=1),
        Option("strategy.expert_tp", "--expert-tensor-parallel-size"),
        Option("strategy.overlap.ep", "--overlap-moe-expert-parallel-comm", absent=False),
        Option("strategy.microbatch", "--micro-batch-size"),
        Option("training.global_batch", "--global-batch-size"),
        Option("training.attention", "--attention-backend",
               {"flash": "flash", "unfused": "unfused", "fused": "flash", "auto": "flash", "local": "unfused"}),
    ),
    compose=_compose,
    interpret=interpret,
    notes=_notes,
    stacks=("megatron-core", "megatron-bridge", "simumax"),
    recipe="bf16-fp32-grads",
    selective=selective,
    reasons={
        "strategy.zero": "Muon runs without sharding or as dist_muon (ZeRO-1)",
        "strategy.keep_parameters": "Megatron-FSDP frees gathered weights after use",
        "strategy.accumulate": "Megatron-FSDP reduces gradients after every microbatch",
        "strategy.order": "ranks are laid out tp-cp-dp-pp, or tp-cp-pp-dp",
        "strategy.schedule": "only 1f1b and interleaved",
        "strategy.stage_layers": "layouts only of the schedules that it runs: 1f1b and interleaved",
        "strategy.recompute": "no module of --recompute-modules recomputes exactly that",
        "strategy.recompute_operators": "no module of --recompute-modules recomputes exactly those operators",
        "strategy.recompute_layers": "selective recomputation takes every layer",
        "strategy.overlap.pp": "only the interleaved schedule overlaps its transfers",
        "strategy.overlap.cp": "Transformer Engine overlaps the ring (p2p) only, and always",
        "strategy.offload.gradients": "gradients stay on the device",
        "strategy.offload.weights": "weights stay on the device",
        "strategy.offload.activations": "a whole number of layers, fewer than all, without pipeline and recomputation",
        "strategy.offload.target": "offloads to CPU memory only",
        "strategy.overlap.offload": "only the optimizer's transfers overlap",
        "training.optimizer": "not among Megatron's optimizers (adam, with ZeRO-1 also bf16 moments; sgd, muon)",
        "training.precision": "neither 8-bit integer matmuls nor FP8 with a scale per row",
        "training.tokens": "--train-samples counts whole sequences",
        **megatron_model.REASONS,
    },
    refusals=(
        ("strategy.overlap.tp", lambda job: job.strategy.overlap.tp and job.strategy.tp > 1
         and not job.strategy.sequence_parallel, "--tp-comm-overlap needs sequence parallelism"),
        ("strategy.sequence_parallel", lambda job: job.strategy.ep > 1 and job.strategy.tp > 1
         and not job.strategy.sequence_parallel, "expert with tensor parallelism needs sequence parallelism"),
        ("strategy.ep", lambda job: job.strategy.ep > 1 and job.training.precision == "fp16",
         "expert parallelism is refused with fp16"),
        ("strategy.cp", lambda job: job.strategy.cp > 1 and job.training.seq % (2 * job.strategy.cp) > 0,
         "the sequence must be a multiple of 2·cp"),
        ("strategy.offload.activations", lambda job: job.strategy.offload.activations > 0
         and job.strategy.recompute != "none", "CPU offloading is refused with recomputation"),
        ("strategy.overlap.ep", lambda job: job.strategy.overlap.ep and job.strategy.ep > 1
         and (job.strategy.recompute == "full"
              or (job.strategy.pp > 1 and not job.strategy.schedule_record.chooses_chunks)),
         "--overlap-moe-expert-parallel-comm is refused with full recomputation, and with a pipeline of one chunk"),
    ),
)
