"""How the work is split: the degrees, their order over the ranks, and every choice that has a price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.spec.codec import Spec, count, quantity, setting
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.less_communication import Compression, Synchronise, method_field
from shardwise.spec.schedules import PLAIN, ScheduleRecord, chosen_chunks_schedules, job_schedules, schedule_record

Dimension = Literal["tp", "cp", "dp", "pp"]
DIMENSIONS: tuple[Dimension, ...] = ("tp", "cp", "dp", "pp")
MOST_RANKS = 10_000_000
AUTO = "auto"  # left to the planner (`without_auto`)
RecomputedOperator = Literal[
    "attention", "activation", "norm", "up-projection", "mlp-up", "experts", "alternate-products"
]


@dataclass(frozen=True, kw_only=True)
class Overlap(Spec):
    """Which communication overlaps computation, in the price as in the engine."""

    dp: bool = True
    """Reductions of gradients and gathers of parameters."""
    tp: bool = False
    """Collectives of tensor parallelism."""
    pp: bool = False
    """Messages between pipeline stages."""
    cp: bool = True
    """Exchanges of keys and values."""
    ep: bool = False
    """Exchanges of expert tokens."""
    offload: bool = True
    """Copies between device and host."""


@dataclass(frozen=True, kw_only=True)
class Offload(Spec):
    """Shares of each kind of state kept outside device memory, and where."""

    optimizer: float = setting(0.0, minimum=0, maximum=1, words=(AUTO,))
    """Share of the optimizer states."""
    gradients: float = setting(0.0, minimum=0, maximum=1, words=(AUTO,))
    """Share of the gradients."""
    weights: float = setting(0.0, minimum=0, maximum=1, words=(AUTO,))
    """Share of the weights."""
    activations: float = setting(0.0, minimum=0, maximum=1, words=(AUTO,))
    """Share of the saved activations."""
    target: Literal["cpu", "nvme"] = "cpu"
    """Host memory, or files on a local disk."""
    folder: str | None = None
    """Folder of the `nvme` files, which have no names and vanish with their process. By default the system's folder for
    temporary files, which should not itself be in memory."""

    @property
    def any(self) -> bool:
        return max(self.optimizer, self.gradients, self.weights, self.activations) > 0


# Libraries that send a token once to each node that has experts of it, and pass it on inside (deepseek-ai/DeepEP, whose
# branch `hybrid-ep` has NVIDIA's); both are backends of Megatron-Core's flexible dispatcher.
DEDUPLICATING = {"deepep": "deduplicated", "hybridep": "deduplicated"}


@dataclass(frozen=True, kw_only=True)
class Strategy(Spec):
    """A parallel layout of tp·cp·dp·pp devices. Expert parallelism reuses the tp·cp·dp ranks of a pipeline stage, as
    expert_tp·ep·(expert data parallelism), innermost first."""

    tp: int = count(1, maximum=MOST_RANKS, flag="--tp")
    """Tensor parallel degree."""
    cp: int = count(1, maximum=MOST_RANKS, flag="--cp")
    """Context parallel degree."""
    dp: int | None = count(None, maximum=MOST_RANKS, flag="--dp")
    """Data parallel degree; by default the devices that are left. `tp`·`cp`·`dp`·`pp` is the number of devices."""
    pp: int = count(1, maximum=MOST_RANKS, flag="--pp")
    """Pipeline parallel degree."""
    ep: int = count(1, maximum=MOST_RANKS, flag="--ep")
    """Expert parallel degree, over the tp·cp·dp ranks of a stage."""
    expert_tp: int | None = count(None, maximum=MOST_RANKS, flag="--expert-tp")
    """Ranks that split one expert; by default `tp`."""
    sequence_parallel: bool = setting(True, flag="--no-sp", help="tensor parallelism without sequence parallelism")
    """Tensor-parallel ranks split the sequence between their matmuls."""
    zero: Literal[0, 1, 2, 3] = setting(0, flag="--zero")
    """ZeRO stage, what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    shard_group: int | None = count(None, maximum=MOST_RANKS, flag="--shard-group")
    """Ranks that ZeRO shards over; by default all cp·dp. Fewer is hybrid sharding."""
    keep_parameters: bool = False
    """Keep what ZeRO-3 gathered until the step ends."""
    accumulate: Literal["sharded", "local"] = "sharded"
    """ZeRO-2 and 3: reduce gradients after every microbatch (`sharded`), or keep them whole and reduce once
    (`local`)."""
    order: tuple[Dimension, ...] = setting(DIMENSIONS, flag="--order")
    """How the degrees are laid over the ranks, innermost first: tp,cp,dp,pp."""
    microbatch: int = count(1, maximum=10**6, words=(AUTO,), flag="--microbatch")
    """Sequences of a microbatch, or `auto`: the largest that fits."""
    schedule: str = setting(PLAIN, choices=job_schedules, flag="--schedule")
    """Pipeline schedule."""
    interleave: int = count(1, maximum=10_000, flag="--interleave")
    """Model chunks per rank, with `schedule: interleaved`."""
    stage_layers: Literal["even", "balanced"] | tuple[int, ...] = setting("even", flag="--stage-layers")
    """Layers per stage: `even`; `balanced`, with spare layers in the middle; or a list: 7,8,8,7. Prediction modules are
    layers of the last stage."""
    stage_tp: tuple[int, ...] | None = count(None, maximum=MOST_RANKS)
    """Of unlike devices: tensor parallelism of each pipeline rank; `tp` is the largest."""
    stage_dp: tuple[int, ...] | None = count(None, maximum=MOST_RANKS)
    """Of unlike devices: data parallelism of each pipeline rank; `dp` is the largest."""
    dp_shares: tuple[int, ...] | None = count(None, maximum=10_000)
    """Of unlike devices: microbatches of each data-parallel rank, relative to the others'."""
    recompute: Literal["none", "selective", "full"] = setting("none", flag="--recompute")
    """What the backward pass recomputes of a layer: nothing, some operators, or all of it."""
    recompute_operators: tuple[RecomputedOperator, ...] = ("attention",)
    """Operators that `selective` recomputes; `experts`: whole mixtures, router and exchange included."""
    recompute_layers: int | None = count(None, minimum=0, maximum=10_000)
    """Layers of a rank that `full` recomputes; by default all."""
    context_method: Literal["ring", "all-gather", "ulysses"] = setting("ring", flag="--context-method")
    """How context parallelism computes attention."""
    dispatch: Literal["all-to-all", "deduplicated"] = setting(
        "all-to-all", words=tuple(DEDUPLICATING), means=DEDUPLICATING, flag="--dispatch",
        help="how tokens reach their experts: all-to-all, or once a node: deduplicated, deepep, hybridep",
    )  # fmt: skip
    """How tokens reach their experts; `deduplicated` sends a token to a node only once, as `deepep` and `hybridep` do,
    which may be written too."""
    overlap: Overlap = field(default_factory=Overlap)
    """Which communication overlaps computation."""
    offload: Offload = field(default_factory=Offload, metadata={"words": (AUTO,)})
    """What is kept outside device memory."""
    collective: str = setting("auto", flag="--collective")
    """Algorithm of collectives: `auto` (the cheapest), `textbook`, or a name, used where it applies."""
    bucket: float | None = quantity("bytes", None)
    """Bytes of gradients reduced at a time without ZeRO; by default 25 MiB."""
    compression: Compression = method_field(Compression)
    """How gradients are compressed; only without ZeRO."""
    synchronise: Synchronise = method_field(Synchronise)
    """How often data-parallel workers synchronise."""

    def check(self) -> None:
        if sorted(self.order) != sorted(DIMENSIONS):
            problem = f"{shown(list(self.order))} does not name tp, cp, dp and pp once each"
            raise SpecError("order", problem, "write it like [tp, cp, dp, pp]")
        chooses = self.schedule_record.chooses_chunks
        if not self.schedule_record.in_jobs:
            remedy = "choose one of " + ", ".join(job_schedules())
            raise SpecError("schedule", f"{self.schedule} is for comparison, not for jobs", remedy)
        if self.interleave > 1 and not chooses:
            problem = f"{self.interleave} needs schedule: {' or '.join(chosen_chunks_schedules())}"
            raise SpecError("interleave", problem, f"the schedule is {self.schedule}")
        if chooses and self.interleave == 1 and self.pp > 1:
            remedy = f"use interleave: 2 or schedule: {PLAIN}"
            raise SpecError("interleave", f"1 chunk per rank is plain {PLAIN}", remedy)
        if isinstance(self.stage_layers, tuple) and len(self.stage_layers) != self.stages:
            raise SpecError("stage_layers", f"names {len(self.stage_layers)} stages", f"give {self.stages}")
        self._check_unlike_stages()

    def _check_unlike_stages(self) -> None:
        """Degrees of each pipeline rank; ``tp`` and ``dp``, where they are left out, follow from them."""
        for name, degrees in (("tp", self.stage_tp), ("dp", self.stage_dp)):
            if degrees is None:
                continue
            if len(degrees) != self.pp:
                raise SpecError(f"stage_{name}", f"names {len(degrees)} pipeline ranks", f"give {self.pp}")
            if self.degree(name) == 1 or getattr(self, name) is None:
                object.__setattr__(self, name, max(degrees))
            if self.degree(name) != max(degrees):
                remedy = f"use {name}: {max(degrees)}, or leave {name} out"
                raise SpecError(name, f"{self.degree(name)}, but the largest of stage_{name} is {max(degrees)}", remedy)
        if not self.has_unlike_stages:
            return
        if self.order[-1] != "pp":
            field = "stage_tp" if self.stage_tp else "stage_dp"
            raise SpecError(field, "needs the ranks of a stage side by side", "put pp last in order")
        for degree in self.stage_dp or ():
            if self.data_parallel % degree:
                problem = f"{degree} does not divide the largest, {self.data_parallel}"
                raise SpecError("stage_dp", problem, "every stage cuts the same microbatches")
        if self.dp_shares is not None:
            raise SpecError("dp_shares", "with stage_tp or stage_dp: a replica has no devices of its own", "use one")

    @property
    def has_unlike_stages(self) -> bool:
        """Whether pipeline ranks have degrees of their own."""
        return self.stage_tp is not None or self.stage_dp is not None

    def of_stage(self, rank: int) -> Strategy:
        """The strategy as pipeline rank ``rank`` sees it: all stages with its own degrees.

        A microbatch of ``dp`` data-parallel ranks is cut again over those that the stage has: all stages run equally
        many microbatches.
        """
        if not self.has_unlike_stages:
            return self
        tp = self.tp if self.stage_tp is None else self.stage_tp[rank]
        dp = self.data_parallel if self.stage_dp is None else self.stage_dp[rank]
        microbatch = self.microbatch * self.data_parallel // dp
        return self.unchecked(tp=tp, dp=dp, microbatch=microbatch, stage_tp=None, stage_dp=None)

    @property
    def schedule_record(self) -> ScheduleRecord:
        """What is known of the schedule; raises SpecError for a name that is not registered."""
        return schedule_record(self.schedule)

    @property
    def data_parallel(self) -> int:
        return self.dp or 1

    @property
    def chunks_per_rank(self) -> int:
        return self.schedule_record.chunks_per_rank(self.pp, self.interleave)

    @property
    def stages(self) -> int:
        """Model chunks of the whole pipeline."""
        return self.pp * self.chunks_per_rank

    @property
    def expert_tensor_parallel(self) -> int:
        return self.expert_tp or self.tp

    @property
    def expert_data_parallel(self) -> int:
        return self.tp * self.cp * self.data_parallel // (self.expert_tensor_parallel * self.ep)

    @property
    def world(self) -> int:
        if self.has_unlike_stages:
            stages = map(self.of_stage, range(self.pp))
            return self.cp * sum(stage.tp * stage.data_parallel for stage in stages)
        return self.tp * self.cp * self.data_parallel * self.pp

    @property
    def gradient_group(self) -> int:
        """Ranks that hold the same dense parameters and reduce their gradients: cp·dp."""
        return self.cp * self.data_parallel

    @property
    def sharding_group(self) -> int:
        """Ranks over which ZeRO divides states."""
        return self.shard_group or self.gradient_group

    @property
    def batch_multiple(self) -> int:
        """The global batch is a whole number of this many sequences; some schedules take pp microbatches at a time."""
        rounds = self.schedule_record.rounds(self.pp)
        if self.dp_shares is not None:
            rounds //= math.gcd(rounds, *self.dp_shares)
        return self.shares * self.microbatch * rounds

    @property
    def shares(self) -> int:
        """Microbatches of all data-parallel ranks, in the smallest batch."""
        return self.data_parallel if self.dp_shares is None else sum(self.dp_shares)

    @property
    def gradients_sharded(self) -> bool:
        """Whether a device holds only its shard of the gradients between microbatches."""
        return self.zero >= 2 and self.accumulate == "sharded"

    def degree(self, dimension: str) -> int:
        degree: int = self.data_parallel if dimension == "dp" else getattr(self, dimension)
        return degree


# `auto` leaves a value to the planner. A strategy holds values only, so that the planner and the engine always have
# them: `microbatch: auto` becomes the default, and `run.automatic` records that it was `auto`.

Automatic = Literal["microbatch", "optimizer", "gradients", "weights", "activations"]
_OFFLOADED: tuple[Automatic, ...] = ("optimizer", "gradients", "weights", "activations")


def without_auto(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a job with every `auto` of its strategy moved to `run.automatic`; others as they are."""
    strategy, run = job.get("strategy"), job.get("run", {})
    if not isinstance(strategy, Mapping) or not isinstance(run, Mapping):
        return job
    automatic: list[Automatic] = []
    kept = dict(strategy)
    if strategy.get("microbatch") == AUTO:
        automatic.append("microbatch")
        del kept["microbatch"]
    offload = strategy.get("offload")
    if offload == AUTO:
        automatic += _OFFLOADED
        del kept["offload"]
    elif isinstance(offload, Mapping):
        automatic += [kind for kind in _OFFLOADED if offload.get(kind) == AUTO]
        kept["offload"] = {name: value for name, value in offload.items() if name not in automatic}
    if not automatic:
        return job
    before = run.get("automatic", ())
    automatic = [*before, *(name for name in automatic if name not in before)]
    return {**job, "strategy": kept, "run": {**run, "automatic": automatic}}
