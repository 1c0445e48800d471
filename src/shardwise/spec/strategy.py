"""How the work is split: the degrees, their order over the ranks, and every choice that has a price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.spec.codec import Spec, count, quantity
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.less_communication import Compression, Synchronise, method_field
from shardwise.spec.schedules import PLAIN, ScheduleRecord, chosen_chunks_schedules, job_schedules, schedule_record

Dimension = Literal["tp", "cp", "dp", "pp"]
DIMENSIONS: tuple[Dimension, ...] = ("tp", "cp", "dp", "pp")
MOST_RANKS = 10_000_000
RecomputedOperator = Literal["attention", "activation", "norm", "up-projection", "mlp-up", "alternate-products"]


@dataclass(frozen=True, kw_only=True)
class Overlap(Spec):
    """Which communication overlaps computation, in the price as in the engine."""

    dp: bool = True
    tp: bool = False
    pp: bool = False
    cp: bool = True
    ep: bool = False
    offload: bool = True


@dataclass(frozen=True, kw_only=True)
class Offload(Spec):
    """Shares of each kind of state kept outside device memory, and where.

    ``folder`` is where ``nvme`` puts its files, which have no names and vanish with their process; by default the
    system's folder for temporary files, which should not be in memory itself.
    """

    optimizer: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1})
    gradients: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1})
    weights: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1})
    activations: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1})
    target: Literal["cpu", "nvme"] = "cpu"
    folder: str | None = None

    @property
    def any(self) -> bool:
        return max(self.optimizer, self.gradients, self.weights, self.activations) > 0


@dataclass(frozen=True, kw_only=True)
class Strategy(Spec):
    """A parallel layout.

    ``tp``·``cp``·``dp``·``pp`` devices; ``order`` lays them over the ranks, innermost first. Expert
    parallelism reuses the ranks of one pipeline stage (tp·cp·dp): ``expert_tp``·``ep``· expert data
    parallelism, innermost first. ``zero`` shards optimizer states (1), gradients (2), parameters (3)
    over ``shard_group`` data-parallel ranks (default all of them; fewer is hybrid sharding).
    With ``accumulate: sharded`` ZeRO-2 and 3 reduce gradients after every microbatch; ``local`` keeps them
    whole and reduces once. ``keep_parameters`` keeps what ZeRO-3 gathered until the step ends. Without ZeRO, gradients
    are reduced in buckets of about ``bucket`` bytes (25 MiB), and may be compressed; ``synchronise`` says how often
    data-parallel workers synchronise.

    For unlike devices: ``dp_shares`` are the microbatches of each data-parallel rank relative to the others';
    ``stage_tp`` and ``stage_dp`` are the degrees of each pipeline rank, of which ``tp`` and ``dp`` are the largest.
    """

    tp: int = count(1, maximum=MOST_RANKS)
    cp: int = count(1, maximum=MOST_RANKS)
    dp: int | None = count(None, maximum=MOST_RANKS)
    pp: int = count(1, maximum=MOST_RANKS)
    ep: int = count(1, maximum=MOST_RANKS)
    expert_tp: int | None = count(None, maximum=MOST_RANKS)
    sequence_parallel: bool = True
    zero: Literal[0, 1, 2, 3] = 0
    shard_group: int | None = count(None, maximum=MOST_RANKS)
    keep_parameters: bool = False
    accumulate: Literal["sharded", "local"] = "sharded"
    order: tuple[Dimension, ...] = DIMENSIONS
    microbatch: int = count(1, maximum=10**6)
    schedule: str = PLAIN
    interleave: int = count(1, maximum=10_000)
    stage_layers: Literal["even", "balanced"] | tuple[int, ...] = "even"
    stage_tp: tuple[int, ...] | None = count(None, maximum=MOST_RANKS)
    stage_dp: tuple[int, ...] | None = count(None, maximum=MOST_RANKS)
    dp_shares: tuple[int, ...] | None = count(None, maximum=10_000)
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_operators: tuple[RecomputedOperator, ...] = ("attention",)
    recompute_layers: int | None = count(None, minimum=0, maximum=10_000)
    context_method: Literal["ring", "all-gather", "ulysses"] = "ring"
    dispatch: Literal["all-to-all", "deduplicated"] = "all-to-all"
    overlap: Overlap = field(default_factory=Overlap)
    offload: Offload = field(default_factory=Offload)
    collective: str = "auto"
    bucket: float | None = quantity("bytes", None)
    compression: Compression = method_field(Compression)
    synchronise: Synchronise = method_field(Synchronise)

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
            return self.cp * sum(one.tp * one.data_parallel for one in stages)
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
AUTO = "auto"
_OFFLOADED: tuple[Automatic, ...] = ("optimizer", "gradients", "weights", "activations")


def without_auto(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a job with every `auto` of its strategy moved to `run.automatic`; others as they are."""
    strategy, run = job.get("strategy"), job.get("run", {})
    if not isinstance(strategy, Mapping) or not isinstance(run, Mapping):
        return job
    found: list[Automatic] = []
    kept = dict(strategy)
    if strategy.get("microbatch") == AUTO:
        found.append("microbatch")
        del kept["microbatch"]
    offload = strategy.get("offload")
    if offload == AUTO:
        found += _OFFLOADED
        del kept["offload"]
    elif isinstance(offload, Mapping):
        found += [kind for kind in _OFFLOADED if offload.get(kind) == AUTO]
        kept["offload"] = {name: value for name, value in offload.items() if name not in found}
    if not found:
        return job
    before = run.get("automatic", ())
    automatic = [*before, *(one for one in found if one not in before)]
    return {**job, "strategy": kept, "run": {**run, "automatic": automatic}}
