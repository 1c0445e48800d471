"""Megatron-LM: the command-line arguments of ``pretrain_gpt.py``, one option per line, the model included."""

from __future__ import annotations

from shardwise.interop.frameworks import megatron_model, megatron_reading, training_values
from shardwise.interop.frameworks.documents import COMMAND, Settings
from shardwise.interop.frameworks.megatron_reading import SHARDED, interpret
from shardwise.interop.frameworks.target import Option, Target, word_for
from shardwise.spec.job import Job

_CONTEXT = {"p2p": "ring", "allgather": "all-gather", "a2a": "ulysses"}
_PRECISION: dict[str, Settings] = {
    "fp32": {},
    "fp16": {"--fp16": True},
    "bf16": {"--bf16": True, "--grad-reduce-in-bf16": True},
    "bf16-fp32-grads": {"--bf16": True, "--accumulate-allreduce-grads-in-fp32": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid", "--fp8-recipe": "delayed"},
    "mxfp8": {"--bf16": True, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--bf16": True, "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}


def _compose(job: Job) -> Settings:
    strategy, training = job.strategy, job.training
    dropout = "0.1" if training.dropout else "0.0"
    settings: Settings = {
        **megatron_model.compose(job),
        **_PRECISION[training.precision],
        **_sharding(job),
        **_pipeline(job),
        **megatron_reading.compose_recompute(job),
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
    strategy, settings = job.strategy, Settings()
    if strategy.pp == 1 or strategy.schedule not in _SCHEDULES:
        return settings
    if isinstance(strategy.stage_layers, tuple) or job.model.layers % strategy.stages:
        from shardwise.spec.rules import stage_layer_counts

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


def _optimizer(job: Job) -> Settings:
    strategy, name, momentum = job.strategy, job.training.optimizer, job.training.optimization.momentum
    settings: Settings = {"--optimizer": "adam"}
    if name in ("sgd", "sgd-momentum"):
        settings = {"--optimizer": "sgd", "--sgd-momentum": momentum if name == "sgd-momentum" else "0.0"}
    if name == "muon":
        settings = {"--optimizer": "dist_muon" if strategy.zero == 1 else "muon", "--ckpt-format": "torch"}
        settings["--muon-momentum"] = momentum
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
    format=COMMAND,
    signature=("--num-layers", "--micro-batch-size", "--tensor-model-parallel-size", "--global-batch-size"),
    carries_model=True,
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
    stacks=("megatron-core", "megatron-bridge", "megatron-2022", "simumax"),
    recipe="bf16-fp32-grads",
    selective=megatron_reading.selective,
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
        "training.optimizer": "not among Megatron's optimizers (adam, sgd, muon)",
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
