"""The search space of the planner, as groups of strategies (`cost.sweep.group`).

A group's rows are layer choices, schedules, recompute and batches; its columns are ZeRO stages and shard groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from shardwise.collectives import Topology
from shardwise.cost.sweep.columns import Group, LayerChoice, RecomputeChoice, ScheduleChoice, ShardChoice
from shardwise.layout.groups import expert_runs, expert_tensor_runs, group_runs
from shardwise.layout.network import spanned
from shardwise.layout.sharding import dense_ranks, expert_ranks
from shardwise.layout.stages import contents_of_kinds, ranks_of_kinds
from shardwise.planner.constraints import OFFLOADS, Constraints
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.rules import check_model_fits, divisors, most_stages
from shardwise.spec.schedules import PLAIN, ScheduleRecord, schedule_record, searched_schedules
from shardwise.spec.strategy import DIMENSIONS, Offload, Strategy
from shardwise.spec.training import Training

MOST_MICROBATCH = 16
MOST_MICROBATCH_TOKENS = 65_536
BATCH_TOLERANCE = 0.05  # a batch in tokens is rounded by at most this share to one that divides over a layout
MOST_ABOVE_MINIMUM = 2.0  # times a minimum batch: larger batches always look better, but train differently


@dataclass(frozen=True)
class Batches:
    """The batches and microbatches to try."""

    training: Training
    constraints: Constraints
    minimum: int | None
    """Asks for the smallest batch of at least this many sequences that divides; None: the batch of the training."""

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """The microbatch sizes to try."""
        seq = self.training.seq
        usual = [2**k for k in range(10) if 2**k <= MOST_MICROBATCH]
        usual = [size for size in usual if size == 1 or size * seq <= MOST_MICROBATCH_TOKENS]
        return self.constraints.candidates("microbatch", usual)

    def sequences(self, base: Strategy, schedules: list[str]) -> dict[int, tuple[int, ...]]:
        """By microbatch size: the sequences of a step under each schedule, or 0 if the batch does not divide."""
        rounds = [schedule_record(name).rounds(base.pp) for name in schedules]
        sizes = {size: base.data_parallel * size for size in self.microbatches}
        return {size: tuple(self.batch(each * times) for times in rounds) for size, each in sizes.items()}

    @cached_property
    def batch(self) -> Callable[[int], int]:
        """By multiple: the batch that is a multiple of so many sequences and near what was asked for, or 0."""
        return cache(self._rounded)

    def _rounded(self, multiple: int) -> int:
        if self.minimum is not None:
            least = -(-self.minimum // multiple) * multiple
            return least if least <= MOST_ABOVE_MINIMUM * self.minimum else 0
        training = self.training
        sequences = training.sequences(multiple)
        asked, in_tokens = training.batch_request() or (sequences, False)
        if in_tokens and abs(sequences * training.seq / asked - 1) > BATCH_TOLERANCE:
            return 0
        return sequences if sequences % multiple == 0 else 0


SHARD_GROUPS = 5  # sizes of a hybrid shard group to try besides all ranks
# ZeRO stage, whether gathered parameters are kept, how gradients are accumulated.
SHARDINGS = ((0, False, "sharded"), (1, False, "sharded"), (2, False, "sharded"), (3, False, "sharded"),
             (3, True, "sharded"), (3, True, "local"))  # fmt: skip
LEAVING = ((2, False, "sharded"), (3, False, "sharded"))  # let gradients and weights be offloaded
LOCAL = ((2, False, "local"), (3, False, "local"))  # only on request


def shard_choices(job: Job, constraints: Constraints, base: Strategy, *, states_leave: bool) -> tuple[ShardChoice, ...]:
    """Every way to shard the states of the layout ``base``.

    On a single rank they are all the same, with two exceptions: ZeRO-2 and 3 allow gradients and weights to be
    offloaded (``states_leave``), and ZeRO-1 is tried where the constraints exclude ZeRO-0.
    """
    group = base.gradient_group
    sizes = constraints.candidates("shard_group", (*shard_groups(base), group))
    asked = constraints.names("shard_group")
    shardable = [size for size in sizes if _shardable(job, base, size, asked=asked)]
    undivided = (None,) if not asked or None in shardable else ()
    stages = constraints.candidates("zero", (0, 1, 2, 3))
    kept = constraints.candidates("keep_parameters", (False, True))
    accumulated = constraints.candidates("accumulate", ("sharded", "local"))
    wanted = [
        (zero, keeps, accumulate)
        for zero, keeps, accumulate in (*SHARDINGS, *(LOCAL if constraints.names("accumulate") else ()))
        if zero in stages and keeps in kept and accumulate in accumulated
    ]
    # Without a pipeline every script can let FSDP reduce after each microbatch (`Stack.accumulation` is its default).
    in_stages = base.pp > 1
    if in_stages and job.stack.usual_accumulation(2, base.pp) == "local" and not constraints.names("accumulate"):
        # The stack accumulates locally, which costs the same as ZeRO-1; our own engine can also shard.
        also = (2, False, "local")
        wanted = [sharding for sharding in wanted if job.stack.is_own or sharding != (2, False, "sharded")]
        wanted += [also] if 2 in stages and False in kept and 1 not in stages else []
    if in_stages and job.stack.usual_accumulation(3, base.pp) == "local" and not job.stack.is_own:
        wanted = [
            (zero, keeps, "local" if zero == 3 and "local" in accumulated else accumulate)
            for zero, keeps, accumulate in wanted
        ]
    if group == 1:
        apart = any("zero" in entry and 0 in entry["zero"] for entry in constraints.excluded)
        more = (LEAVING if states_leave else ()) + (SHARDINGS[1:2] if apart else ())
        wanted = [*wanted[:1], *(sharding for sharding in wanted[1:] if sharding in more)]
    choices = [
        ShardChoice(zero, None if size == group else size, keeps, accumulate)
        for zero, keeps, accumulate in wanted
        for size in (shardable if zero else undivided)
    ]
    return tuple(dict.fromkeys(choices))


def shard_groups(base: Strategy) -> tuple[int | None, ...]:
    """Sizes to try: all ranks that hold the same parameters (None), and some spread evenly over the divisors."""
    group = base.gradient_group
    sizes = [size for size in divisors(group) if 1 < size < group]
    if len(sizes) >= SHARD_GROUPS:
        sizes = [sizes[len(sizes) * part // SHARD_GROUPS] for part in range(SHARD_GROUPS)]
    return (None, *sizes)


def _shardable(job: Job, base: Strategy, size: int | None, *, asked: bool) -> bool:
    """Whether to shard over a group of this size; one that straddles a network level only if ``asked`` for."""
    shards = size or base.gradient_group
    if base.gradient_group % shards:
        return False
    try:
        held = [dense_ranks(base, shards), *([expert_ranks(base, shards)] if job.model.moe else [])]
        parts = [spanned(job.cluster, runs, "strategy") for ranks in held for runs in (ranks.sharded, ranks.replicas)]
    except SpecError:
        return False
    return asked or shards == base.gradient_group or not _straddle(parts)


def _straddle(networks: Iterable[Topology | None]) -> bool:
    return any(network is not None and network.straddles for network in networks)


FEWEST_CONTEXT_TOKENS = 1024  # a context-parallel rank keeps at least this much of a sequence
MOST_TENSOR = 64
ORDERS = (DIMENSIONS, ("tp", "cp", "pp", "dp"))
INTERLEAVES = (2, 3, 4, 6, 8)
RECOMPUTED_PARTS = 6  # full recompute covers a sixth of a stage's layers, two sixths, ...
# The steps by which a space that is too large is narrowed.
NARROWINGS = (
    "rank order tp-cp-dp-pp only",
    "sequence parallelism wherever tp is, and whole experts (expert_tp 1)",
    "tp within the innermost network level",
    "at least 4,096 tokens of a sequence per context-parallel rank",
)


def schedule_choices(
    constraints: Constraints, names: Iterable[str], interleaves: Iterable[int], pp: int, layers: int
) -> Iterator[tuple[ScheduleRecord, int, int]]:
    """Schedules with their interleave and their number of stages, no more than the ``layers`` divide over."""
    for name in constraints.candidates("schedule", names):
        record = schedule_record(name)
        for interleave in constraints.candidates("interleave", interleaves if record.chooses_chunks else (1,)):
            chunks = record.chunks_per_rank(pp, interleave)
            if (interleave > 1) == record.chooses_chunks and pp * chunks <= most_stages(layers, chunks):
                yield record, interleave, pp * chunks


def expert_choices(
    model: Model, constraints: Constraints, splits: Iterable[int], ranks: int
) -> list[tuple[int, int | None]]:
    """Pairs of ep and expert_tp over the ranks of a stage; a dense model has one."""
    moe = model.moe
    if moe is None:
        return [(ep, None) for ep in constraints.candidates("ep", (1,)) if ep == 1]
    return [
        (ep, split)
        for split in constraints.candidates("expert_tp", splits)
        for ep in constraints.candidates("ep", divisors(moe.experts))
        if moe.experts % ep == 0 and moe.ffn % split == 0 and ranks % (ep * split) == 0
    ]


def model_divides(job: Job, strategy: Strategy) -> bool:
    """Whether the model's heads, widths and sequence divide over tp and cp."""
    try:
        check_model_fits(job.model, strategy.unchecked(pp=1, schedule=PLAIN, interleave=1), job.training)
    except SpecError:
        return False
    return True


def plain_strategy(job: Job) -> Strategy:
    """What all strategies of a search share: the dispatch and the overlap of the stack (except tp's, which is the
    job's), and the fields that no search varies."""
    stack = job.running_stack
    return Strategy(
        stage_layers="balanced",
        overlap=replace(stack.overlap, ep=False, tp=job.strategy.overlap.tp),
        dispatch=stack.dispatch,
        recompute_operators=job.strategy.recompute_operators,
        collective=job.strategy.collective,
        bucket=job.strategy.bucket,
        compression=job.strategy.compression,
        synchronise=job.strategy.synchronise,
    )


@dataclass(frozen=True)
class Space:
    """The strategies for a job within constraints."""

    job: Job
    constraints: Constraints = Constraints()
    minimum_batch: int | None = None  # as in `Batches`
    offload: bool = True  # whether strategies may offload
    any_priced: bool = False  # adds strategies that are priced but not run
    narrowed: int = 0  # how many of the `NARROWINGS` apply
    straddling: bool = False
    """Has only the layouts in which some group straddles a network level; otherwise it has only the others."""

    @property
    def narrowing(self) -> tuple[str, ...]:
        """What is left out of the full space, in words."""
        return NARROWINGS[: self.narrowed]

    def within(self, groups: int) -> Space:
        """The space, narrowed until it has about ``groups`` groups at most."""
        for narrowed in range(self.narrowed, len(NARROWINGS) + 1):
            space = replace(self, narrowed=narrowed)
            if space.estimated_groups <= groups:
                break
        return space

    @property
    def estimated_groups(self) -> int:
        """About how many groups there are: one for each layout, three for each with a pipeline."""
        return sum((1 if degrees["pp"] == 1 else 3) * len(self._orders(**degrees)) for degrees in self._degrees())

    def groups(self) -> Iterator[Group]:
        """All groups of the space."""
        for degrees in self._degrees():
            for base in self._placed(**degrees):
                yield from self._groups_of(base)

    # -- degrees -------------------------------------------------------------------------------------

    def _degrees(self) -> Iterator[dict[str, Any]]:
        job, constraints = self.job, self.constraints
        devices, layers = job.cluster.devices, job.model.layers
        sizes = self._batches.microbatches
        # Beyond twice the innermost network level tensor parallelism never wins.
        most_tensor = min(MOST_TENSOR, (2 if self.narrowed < 3 else 1) * job.cluster.levels[0].width)
        fewest = FEWEST_CONTEXT_TOKENS if self.narrowed < 4 else 4 * FEWEST_CONTEXT_TOKENS
        for pp in self._dividing("pp", devices, layers):
            for tp in self._dividing("tp", devices // pp, most_tensor):
                for cp in self._dividing("cp", devices // pp // tp, max(1, job.training.seq // fewest)):
                    dp = devices // pp // tp // cp
                    if dp not in constraints.candidates("dp", (dp,)):
                        continue
                    if not any(self._batches.batch(dp * size) for size in sizes):
                        continue
                    splits = dict.fromkeys((1, tp) if self.narrowed < 2 else (1,))
                    for ep, expert_tp in expert_choices(job.model, constraints, splits, tp * cp * dp):
                        yield {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "expert_tp": expert_tp}

    @cached_property
    def _plain(self) -> Strategy:
        return plain_strategy(self.job)

    def _dividing(self, name: str, devices: int, most: int) -> list[int]:
        usual = [degree for degree in divisors(devices) if degree <= most]
        return [degree for degree in self.constraints.candidates(name, usual) if devices % degree == 0]

    def _orders(self, **degrees: Any) -> list[tuple[Any, ...]]:
        """Rank orders, of which no two order the dimensions in use alike."""
        distinct: dict[tuple[str, ...], tuple[Any, ...]] = {}
        for order in self.constraints.candidates("order", ORDERS[:1] if self.narrowed else ORDERS):
            distinct.setdefault(tuple(name for name in order if degrees[name] > 1), order)
        return list(distinct.values())

    def _placed(self, **degrees: Any) -> Iterator[Strategy]:
        """A strategy for every rank order of these degrees that places some group differently on the network."""
        seen: list[list[Topology | None]] = []
        orders = self._orders(**degrees)
        for order in orders:
            base = self._plain.unchecked(order=order, **degrees)
            try:
                networks = self._networks(base)
            except SpecError:
                continue  # the experts' groups cut across the other dimensions
            if _straddle(networks) != self.straddling:
                continue
            if len(orders) > 1:
                networks += self._shard_networks(base)
            if networks not in seen:
                seen.append(networks)
                yield base

    def _networks(self, base: Strategy) -> list[Topology | None]:
        """The part of the network that the groups of each dimension span; raises SpecError if one has no place."""
        groups = [group_runs(base, (dimension,)) for dimension in ("tp", "cp", "pp")]
        groups += [dense_ranks(base, 1).replicas]
        if self.job.model.moe:
            groups += [expert_runs(base), expert_tensor_runs(base), expert_ranks(base, 1).replicas]
        return [spanned(self.job.cluster, runs, "strategy") for runs in groups]

    def _shard_networks(self, base: Strategy) -> list[Topology | None]:
        """The same for the groups that states may be sharded over."""
        networks = []
        for size in shard_groups(base)[1:]:
            with suppress(SpecError):  # the size cuts across cp and dp
                networks.append(spanned(self.job.cluster, dense_ranks(base, size or 1).sharded, "strategy"))
        return networks

    # -- axes ----------------------------------------------------------------------------------------

    def _groups_of(self, base: Strategy) -> Iterator[Group]:
        layers = self._layers(base)
        offloads = self._offloads
        leaves = any(offload.gradients or offload.weights for offload in offloads)
        shards = shard_choices(self.job, self.constraints, base, states_leave=leaves)
        if not layers or not shards or not offloads:
            return
        alike_by: dict[Any, list[ScheduleChoice]] = {}
        for choice in self._schedules(base.pp):
            record = schedule_record(choice.schedule)
            hides = base.ep > 1 and record.hides_exchange and self._hides_exchange
            shared = choice.schedule if record.two_copies else PLAIN
            alike_by.setdefault((hides, shared, self._rank_kinds(base, choice)), []).append(choice)
        for (hides, shared, kinds), alike in alike_by.items():
            own = base.unchecked(schedule=shared, overlap=base.overlap.unchecked(ep=hides))
            sequences = self._batches.sequences(base, [choice.schedule for choice in alike])
            batches = {layer: sequences[layer.microbatch] for layer in layers if any(sequences[layer.microbatch])}
            recomputes = self._recomputes(max(contents.layers for contents, _ in kinds))
            if batches and recomputes:
                ranks, members = zip(*kinds)
                for alone, columns in self._columns(own, shards):
                    yield Group(alone, tuple(batches), tuple(alike), recomputes, columns, offloads, ranks, members,
                                tuple(batches.values()))  # fmt: skip

    def _columns(
        self, base: Strategy, shards: tuple[ShardChoice, ...]
    ) -> Iterator[tuple[Strategy, tuple[ShardChoice, ...]]]:
        """The columns, divided where passes hold different bytes, under autocast more without ZeRO, or take the host
        different times."""
        stack, training = self.job.stack, self.job.training
        kinds: dict[tuple[bool, bool], list[ShardChoice]] = {}
        for choice in shards:
            by_host = stack.gathers_by_host(training, base.unchecked(**vars(choice)))
            kinds.setdefault((stack.autocast and choice.zero == 0, by_host), []).append(choice)
        for (_, by_host), columns in kinds.items():
            named = {"zero": columns[0].zero, "keep_parameters": columns[0].keep_parameters}
            yield base.unchecked(**named) if stack.autocast or by_host else base, tuple(columns)

    @property
    def _hides_exchange(self) -> bool:
        """Whether DualPipe hides the exchange of expert tokens under another microbatch: not in our own engine."""
        return self.any_priced or not self.job.stack.is_own

    def _layers(self, base: Strategy) -> tuple[LayerChoice, ...]:
        constraints = self.constraints
        plain = constraints.candidates("sequence_parallel", (True, False) if self.narrowed < 2 else (True,))
        if base.tp == 1:
            plain = (True,)
        methods = constraints.candidates("context_method", ("ring", "all-gather", "ulysses"))
        if base.cp == 1:
            methods = ("ring",)
        return tuple(
            LayerChoice(sp, method, size)
            for sp in plain
            for method in methods
            if self._model_divides(base.tp, base.cp, sp, method)
            for size in self._batches.microbatches
        )

    @cached_property
    def _model_divides(self) -> Callable[[int, int, bool, Any], bool]:
        @cache
        def divides(tp: int, cp: int, sp: bool, method: Any) -> bool:
            strategy = self._plain.unchecked(tp=tp, cp=cp, sequence_parallel=sp, context_method=method)
            return model_divides(self.job, strategy)

        return divides

    @cached_property
    def _schedules(self) -> Callable[[int], list[ScheduleChoice]]:
        return cache(self._schedules_over)

    def _schedules_over(self, pp: int) -> list[ScheduleChoice]:
        constraints, layers = self.constraints, self.job.model.layers
        if pp == 1:
            known = constraints.candidates("schedule", (PLAIN,))
            plain = (PLAIN in known or not known) and 1 in constraints.candidates("interleave", (1,))
            return [ScheduleChoice(PLAIN, 1, "even")] if plain else []
        splits = constraints.candidates("stage_layers", ("even", "balanced"))
        names = searched_schedules(any_priced=self.any_priced)
        choices = [
            ScheduleChoice(record.name, interleave, "even" if layers % stages == 0 else "balanced")
            for record, interleave, stages in schedule_choices(constraints, names, INTERLEAVES, pp, layers)
        ]
        return [choice for choice in choices if choice.stage_layers in splits]

    def _rank_kinds(self, base: Strategy, choice: ScheduleChoice) -> Any:
        """The distinct kinds of ranks and their members, computed once for all schedules with the same stages."""
        strategy = base.unchecked(**vars(choice))
        stages = (base.pp, strategy.chunks_per_rank, strategy.schedule_record.placement, choice.stage_layers)
        key = (base.tp, base.ep, base.expert_tp, *stages)
        if key not in self._kinds:
            job = self.job.unchecked(strategy=strategy)
            if stages not in self._members:
                self._members[stages] = ranks_of_kinds(job, range(base.pp))
            self._kinds[key] = tuple(contents_of_kinds(job, self._members[stages]).items())
        return self._kinds[key]

    @cached_property
    def _members(self) -> dict[Any, tuple[tuple[int, ...], ...]]:
        return {}

    @cached_property
    def _kinds(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def _batches(self) -> Batches:
        return Batches(self.job.training, self.constraints, self.minimum_batch)

    def _recomputes(self, layers: int) -> tuple[RecomputeChoice, ...]:
        constraints = self.constraints
        choices: list[RecomputeChoice] = []
        for mode in constraints.candidates("recompute", ("none", "selective", "full")):
            if mode != "full":
                choices.append(RecomputeChoice(mode))
                continue
            parts = sorted({layers * part // RECOMPUTED_PARTS for part in range(1, RECOMPUTED_PARTS)} - {0, layers})
            for count in constraints.candidates("recompute_layers", (None, *parts)):
                choices.append(RecomputeChoice(mode, count))
        return tuple(choices)

    @property
    def _offloads(self) -> tuple[Offload, ...]:
        usable = self.offload and self.job.cluster.host_link is not None
        usual = OFFLOADS.values() if usable else (OFFLOADS["none"],)
        allowed = self.constraints.candidates("offload", usual)
        return tuple(offload for offload in allowed if usable or not offload.any)
