"""A job: a model, a cluster, a strategy, a training and how it is run; complete, and checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any, Literal, Self

from shardwise.spec import presets, rules
from shardwise.spec.bare_model import BareModel, model_of
from shardwise.spec.clusters import MixedCluster, cluster_short, job_cluster_from, mixed_kinds
from shardwise.spec.codec import Spec, reference
from shardwise.spec.files import dump_yaml, parse_yaml
from shardwise.spec.hardware import Cluster
from shardwise.spec.model import Model
from shardwise.spec.run import Run
from shardwise.spec.stack import Stack, default_stack
from shardwise.spec.strategy import Strategy, without_auto
from shardwise.spec.training import Recipe, Training


def names_precision(job: object) -> bool:
    """Whether the fields of a job have one."""
    training = job.get("training") if isinstance(job, Mapping) else None
    return isinstance(training, Training) or (isinstance(training, Mapping) and "precision" in training)


@dataclass(frozen=True, kw_only=True)
class Job(Spec):
    """Everything `analyze`, `plan` and `train` need; a job file holds exactly this."""

    model: Model = reference(
        model_of, presets.shorten, choices=partial(presets.every_name, "model"), also=(BareModel,), flag="--model"
    )
    """A preset or a Hugging Face id, a model file, or a Hugging Face folder or its config.json."""
    cluster: Cluster = reference(
        job_cluster_from,
        cluster_short,
        choices=partial(presets.names, "cluster"),
        also=(MixedCluster,),
        flag="--cluster",
    )
    """A preset or file, sized: dgx-h100:64, tpu-v5p:8x8x16."""
    strategy: Strategy = field(default_factory=Strategy)
    """How the work is split."""
    training: Training = field(default_factory=Training)
    """What is trained and how."""
    stack: Stack = presets.preset_field("stack", Stack, default_factory=default_stack, flag="--stack")
    """Software that runs it: a preset or a file."""
    run: Run = Run()
    """How long it trains, on what, and what it keeps, shows and survives."""

    @classmethod
    def from_dict(cls, data: object, path: str = "") -> Self:
        """As every noun's; `auto` for the microbatch and for offload is kept in ``run.automatic``.

        The precision, if there is none, is what the device is fast at.
        """
        job = super().from_dict(without_auto(data) if isinstance(data, Mapping) else data, path)
        usual = job.cluster.device.usual_precision
        if names_precision(data) or job.training.precision == usual:
            return job
        return replace(job, training=replace(job.training, precision=usual))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with what the strategy does otherwise than its stack: a reader takes the rest from there."""
        data = super().to_dict()
        if self.training.precision != self.cluster.device.usual_precision:
            data["training"] = {**data.get("training", {}), "precision": self.training.precision}
        strategy = dict(data.get("strategy", {}))
        if self.strategy.accumulate != self.usual_accumulation(self.strategy):
            strategy["accumulate"] = self.strategy.accumulate
        if "stack" not in data:
            return {**data, "strategy": strategy} if strategy else data
        stack = self.running_stack
        own, usual = self.strategy.overlap, stack.overlap
        if own != usual:
            differing = (field.name for field in fields(own) if getattr(own, field.name) != getattr(usual, field.name))
            strategy.setdefault("overlap", {name: getattr(own, name) for name in differing})
        if self.strategy.dispatch != stack.dispatch:
            strategy["dispatch"] = self.strategy.dispatch
        return {**data, "strategy": strategy} if strategy else data

    def check(self) -> None:
        rules.check_model_fits(self.model, self.strategy, self.training)
        object.__setattr__(self, "strategy", rules.completed_strategy(self.cluster, self.strategy))
        rules.check_job(self.model, self.cluster, self.strategy, self.training)
        rules.check_emulation(self.run.emulate, self.strategy)
        rules.check_workers(self.run, self.strategy)

    @property
    def recipe(self) -> Recipe:
        """The training's recipe in the bytes that the stack keeps of every parameter."""
        return _kept(self.stack, self.training.recipe, self.whole_masters)

    @property
    def autocasts(self) -> bool:
        """Whether `torch.autocast` computes in 16 bits with whole fp32 weights.

        Hidden states between layers stay fp32. A product casts what it reads and keeps that for its backward pass, the
        copy of its weight too (aten/src/ATen/autocast_mode.cpp, cached_cast); a cache holds all copies until the
        outermost context ends. Weights that ZeRO shards are gathered in 16 bits and need none, nor does a frozen base
        of 16 bits, whose hidden states have its format.
        """
        if not self.stack.autocast or self.strategy.zero:
            return False
        mixed = self.training.recipe.master > 0 and self.training.recipe.compute in ("bf16", "fp16")
        fp32_weights = self.stack.sharded_parameters == "fp32" and self.stack.masters != "none"
        narrow_base = self.training.freezes and self.training.base_precision != "computed"
        return mixed and fp32_weights and not narrow_base

    @property
    def whole_masters(self) -> bool:
        """Whether others than the optimizer read and write the fp32 masters: a host, or workers that exchange them."""
        strategy = self.strategy
        return strategy.offload.any or "optimizer" in self.run.automatic or not strategy.synchronise.every_step

    @property
    def run_device(self) -> str:
        """What the ranks compute on: GPUs where the cluster has any, unless the run says otherwise."""
        if self.run.device != "auto":
            return self.run.device
        return "cpu" if self.cluster.device.vendor == "generic" else "cuda"

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of all devices in the format of the matmuls."""
        mixed, compute = mixed_kinds(self.cluster), self.training.recipe.compute
        kinds = (self.cluster,) if mixed is None else mixed.kinds
        return sum(kind.devices * kind.device.peak_flops(compute) for kind in kinds)

    @property
    def sequences(self) -> int:
        return self.training.sequences(self.strategy.batch_multiple)

    @property
    def microbatches(self) -> int:
        """Microbatches that each pipeline processes in one step; with unlike shares, that of the largest share."""
        least = self.sequences // (self.strategy.shares * self.strategy.microbatch)
        return least if self.strategy.dp_shares is None else least * max(self.strategy.dp_shares)

    def rows_of(self, replica: int) -> range:
        """The sequences of a global batch that a data-parallel rank takes."""
        shares, whole = self.strategy.dp_shares, self.sequences
        if shares is None:
            each = whole // self.strategy.data_parallel
            return range(replica * each, (replica + 1) * each)
        before, each = sum(shares[:replica]), whole // sum(shares)
        return range(before * each, (before + shares[replica]) * each)

    def of_stage(self, rank: int) -> Job:
        """The job as pipeline rank ``rank`` sees it (`Strategy.of_stage`)."""
        own = self.strategy.of_stage(rank)
        return self if own is self.strategy else self.unchecked(strategy=own)

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.training.seq

    @property
    def document_tokens(self) -> float:
        """Those of a step that are not padding."""
        lengths = self.training.lengths
        if lengths is None:
            return self.tokens_per_step
        each = (self.training.seq, self.strategy.microbatch)
        return self.tokens_per_step * lengths.computed_share(*each) * lengths.used_share(*each)

    @property
    def microbatch_tokens(self) -> float:
        """Tokens of one microbatch on one rank: its sequences, cut by context parallelism."""
        return self.strategy.microbatch * self.training.seq / self.strategy.cp

    @property
    def computed_tokens(self) -> float:
        """The same on average, where a microbatch is only as long as its longest document."""
        lengths = self.training.lengths
        if lengths is None:
            return self.microbatch_tokens
        return self.microbatch_tokens * lengths.computed_share(self.training.seq, self.strategy.microbatch)

    @property
    def why_not_recorded(self) -> str | None:
        """Why our engine does not launch the job's steps as CUDA graphs, as far as the job says; None if it does."""
        if self.training.graphs is False:
            return "training.graphs is false"
        if self.strategy.world > 1:
            return "the host starts the exchanges of several processes"
        if self.strategy.offload.any or "optimizer" in self.run.automatic:
            return "the host moves what is offloaded"
        if self.training.graphs == "auto" and self.training.compile and self.model.moe:
            return "compiled mixtures of experts are recorded only where graphs: true asks for it"
        return None

    @property
    def running_stack(self) -> Stack:
        """The stack as it runs this job: what our own engine does follows from the training, others' from the model."""
        if not self.stack.is_own:
            device = self.cluster.device.name
            return self.stack.running(self.training.precision, device, moe=self.model.moe is not None)
        cuda = self.cluster.device.vendor in ("nvidia", "amd") and self.run_device == "cuda"
        graphs = cuda and self.why_not_recorded is None
        elementwise = "compiled" if self.training.compile else self.stack.elementwise
        # Only an exchange of tokens between ranks takes their numbers from the host.
        routing = "on device" if self.strategy.ep == self.strategy.tp == 1 else self.stack.routing
        return self.stack.unchecked(
            cuda_graphs="step" if graphs else self.stack.cuda_graphs, elementwise=elementwise, routing=routing
        )

    @property
    def recomputed_operators(self) -> tuple[str, ...]:
        """What selective recompute runs again; nothing where the strategy does not ask for it."""
        return self.selective_operators if self.strategy.recompute == "selective" else ()

    @property
    def selective_operators(self) -> tuple[str, ...]:
        """What selective recompute would run again.

        FlashAttention rebuilds its scores inside its own backward kernel, so there ``attention`` alone means the
        cheap operators around it: norms, activation functions and the up-projections of latent attention. Not the
        latter with Ulysses: what its exchange returned is kept, and the backward pass does not read what it sent.
        """
        named: tuple[str, ...] = self.strategy.recompute_operators
        if self.training.attention == "flash":
            named = tuple(operator for operator in named if operator != "attention")
            named = named or ("norm", "activation", *(("up-projection",) if self.model.mla else ()))
        exchanged = self.strategy.cp > 1 and self.strategy.context_method == "ulysses"
        return tuple(operator for operator in named if not (exchanged and operator == "up-projection"))

    def usual_accumulation(self, strategy: Strategy) -> Literal["sharded", "local"]:
        """``accumulate`` of a strategy of this job that does not name it."""
        leave = strategy.offload.gradients > 0 or "gradients" in self.run.automatic
        return self.stack.usual_accumulation(strategy.zero, strategy.pp, leave=leave)

    def with_strategy(self, **changes: Any) -> Job:
        return replace(self, strategy=replace(self.strategy, **changes))

    def to_yaml(self) -> str:
        return dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, text: str) -> Job:
        return cls.from_dict(parse_yaml(text, "job"))


@lru_cache(maxsize=256)  # a search asks thousands of times for a few
def _kept(stack: Stack, recipe: Recipe, whole_masters: bool) -> Recipe:
    return stack.stores(recipe, whole_masters=whole_masters)
