"""Traces one step of the real engine on one rank: memory at every place, collectives, and FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from shardwise.engine import engine as engine_module
from shardwise.engine import recompute
from shardwise.engine.batch import Batch
from shardwise.engine.context.across_ranks import AcrossRanks
from shardwise.engine.engine import Engine
from shardwise.engine.experts.rows import Assumed
from shardwise.engine.labels import Label
from shardwise.engine.optim import optimizer
from shardwise.engine.parameters import local, stored_weights
from shardwise.engine.recompute import recomputed_layers
from shardwise.engine.torch_private import unset_fake_temporarily
from shardwise.layout.groups import coordinate
from shardwise.layout.payloads import Payload
from shardwise.layout.stages import built_layers, stages_of_rank
from shardwise.measure.dryrun.memory import LayerKind, MemoryLog, Places, StepPlace
from shardwise.measure.dryrun.result import Bytes, Holder, TracedCollective
from shardwise.measure.dryrun.world import (
    CollectiveLog,
    FlopLog,
    block_kernel,
    chunks_of_all_layers,
    fake_tensors,
    nothing_moves,
    posing_as,
    replaced,
    updates_in_one_pass,
)
from shardwise.models.moe import MoELayer
from shardwise.spec.job import Job

# -- from a few traced layers and microbatches to all of them: each adds the same amount to every count ---
# Memory is extrapolated place by place, since each place has its own peak. Layers near the front of a stage are matched
# with layers near the front of the larger one, layers near the back with those near the back, and likewise the first
# and the last microbatches. Between them memory changes linearly from layer to layer, and not at all from microbatch to
# microbatch: so the peak of a pass is never in the middle.

Kind = tuple[int, LayerKind]  # stage, kind of layer
Key = TypeVar("Key")
Moments = Mapping[StepPlace, Sequence[Bytes]]


@dataclass(frozen=True)
class TracedShape:
    """How much is traced: the number of layers of every kind in every stage of the rank, and of microbatches."""

    layers: tuple[tuple[Kind, int], ...]
    microbatches: int

    def of(self, kind: Kind) -> int:
        return dict(self.layers)[kind]

    def with_one_more(self, kinds: frozenset[Kind]) -> TracedShape:
        return replace(self, layers=tuple((kind, number + (kind in kinds)) for kind, number in self.layers))

    def with_microbatches(self, number: int) -> TracedShape:
        return replace(self, microbatches=number)


@dataclass(frozen=True)
class Extension:
    """Which shapes are traced, to extrapolate to ``whole`` from their differences."""

    whole: TracedShape
    small: TracedShape
    more_microbatches: int  # every shape is also traced with this many microbatches
    groups: tuple[frozenset[Kind], ...]  # kinds of equally many layers: one more of each is traced together

    @property
    def shapes(self) -> list[TracedShape]:
        with_layers = [self.small, *(self.small.with_one_more(group) for group in self.groups)]
        if self.small.microbatches == self.whole.microbatches:
            return with_layers
        return [*with_layers, *(shape.with_microbatches(self.more_microbatches) for shape in with_layers)]

    def extended(self, numbers_of: Callable[[TracedShape], Mapping[Key, float]]) -> dict[Key, float]:
        """The numbers of ``whole``, extrapolated linearly in every kind of layer and in the microbatches."""
        result = self._over_layers(numbers_of, self.small.microbatches)
        if self.small.microbatches == self.whole.microbatches:
            return result
        more = self._over_layers(numbers_of, self.more_microbatches)
        steps = (self.whole.microbatches - self.small.microbatches) / (self.more_microbatches - self.small.microbatches)
        return _sum(result, _sum(more, result, -1), steps)

    def _over_layers(
        self, numbers_of: Callable[[TracedShape], Mapping[Key, float]], microbatches: int
    ) -> dict[Key, float]:
        small = self.small.with_microbatches(microbatches)
        base = numbers_of(small)
        result = dict(base)
        for group in self.groups:
            one_more = _sum(numbers_of(small.with_one_more(group)), base, -1)
            kind = next(iter(group))
            result = _sum(result, one_more, self.whole.of(kind) - small.of(kind))
        return result


def extension(whole: TracedShape, layers: int, microbatches: Sequence[int]) -> Extension:
    """Traces at most ``layers`` of every kind, and two numbers of ``microbatches`` if the whole has more than those."""
    small = TracedShape(tuple((kind, min(number, layers)) for kind, number in whole.layers), whole.microbatches)
    numbers = sorted({number for _, number in whole.layers if number > layers})
    groups = tuple(frozenset(kind for kind, number in whole.layers if number == count) for count in numbers)
    few, more = microbatches
    if whole.microbatches > more:
        small = small.with_microbatches(few)
    return Extension(whole, small, more, groups)


def alike(place: StepPlace, shape: TracedShape, microbatches: int) -> StepPlace | None:
    """A name for a place that is the same in traces of all sizes; None for places in the middle.

    ``shape`` is the smallest that is traced, ``microbatches`` the number in the trace that the place comes from.
    """
    if not place.part:
        return place
    visit = _from_nearer_end(place.visit, microbatches, shape.microbatches)
    if visit is None or place.kind is None:  # no layer
        return None if visit is None else replace(place, visit=visit)
    number = _from_nearer_end(place.number, place.of, shape.of((place.stage, place.kind)))
    return None if number is None else replace(place, number=number, of=0, visit=visit)


def _from_nearer_end(number: int, of: int, least: int) -> int | None:
    """The number from the front or (negative) from the back, if within half of ``least``; None in the middle."""
    least = min(least, of)
    if number < (least + 1) // 2:
        return number
    return number - of if of - number <= least // 2 else None


def _sum(first: Mapping[Key, float], other: Mapping[Key, float], times: float) -> dict[Key, float]:
    return {key: first.get(key, 0.0) + times * other.get(key, 0.0) for key in {**first, **other}}


def at_one_moment(traces: Sequence[Moments]) -> list[dict[StepPlace, Bytes]]:
    """The peak memory of each place, at the same moment in all traces with equally many moments at that place.

    Places are named as by `alike`; the largest trace comes last, and its peak decides. Otherwise traces could choose
    different moments of nearly equal memory, whose parts differ.
    """
    longest = {place: len(moments) for place, moments in traces[-1].items()}
    chosen = {place: _most_at(moments) for place, moments in traces[-1].items()}

    def of(place: StepPlace, moments: Sequence[Bytes]) -> Bytes:
        return moments[chosen[place] if longest.get(place) == len(moments) else _most_at(moments)]

    return [{place: of(place, moments) for place, moments in trace.items()} for trace in traces]


def _most_at(moments: Sequence[Bytes]) -> int:
    return max(range(len(moments)), key=lambda number: sum(moments[number].values()))


# -- the trace ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    calls: Mapping[TracedCollective, int]
    sent_bytes: Mapping[TracedCollective, int]
    flops: Mapping[str, float]
    moments: Moments  # memory by part at every moment of each place
    holders: tuple[Holder, ...]  # the tensors at the peak
    moved: Mapping[Payload, int]  # bytes between the device and its host


def whole_shape(job: Job, pipeline_rank: int) -> TracedShape:
    """All layers of a rank's stages, by kind, and all microbatches."""
    kinds, layers = layer_kinds(job, pipeline_rank), built_layers(job)
    numbers = Counter((stage, kinds[index]) for stage in stages_of_rank(job, pipeline_rank) for index in layers[stage])
    return TracedShape(tuple(numbers.items()), job.microbatches)


def layer_kinds(job: Job, pipeline_rank: int) -> dict[int, LayerKind]:
    stages = [built_layers(job)[stage] for stage in stages_of_rank(job, pipeline_rank)]
    some = job.strategy.recompute_layers if job.strategy.recompute == "full" else None
    recomputed = recomputed_layers([len(layers) for layers in stages], 0 if some is None else some)
    kinds = {}
    for layers, first in zip(stages, recomputed):
        for number, index in enumerate(layers):
            record, predicts = job.model.every_layer[index], index >= job.model.layers
            kinds[index] = LayerKind(record, number < first, predicts, job.training.tuning.kind_of(index, job.model))
    return kinds


def trace(job: Job, rank: int, shape: TracedShape, assumed: Assumed) -> Trace:
    """The second step (the first creates the optimizer's states) of as many layers as ``shape`` has."""
    kinds = layer_kinds(job, coordinate(job.strategy, "pp", rank))
    sequences = shape.microbatches * job.strategy.data_parallel * job.strategy.microbatch
    job = replace(job, training=replace(job.training, global_batch=sequences))
    places = Places()
    with ExitStack() as entered:
        entered.enter_context(posing_as(rank, job.strategy.world))
        entered.enter_context(_only_layers(shape, kinds))
        if job.strategy.recompute_layers is not None:
            entered.enter_context(_as_many_recomputed(shape))
        entered.enter_context(_structure_is_real())
        entered.enter_context(nothing_moves())
        if job.run_device == "cuda":
            entered.enter_context(updates_in_one_pass())
        if job.strategy.offload.optimizer:
            entered.enter_context(chunks_of_all_layers(job, coordinate(job.strategy, "pp", rank)))
        entered.enter_context(fake_tensors())
        memory = MemoryLog(places)
        entered.enter_context(memory)
        engine = Engine(job, device="cpu", seed=0)
        _pose(engine, assumed)
        engine.compress(True)  # the uncompressed steps at the start of a run are few
        places.follow(engine.stages, kinds)
        _claim(engine, memory)
        each = job.sequences // job.strategy.data_parallel
        tokens = torch.zeros((each, job.training.seq), dtype=torch.int64)
        batch = Batch.of(tokens, tokens.clone())
        # From the second update on, states are fetched ahead; stored weights are updated in the step after their own.
        for _ in range(2 if engine.optimizer.stored.weights else 1):
            _step(engine, batch, places, memory)
        memory.forget()
        if engine.store is not None:
            engine.store.lanes.moved.clear()
        collectives, flops = CollectiveLog(), FlopLog()
        memory.observers += [collectives, flops]
        with collectives.naming():
            _step(engine, batch, places, memory)
        return _summed(engine, collectives, flops, memory)


def _claim(engine: Engine, memory: MemoryLog) -> None:
    """Tells the log what only the engine knows: which tensors are weights, gradients and optimizer states."""
    memory.claim("optimizer", (local(tensor) for state in engine.optimizer.state.values() for tensor in state.values()))
    memory.claim("weights", (local(held.parameter) for held in engine.parameters))
    codes = [each.stored for each in stored_weights(engine.stages.values())]
    memory.claim("weights", (local(tensor) for each in codes for tensor in (*each.parameters(), *each.buffers())))

    def accumulated(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # else its gradient was deferred
            memory.claim("gradients", [local(parameter.grad)])

    for held in engine.trained:
        held.parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]


def _step(engine: Engine, batch: Batch, places: Places, memory: MemoryLog) -> None:
    places.start_step()
    engine.forward_backward(batch)
    memory.claim("gradients", (held.gradient for held in engine.trained if held.gradient is not None))
    places.now = StepPlace("update")
    engine.update()
    places.now = StepPlace("between")


def _pose(engine: Engine, assumed: Assumed) -> None:
    """Assumes the routing, which depends on data, and lets attention run as a GPU's kernels would."""
    for stage in engine.stages.values():
        for module in stage.modules():
            attend = getattr(module, "attend", None)
            if isinstance(attend, AcrossRanks):
                attend.choose = block_kernel
            if isinstance(module, MoELayer):
                _assume(module.exchange, assumed)


def _assume(exchange: Any, assumed: Assumed) -> None:
    """Sets the assumption on an exchange and those that it wraps."""
    while exchange is not None:
        if hasattr(exchange, "assumed"):
            exchange.assumed = assumed
        exchange = getattr(exchange, "inner", None)


def _only_layers(shape: TracedShape, kinds: Mapping[int, LayerKind]) -> AbstractContextManager[None]:
    """Makes the engine build only the first layers of every kind."""

    def first_layers(job: Job) -> tuple[list[int], ...]:
        return tuple(_first(stage, layers, shape, kinds) for stage, layers in enumerate(built_layers(job)))

    return replaced((engine_module, "built_layers", first_layers))


def _as_many_recomputed(shape: TracedShape) -> AbstractContextManager[None]:
    """Makes the engine recompute as many layers of every stage as are traced."""
    numbers: Counter[int] = Counter()
    for (stage, kind), number in shape.layers:
        numbers[stage] += number * kind.recomputed
    return replaced((recompute, "recomputed_layers", lambda *_: [numbers[stage] for stage in sorted(numbers)]))


def _structure_is_real() -> AbstractContextManager[None]:
    """Builds mesh and modules outside the fake mode (modules without values, on the meta device)."""

    def real(name: str) -> tuple[Any, str, Any]:
        original = getattr(engine_module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            with unset_fake_temporarily():
                return original(*arguments, **named)

        return engine_module, name, call

    no_values = (engine_module, "initialise_parts", lambda *arguments: None)
    no_failure = (optimizer, "known_to_host", lambda flag: False)
    return replaced(
        *(real(name) for name in ("build_mesh", "cut_stages", "tie_ends", "apply_data")), no_values, no_failure
    )


def _first(stage: int, layers: Sequence[int], shape: TracedShape, kinds: Mapping[int, LayerKind]) -> list[int]:
    left = {kind: number for (of_stage, kind), number in shape.layers if of_stage == stage}
    kept = []
    for index in layers if left else ():
        if left[kinds[index]] > 0:
            left[kinds[index]] -= 1
            kept.append(index)
    return kept


def _summed(engine: Engine, collectives: CollectiveLog, flops: FlopLog, memory: MemoryLog) -> Trace:
    dimension_of = dimension_of_collectives(engine)
    calls: Counter[TracedCollective] = Counter()
    sent_bytes: Counter[TracedCollective] = Counter()
    for sent in collectives.sent:
        if len(sent.ranks) > 1:
            line = TracedCollective(
                dimension_of(sent.label, sent.ranks),
                sent.kind,
                sent.label.title,
                len(sent.ranks),
                sent.peer,
                sent.label.what,
            )
            calls[line] += 1
            sent_bytes[line] += sent.size_bytes
    moved = {} if engine.store is None else dict(engine.store.lanes.moved)
    return Trace(calls, sent_bytes, dict(flops.flops), memory.moments(), tuple(memory.holders()), moved)


NAMES = {**{name: name for name in ("tp", "cp", "ep", "dp", "pp")}, "expert_tp": "tp"}


def dimension_of_collectives(engine: Engine) -> Callable[[Label, tuple[int, ...]], str]:
    """A function that tells the dimension of a collective: by the engine's label, or else by its ranks."""
    by_ranks: dict[tuple[int, ...], str] = {}
    for name, dimension in (*NAMES.items(), ("shard", "dp"), ("replicate", "dp")):
        ranks = tuple(sorted(torch.distributed.get_process_group_ranks(engine.mesh.group(name))))
        by_ranks.setdefault(ranks, dimension)

    def dimension_of(label: Label, ranks: tuple[int, ...]) -> str:
        return NAMES.get(label.dimension) or by_ranks.get(tuple(sorted(ranks)), "all")

    return dimension_of
