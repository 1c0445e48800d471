"""The layout that a framework will run, in the words of its own configuration file, and the job that it makes.

The settings are read by the same tables as such a file (`interop/frameworks`): there is no second parser.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.api.analysis import AnalysisResult
from shardwise.api.given import JobArguments
from shardwise.api.inputs import job_from
from shardwise.api.planning import plan
from shardwise.cost.analysis import analyze
from shardwise.integrations.module import (
    ModuleFacts,
    Sequences,
    language_model,
    module_facts,
    optimizer_of,
    sequences_of,
)
from shardwise.integrations.tuning import NotPriced
from shardwise.interop.frameworks import Imported, target
from shardwise.interop.frameworks.documents import flatten
from shardwise.launch.preflight import require_fits
from shardwise.measure.step import cluster_name_here
from shardwise.planner.advice.assessment import assess
from shardwise.planner.candidate import strategy_words
from shardwise.report.verdict import verdict_of
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from, job_cluster_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.run import LearningRateSchedule
from shardwise.spec.stack import Stack, stack_from
from shardwise.spec.units import readable_bytes, readable_seconds

FSDP, MESH = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
_CLUSTER = "give cluster=, a preset such as dgx-h100:1 or what `shardwise calibrate` has measured here (cluster.yaml)"


@dataclass(frozen=True)
class RunLayout:
    """Who splits the work, and how."""

    framework: str
    settings: Mapping[str, Any]  # of a configuration file of the framework, flat
    microbatch: int | None  # rows of a batch that a rank computes at once
    accumulation: int  # microbatches of a step
    stack: Mapping[str, Any]  # fields in which the software differs from the framework's usual stack
    notes: tuple[str, ...] = ()
    keeps_whole_gradients: bool = False  # ZeRO-2 and 3 reduce gradients once, after the last microbatch


@dataclass(frozen=True)
class Ranks:
    """The processes of the run: how many, how many per host, and on which device they compute."""

    world: int
    per_host: int
    device: torch.device

    @classmethod
    def here(cls, world: int, device: torch.device) -> Ranks:
        """By torchrun's variables; without them all ranks are on this host."""
        per_host = os.environ.get("LOCAL_WORLD_SIZE", "")
        return cls(world, int(per_host) if per_host.isdigit() and int(per_host) else world, device)

    @property
    def hosts(self) -> int:
        return max(1, self.world // self.per_host)


_ZERO = "zero_optimization."
_BUCKET = _ZERO + "reduce_bucket_size"


def deepspeed_layout(
    config: Mapping[str, Any], microbatch: int | None, accumulation: int, stack: Mapping[str, Any]
) -> RunLayout:
    """DeepSpeed's configuration with the batch of this run, without what the trainer leaves open ("auto")."""
    settings = {name: value for name, value in flatten(config, "DeepSpeed configuration").items() if value != "auto"}
    settings.pop("train_batch_size", None)  # follows from the two below, and from the ranks
    settings["gradient_accumulation_steps"] = accumulation
    if microbatch is not None:
        settings["train_micro_batch_size_per_gpu"] = microbatch
    settings = {name: value for name, value in settings.items() if value is not None}
    notes = _bucket_note(settings)
    settings.pop(_BUCKET, None)
    return RunLayout("deepspeed", settings, microbatch, accumulation, stack, notes)


def _bucket_note(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """A note on the buffers in which ZeRO collects gradients (DeepSpeed's `setup_buckets` and `stage3.py`)."""
    stage = settings.get(_ZERO + "stage", 0)
    if stage not in (1, 2, 3) or settings.get(_ZERO + "contiguous_gradients") is False:
        return ()
    elements = int(float(settings.get(_BUCKET, 5e8)))
    wide = stage == 1 and settings.get("data_types.grad_accum_dtype") == "fp32"
    narrow = any(settings.get(f"{name}.enabled") is True for name in ("fp16", "bf16", "bfloat16")) and not wide
    buffers = 2 if stage < 3 and settings.get(_ZERO + "overlap_comm") is True else 1
    held = readable_bytes(elements * buffers * (2 if narrow else 4))
    return (
        f"DeepSpeed collects {elements:,} gradients to reduce them (reduce_bucket_size): {held} that are not priced",
    )


def cluster_for(given: Any, ranks: Ranks) -> tuple[Cluster, list[str]]:
    """A device for every rank, of the given cluster or of this machine's kind; and notes."""
    if given is None:
        if ranks.device.type != "cuda":
            raise SpecError("cluster", "is not given, and PyTorch trains on a CPU here", _CLUSTER)
        try:
            whole = cluster_from(f"{cluster_name_here('cuda')}:{ranks.hosts}")
        except SpecError as error:
            raise SpecError("cluster", error.problem, _CLUSTER) from None
    else:
        whole = job_cluster_from(given)
    if whole.devices == ranks.world:
        return whole, []
    if whole.devices < ranks.world:
        problem = f"{whole.name} has {whole.devices:,} devices, the run has {ranks.world:,} processes"
        raise SpecError("cluster", problem, f"name as many nodes as there are: {whole.name}:{ranks.hosts}")
    part = whole.with_devices(ranks.world) if ranks.hosts == 1 else whole.with_node_devices(ranks.per_host)
    if part.devices != ranks.world:
        problem = f"{whole.name} has {whole.devices:,} devices, the run has {ranks.world:,} processes"
        raise SpecError("cluster", problem, "give cluster= of the nodes that the run uses")
    return part, [] if given is None else [f"{ranks.world:,} of the {whole.devices:,} devices of {whole.name} are used"]


def job_of(
    layout: RunLayout, facts: ModuleFacts, sequences: Sequences, optimizer: Any, cluster: Cluster
) -> tuple[Job, list[str]]:
    """The job that a framework will run, and notes on settings that are ignored or had to be assumed.

    Raises NotPriced if the framework runs something that a job cannot describe.
    """
    try:
        imported = _imported(layout, facts, cluster)
        fields = {**imported.fields, **_precision(layout, facts, imported), **_of_module(facts, sequences)}
        accumulated, assumed = _accumulated(layout, fields)
        fields |= accumulated
        fields["strategy.microbatch"] = layout.microbatch or imported.fields.get("strategy.microbatch", 1)
        ranks = cluster.devices // _other_degrees(fields)
        fields["training.global_batch"] = fields["strategy.microbatch"] * layout.accumulation * ranks
        if "training.optimizer" not in imported.fields or layout.framework != "deepspeed":
            narrow = stack_from(fields["stack"]).masters == "none"
            fields["training.optimizer"] = optimizer_of(optimizer, narrow=narrow)
        tree = replace(imported, fields=fields).nested()
        job, notes = job_from(JobArguments(source={**tree, "model": facts.model, "cluster": cluster}))
    except NotPriced:
        raise
    except SpecError as error:
        raise NotPriced(error.field, error.problem, error.remedy) from None
    return job, [*layout.notes, *facts.notes, *imported.notes, *assumed, *imported.not_priced, *notes]


def _imported(layout: RunLayout, facts: ModuleFacts, cluster: Cluster) -> Imported:
    framework = target(layout.framework)
    text = framework.format.render(dict(layout.settings), framework.names)
    # A first reading finds the other degrees; with the devices they determine the data-parallel one.
    degrees = framework.read(text, facts.model).fields
    others = _other_degrees(degrees)
    if cluster.devices % others:
        problem = f"{cluster.devices:,} processes are not a multiple of tp · cp · pp = {others:,}"
        raise NotPriced("strategy", problem, "correct the sizes of the parallel dimensions")
    return framework.read(text, facts.model, cluster, {"strategy.dp": cluster.devices // others})


def _other_degrees(fields: Mapping[str, Any]) -> int:
    """Number of ranks that compute on the same sequences."""
    return math.prod(int(fields.get(f"strategy.{name}") or 1) for name in ("tp", "cp", "pp"))


def _accumulated(layout: RunLayout, fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """How gradients are accumulated, and a note if the run's way has no price."""
    sharded = {"strategy.accumulate": "sharded"}
    if fields["strategy.zero"] < 2:
        return {}, []
    if not layout.keeps_whole_gradients or layout.accumulation == 1:
        return sharded, []
    if fields.get("strategy.offload.gradients"):
        return sharded, [
            "the whole gradients that stay on the device between microbatches are not priced beside offload"
        ]
    return {"strategy.accumulate": "local"}, []


def _of_module(facts: ModuleFacts, sequences: Sequences) -> dict[str, Any]:
    fields = {"training.seq": sequences.seq, "training.attention": facts.attention, "training.dropout": facts.dropout}
    return {**fields, **facts.tuning, **({"strategy.recompute": "full"} if facts.recomputed else {})}


def _precision(layout: RunLayout, facts: ModuleFacts, imported: Imported) -> dict[str, Any]:
    """The stack, and the precision if the weights themselves determine it.

    DeepSpeed keeps fp32 masters of what it trains in 16 bits. Elsewhere mixed precision computes in 16 bits with fp32
    weights, while 16-bit weights are updated without masters.
    """
    stack: Stack = stack_from(imported.fields["stack"])
    changes: dict[str, Any] = dict(layout.stack)
    if facts.attention == "unfused":
        changes["attention"] = "unfused"
    if facts.compiled:
        changes["elementwise"] = "compiled"
    mixed = facts.weights == "float32" and imported.fields.get("training.precision") != "fp32"
    if facts.returns_keys and mixed and stack.autocast and imported.fields.get("strategy.zero") == 0:
        changes["key_value_cache"] = True
    precision: dict[str, Any] = {}
    if facts.weights != "float32" and stack.base != "deepspeed":
        computed = "bf16" if facts.weights == "bfloat16" else "fp16"
        changes |= {"masters": "none", "sharded_parameters": "16-bit", "gradient_reduce": "bf16"}
        precision = {"training.precision": computed}
    return {**precision, "stack": presets.shorten(stack.changed(**changes))}


# -- how a network is split under Accelerate -----------------------------------------------------------


SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


# -- the plugin of FSDP ------------------------------------------------------------------------------------------------


def fsdp_settings(plugin: Any, module: nn.Module | None = None) -> dict[str, Any]:
    """Settings of Accelerate's FSDP plugin, of either version; for FSDP1 a wrapped ``module`` takes precedence."""
    offload, recomputes = plugin.cpu_offload, bool(plugin.activation_checkpointing)
    settings: dict[str, Any] = {
        FSDP + "version": int(plugin.fsdp_version),
        # FSDP1 has a field for it, FSDP2 a policy of that class.
        FSDP + "offload_params": bool(getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy")),
        FSDP + "activation_checkpointing": recomputes,
    }
    if recomputes:
        offloaded = bool(getattr(plugin, "activation_checkpointing_offload", False))
        settings[FSDP + "activation_checkpointing_offload"] = offloaded
    if plugin.fsdp_version == 1:
        # A network that the user has wrapped stays as it is (`Accelerator.prepare_model`), whatever the plugin says.
        wrapped = getattr(_first_fsdp(module), "sharding_strategy", None)
        chosen = wrapped or plugin.sharding_strategy or plugin.reshard_after_forward
        settings[FSDP + "sharding_strategy"] = (getattr(chosen, "name", None) or str(chosen)).lstrip("_")
    else:
        settings[FSDP + "reshard_after_forward"] = bool(plugin.reshard_after_forward)
    return settings


def fsdp_precision(plugin: Any, mixed: str, module: nn.Module | None = None) -> tuple[str, dict[str, Any]]:
    """What FSDP gathers and computes in, as ``mixed_precision`` of a file, and how the stack differs.

    FSDP reduces in the policy's format, which is the same unless the user gave another (`set_mixed_precision`).
    """
    own = getattr(_first_fsdp(module), "mixed_precision", None)
    policy = own or plugin.mixed_precision_policy
    if policy is None:
        return mixed, {}
    computed = _WORDS.get(policy.param_dtype, "no")
    if mixed not in ("no", "fp8", computed):
        problem = f"mixed_precision {mixed!r} beside an FSDP policy whose param_dtype is {policy.param_dtype}"
        raise NotPriced("precision", f"{problem} is not priced", "give both the same format")
    narrow = policy.reduce_dtype in _WORDS or (policy.reduce_dtype is None and policy.param_dtype in _WORDS)
    return mixed if mixed == "fp8" else computed, {"gradient_reduce": "bf16"} if narrow else {}


def _first_fsdp(module: nn.Module | None) -> nn.Module | None:
    """The outermost module that FSDP1 wraps; None if there is none."""
    inside = () if module is None else module.modules()
    return next((part for part in inside if type(part).__name__ == "FullyShardedDataParallel"), None)


# -- tensor parallelism, and what transformers splits itself -----------------------------------------------------------


@dataclass(frozen=True)
class LoadedSplit:
    """How `from_pretrained(distributed_config=...)` has split a network."""

    tp: int
    fsdp: int
    offload: bool
    mixed: bool  # gathers bf16 weights, reduces fp32 gradients

    def settings(self, mixed: str, processes: int) -> dict[str, Any]:
        """In the words of Accelerate's file; transformers calls `fully_shard` itself, on its own mesh."""
        if self.tp * self.fsdp != processes:
            problem = f"{processes:,} processes, but the network is split over {self.tp} · {self.fsdp}"
            raise NotPriced("model", problem, "split it over all processes: tp_size · fsdp_size")
        if self.fsdp > 1 and mixed != "no" and not self.mixed:
            problem = f"{mixed} by autocast beside gathered fp32 weights is not priced"
            raise NotPriced("precision", problem, "DistributedConfig(fsdp_mixed_precision=True)")
        return {
            "distributed_type": "FSDP", "mixed_precision": "bf16" if self.mixed else mixed, FSDP + "version": 2,
            FSDP + "reshard_after_forward": True, FSDP + "offload_params": self.offload,
            MESH + "dp_replicate_size": 1, MESH + "dp_shard_size": self.fsdp, MESH + "tp_size": self.tp,
            MESH + "cp_size": 1,
        }  # fmt: skip


def loaded_split(module: nn.Module | None) -> LoadedSplit | None:
    """How transformers split the network when it loaded it; None if it did not."""
    network: Any = None if module is None else language_model(module)
    if not getattr(network, "is_distributed_loading_by_transformers", False):
        return None
    config = getattr(network.config, "distributed_config", None)
    others = {name: getattr(config, name, 1) or 1 for name in ("pp_size", "ep_size")}
    for name, size in others.items():
        if size > 1:
            raise NotPriced(
                "model", f"{name} {size} of DistributedConfig is not read", "split by tp_size and fsdp_size"
            )
    return LoadedSplit(
        int(getattr(network, "tp_size", None) or 1),
        int(getattr(network, "fsdp_size", None) or 1),
        bool(getattr(config, "fsdp_cpu_offload", False)),
        bool(getattr(config, "fsdp_mixed_precision", False)),
    )


def require_split(module: nn.Module, ranks: int, dimension: str, remedy: str) -> None:
    """Raises NotPriced if no weight is split over the mesh: a mesh alone leaves every rank with the whole network."""
    if ranks > 1 and not any(_is_split(parameter, ranks, dimension) for parameter in module.parameters()):
        problem = f"the mesh has {ranks} tensor-parallel ranks, but no weight of the network is split over them"
        raise NotPriced("model", problem, remedy)


def _is_split(parameter: nn.Parameter, ranks: int, dimension: str) -> bool:
    data: Any = parameter
    if not isinstance(data, DTensor):
        return False
    names = data.device_mesh.mesh_dim_names or ()
    return any(
        name == dimension and size == ranks and placement.is_shard()
        for name, size, placement in zip(names, data.device_mesh.shape, data.placements, strict=False)
    )


# -- the price before the first step: the verdict to print, and whether the run may start ------------

FOLDER = "shardwise"  # in the folder of a framework's run
WORTH_SAYING = 0.05  # share of the step that a faster layout saves
_SEARCH_SECONDS = 10.0

OnMisfit = Literal["warn", "stop"]


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What a user gives; the rest is read from the framework."""

    seq: int | None = None  # tokens of a padded example
    cluster: Any = None  # the machine; None: the GPUs of this one
    model: Any = None  # describes a network without a Hugging Face config
    folder: str | PathLike[str] | None = None  # where the run is recorded
    on_misfit: OnMisfit = "warn"
    """What to do about a run that is not known to fit: print a warning, or stop it before its first step."""

    def __post_init__(self) -> None:
        if self.on_misfit not in ("warn", "stop"):
            raise SpecError("on_misfit", f"{shown(self.on_misfit)} is not known", 'use "warn" or "stop"')
        if self.seq is not None and (isinstance(self.seq, bool) or not isinstance(self.seq, int) or self.seq < 1):
            raise SpecError("seq", f"{shown(self.seq)} is not a number of tokens", "write one like 2048")

    def folder_in(self, root: str | PathLike[str]) -> Path:
        return Path(root) / FOLDER if self.folder is None else Path(self.folder)


@dataclass(frozen=True)
class FrameworkRun:
    """A run that its framework is about to start."""

    framework: str  # in words
    module: Any
    optimizer: Any
    loader: Any
    settings: tuple[Any, ...]  # objects that may know the length of a sequence
    layout: Callable[[], RunLayout]
    ranks: Ranks
    is_main: bool
    folder: Path
    first_step: int
    steps: int | None


@dataclass(frozen=True)
class PricedRun:
    """The job that the framework runs, its price, and what was assumed."""

    result: AnalysisResult
    sequences: Sequences
    layout: RunLayout
    facts: ModuleFacts
    notes: tuple[str, ...]

    @property
    def job(self) -> Job:
        return self.result.job

    def lines(self) -> Iterator[str]:
        """The verdict, what was priced, and what is worth changing."""
        job, assessment = self.job, self.result.assessment
        yield verdict_of(assessment).sentence
        rows = f"{job.strategy.microbatch} × {job.microbatches} × {job.strategy.data_parallel}"
        batch = f"batch {rows} = {job.sequences:,} sequences of {job.training.seq:,} tokens ({self.sequences.said_by})"
        yield f"{strategy_words(job.strategy)}; {batch}"
        yield f"{job.training.precision}, {job.training.optimizer}; priced on the stack {job.stack.name}"
        yield from self.notes
        yield self._advice()

    def _advice(self) -> str:
        """A layout of the same framework that is faster, or that fits where this one does not."""
        fits, seconds = self.result.fits, self.result.predicted_seconds
        try:
            best = plan(self.job, framework=self.layout.framework, time_limit=_SEARCH_SECONDS)
        except SpecError as error:
            return f"no layout of {self.layout.framework} was found that fits: {error}"
        took = f"{readable_seconds(best.predicted_seconds)} a step"
        if not fits:
            return f"this would fit: {strategy_words(best.job.strategy)} ({took})"
        if best.predicted_seconds > seconds * (1 - WORTH_SAYING):
            return f"no layout of {self.layout.framework} is more than {WORTH_SAYING:.0%} faster"
        return f"faster: {strategy_words(best.job.strategy)} ({took} instead of {readable_seconds(seconds)})"


def priced(run: FrameworkRun, options: WatchOptions) -> PricedRun:
    """Raises NotPriced for what has no price, DoesNotFit if the options stop such a run, SpecError for a mistake."""
    facts = module_facts(run.module, options.model)
    sequences = sequences_of(options.seq, run.loader, *run.settings)
    cluster, notes = cluster_for(options.cluster, run.ranks)
    layout = run.layout()
    job, more = job_of(layout, facts, sequences, run.optimizer, cluster)
    recorded = replace(job.run, steps=max(1, run.steps or job.run.steps), folder=str(run.folder))
    job = replace(job, run=replace(recorded, schedule=LearningRateSchedule(warmup=0)))
    analysis = analyze(job)
    if options.on_misfit == "stop":
        require_fits(job)
    result = AnalysisResult(assess(analysis, advice=False), tuple(analysis.notes))
    return PricedRun(result, sequences, layout, facts, (*notes, *more, *analysis.notes))


def priced_or_why_not(run: FrameworkRun, options: WatchOptions) -> tuple[PricedRun | None, str]:
    """The price, or why there is none; raises NotPriced instead if only a run that fits may start."""
    try:
        return priced(run, options), ""
    except NotPriced as error:
        if options.on_misfit == "stop":
            raise
        return None, str(error)
