"""Every way to split the work that the planner looks at, as groups of strategies (`cost.tables.group`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from shardwise.cost.communication.data import dense_ranks, expert_ranks
from shardwise.cost.network import expert_runs, expert_tensor_runs, group_runs, spanned
from shardwise.cost.stages import rank_kinds
from shardwise.cost.tables.group import Group, LayerChoice, RecomputeChoice, ScheduleChoice, ShardChoice
from shardwise.planner.constraints import OFFLOADS, Constraints
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import check_model_fits, divisors
from shardwise.spec.strategy import DIMENSIONS, Offload, Strategy

MOST_MICROBATCH = 16
MOST_MICROBATCH_TOKENS = 65_536
FEWEST_CONTEXT_TOKENS = 1024  # a context-parallel rank keeps at least this much of a sequence
MOST_TENSOR = 64
ORDERS = (DIMENSIONS, ("tp", "cp", "pp", "dp"), ("tp", "dp", "cp", "pp"))
# gpipe to dualpipev by hand; zb-1p and zb-2p are built for a memory limit and priced like zb-h1 and zb-h2.
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipev", "gpipe", "dualpipe")
INTERLEAVES = (2, 3, 4, 6, 8)
# ZeRO stage, parameters kept, gradients accumulated.
SHARDINGS = ((0, False, "sharded"), (1, False, "sharded"), (2, False, "sharded"), (3, False, "sharded"),
             (3, True, "sharded"), (3, True, "local"))  # fmt: skip


@dataclass(frozen=True)
class Space:
    """The strategies of a job description within constraints.

    ``job`` says everything but the strategy. ``minimum_batch`` asks for the smallest batch, in sequences, that divides
    and is at least so large; without it the batch is the training's. Degrees that do not divide are never made.
    """

    job: Job
    constraints: Constraints = Constraints()
    minimum_batch: int | None = None
    offload: bool = True
    cut: dict[str, int] = field(default_factory=dict)

    def groups(self) -> Iterator[Group]:
        """All groups, innermost dimensions last."""
        for base in self._bases():
            yield from self._groups_of(base)

    # -- degrees -------------------------------------------------------------------------------------

    def _bases(self) -> Iterator[Strategy]:
        job, constraints = self.job, self.constraints
        devices, layers = job.cluster.devices, job.model.layers
        for pp in self._dividing("pp", devices, layers):
            for tp in self._dividing("tp", devices // pp, self._most_tensor):
                for cp in self._dividing("cp", devices // pp // tp, max(1, job.training.seq // FEWEST_CONTEXT_TOKENS)):
                    dp = devices // pp // tp // cp
                    if dp not in constraints.candidates("dp", (dp,)):
                        continue
                    for ep, expert_tp in self._experts(tp, tp * cp * dp):
                        for order in self._orders(tp, cp, dp, pp):
                            base = self._base(tp, cp, dp, pp, ep, expert_tp, order)
                            if base is not None:
                                yield base

    def _dividing(self, name: str, devices: int, most: int) -> list[int]:
        usual = [degree for degree in divisors(devices) if degree <= most]
        return [degree for degree in self.constraints.candidates(name, usual) if devices % degree == 0]

    @property
    def _most_tensor(self) -> int:
        """Twice the innermost network level: beyond it tensor parallelism only shows that it should not."""
        return min(MOST_TENSOR, 2 * self.job.cluster.levels[0].width)

    def _experts(self, tp: int, ranks: int) -> list[tuple[int, int | None]]:
        moe = self.job.model.moe
        if moe is None:
            return [(ep, None) for ep in self.constraints.candidates("ep", (1,)) if ep == 1]
        splits = self.constraints.candidates("expert_tp", dict.fromkeys((1, tp)))
        return [
            (ep, expert_tp)
            for expert_tp in splits
            if ranks % expert_tp == 0 and moe.ffn % expert_tp == 0
            for ep in self.constraints.candidates("ep", divisors(moe.experts))
            if moe.experts % ep == 0 and ranks % (ep * expert_tp) == 0
        ]

    def _orders(self, tp: int, cp: int, dp: int, pp: int) -> list[tuple[Any, ...]]:
        """Orders that differ where it matters: dimensions of degree 1 are nowhere."""
        degrees = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        distinct: dict[tuple[str, ...], tuple[Any, ...]] = {}
        for order in self.constraints.candidates("order", ORDERS):
            distinct.setdefault(tuple(name for name in order if degrees[name] > 1), order)
        return list(distinct.values())

    def _base(
        self, tp: int, cp: int, dp: int, pp: int, ep: int, expert_tp: int | None, order: tuple[Any, ...]
    ) -> Strategy | None:
        overlap = replace(self.job.stack.overlap, ep=False)
        base = Strategy(
            tp=tp,
            cp=cp,
            dp=dp,
            pp=pp,
            ep=ep,
            expert_tp=expert_tp,
            order=order,
            stage_layers="balanced",
            overlap=overlap,
            dispatch=self.job.stack.dispatch,
            recompute_operators=self.job.strategy.recompute_operators,
            collective=self.job.strategy.collective,
        )
        cluster = self.job.cluster
        try:
            for dimension in DIMENSIONS:
                spanned(cluster, group_runs(base, (dimension,)), f"strategy.{dimension}")
            if self.job.model.moe:
                for runs in (expert_runs(base), expert_tensor_runs(base), expert_ranks(base, 1).replicas):
                    spanned(cluster, runs, "strategy.ep")
            spanned(cluster, dense_ranks(base, 1).replicas, "strategy.dp")
        except SpecError:
            self.cut["placement"] = self.cut.get("placement", 0) + 1
            return None
        return base

    # -- axes ----------------------------------------------------------------------------------------

    def _groups_of(self, base: Strategy) -> Iterator[Group]:
        layers = self._layers(base)
        shards = self._shards(base)
        offloads = self._offloads
        if not layers or not shards or not offloads:
            return
        for overlap_ep, schedules in self._schedule_classes(base.pp).items():
            by_kinds: dict[Any, list[ScheduleChoice]] = {}
            for choice in schedules:
                by_kinds.setdefault(self._rank_kinds(base, choice), []).append(choice)
            for kinds, alike in by_kinds.items():
                dual = "dualpipe" if alike[0].schedule == "dualpipe" else "1f1b"
                overlap = replace(base.overlap, ep=overlap_ep and base.ep > 1)
                own = replace(base, schedule=dual, overlap=overlap)  # type: ignore[arg-type]
                batches = {layer: tuple(self._sequences(base, layer, one) for one in alike) for layer in layers}
                batches = {layer: row for layer, row in batches.items() if any(row)}
                if batches:
                    recomputes = self._recomputes(max(contents.layers for contents, _ in kinds))
                    ranks, members = zip(*kinds)
                    yield Group(own, tuple(batches), tuple(alike), recomputes, shards, offloads, ranks, members,
                                tuple(batches.values()))  # fmt: skip

    def _layers(self, base: Strategy) -> tuple[LayerChoice, ...]:
        constraints, seq = self.constraints, self.job.training.seq
        plain = constraints.candidates("sequence_parallel", (True, False))
        if base.tp == 1:
            plain = plain[:1] and (True,)
        methods = constraints.candidates("context_method", ("ring", "all-gather", "ulysses"))
        if base.cp == 1:
            methods = methods[:1] and ("ring",)
        usual = [2**k for k in range(10) if 2**k <= MOST_MICROBATCH]
        usual = [size for size in usual if size == 1 or size * seq <= MOST_MICROBATCH_TOKENS]
        return tuple(
            LayerChoice(sp, method, size)
            for sp in plain
            for method in methods
            if self._model_fits(base.tp, base.cp, sp, method)
            for size in constraints.candidates("microbatch", usual)
        )

    def _model_fits(self, tp: int, cp: int, sequence_parallel: bool, method: Any) -> bool:
        strategy = Strategy(tp=tp, cp=cp, sequence_parallel=sequence_parallel, context_method=method)
        return _fits_model(self.job, strategy)

    def _schedule_classes(self, pp: int) -> dict[bool, list[ScheduleChoice]]:
        """Schedules by whether they hide the exchange of expert tokens under another microbatch."""
        classes: dict[bool, list[ScheduleChoice]] = {}
        for choice in self._schedules(pp):
            classes.setdefault(choice.schedule.startswith("dualpipe"), []).append(choice)
        return classes

    def _schedules(self, pp: int) -> list[ScheduleChoice]:
        constraints, layers = self.constraints, self.job.model.layers
        if pp == 1:
            known = constraints.candidates("schedule", ("1f1b",))
            return [ScheduleChoice("1f1b", 1, "even")] if "1f1b" in known or not known else []
        choices = []
        for name in constraints.candidates("schedule", SCHEDULES):
            chunks = constraints.candidates("interleave", INTERLEAVES if name == "interleaved" else (1,))
            for interleave in chunks:
                if (interleave == 1) == (name == "interleaved"):
                    continue
                per_rank = Strategy(pp=pp, schedule=name, interleave=interleave).chunks_per_rank
                stages = pp * per_rank
                split = "even" if layers % stages == 0 else "balanced"
                if stages <= layers and split in constraints.candidates("stage_layers", ("even", "balanced")):
                    choices.append(ScheduleChoice(name, interleave, split))
        return choices

    def _rank_kinds(self, base: Strategy, choice: ScheduleChoice) -> Any:
        """One rank of every kind with the ranks like it, as a key that schedules with equal stages share."""
        key = (base.tp, base.ep, base.expert_tp, base.pp, choice)
        if key not in self._kinds:
            strategy = Strategy(
                tp=base.tp,
                pp=base.pp,
                dp=base.cp * base.data_parallel,
                ep=base.ep,
                expert_tp=base.expert_tp,
                schedule=choice.schedule,  # type: ignore[arg-type]
                interleave=choice.interleave,
                stage_layers=choice.stage_layers,  # type: ignore[arg-type]
                sequence_parallel=False,
            )
            training = replace(self.job.training, global_batch=strategy.batch_multiple)
            kinds = rank_kinds(replace(self.job, strategy=strategy, training=training), range(base.pp))
            self._kinds[key] = tuple(kinds.items())
        return self._kinds[key]

    @cached_property
    def _kinds(self) -> dict[Any, Any]:
        return {}

    def _sequences(self, base: Strategy, layer: LayerChoice, choice: ScheduleChoice) -> int:
        """Sequences of a step, or 0 where the batch does not divide."""
        rounds = base.pp if choice.schedule == "interleaved" else 1
        size = base.data_parallel * layer.microbatch
        multiple = size * rounds
        if self.minimum_batch is not None:
            return -(-self.minimum_batch // multiple) * multiple
        sequences = self.job.training.sequences(multiple)
        return sequences if sequences % multiple == 0 else 0

    def _recomputes(self, layers: int) -> tuple[RecomputeChoice, ...]:
        constraints = self.constraints
        choices: list[RecomputeChoice] = []
        for mode in constraints.candidates("recompute", ("none", "selective", "full")):
            if mode != "full":
                choices.append(RecomputeChoice(mode))
                continue
            parts = sorted({layers * quarter // 4 for quarter in (1, 2, 3)} - {0, layers})
            for count in constraints.candidates("recompute_layers", (None, *parts)):
                choices.append(RecomputeChoice(mode, count))
        return tuple(choices)

    def _shards(self, base: Strategy) -> tuple[ShardChoice, ...]:
        constraints, group = self.constraints, base.gradient_group
        choices = []
        for zero, kept, accumulate in SHARDINGS:
            if (
                zero not in constraints.candidates("zero", (0, 1, 2, 3) if group > 1 else (0,))
                or kept not in constraints.candidates("keep_parameters", (False, True))
                or accumulate not in constraints.candidates("accumulate", ("sharded", "local"))
            ):
                continue
            sizes = constraints.candidates("shard_group", self._shard_groups(base)) if zero else (None,)
            for size in sizes:
                if zero and not self._shardable(base, size):
                    continue
                choices.append(ShardChoice(zero, None if size == group else size, kept, accumulate))
        return tuple(dict.fromkeys(choices))

    @property
    def _offloads(self) -> tuple[Offload, ...]:
        usable = self.offload and self.job.cluster.host_link is not None
        usual = OFFLOADS.values() if usable else (OFFLOADS["none"],)
        return self.constraints.candidates("offload", usual)

    def _shard_groups(self, base: Strategy) -> tuple[int | None, ...]:
        """All ranks; those that share a node (or a wider level); and one size between the two."""
        group = base.gradient_group
        runs = group_runs(base, ("cp", "dp"))
        sizes: set[int] = set()
        width = 1
        for level in self.job.cluster.levels[:-1]:
            width *= level.width
            inside = max((size for size in divisors(group) if runs and runs[0].stride * size <= width), default=1)
            sizes |= {inside, inside * 8}
        return (None, *sorted(size for size in sizes if 1 < size < group and group % size == 0))

    def _shardable(self, base: Strategy, size: int | None) -> bool:
        """Whether a shard group of this size lies on the network."""
        shards = size or base.gradient_group
        if base.gradient_group % shards:
            return False
        try:
            held = [dense_ranks(base, shards), *([expert_ranks(base, shards)] if self.job.model.moe else [])]
            for ranks in held:
                spanned(self.job.cluster, ranks.sharded, "strategy.shard_group")
                spanned(self.job.cluster, ranks.replicas, "strategy.shard_group")
        except SpecError:
            return False
        return True


@lru_cache(maxsize=4096)
def _fits_model(job: Job, strategy: Strategy) -> bool:
    try:
        check_model_fits(job.model, strategy, job.training)
    except SpecError:
        return False
    return True
