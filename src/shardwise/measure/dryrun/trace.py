"""Traces one step of the real engine on one rank: memory at every place, collectives, and FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.engine import engine as engine_module
from shardwise.engine.batch import Batch
from shardwise.engine.context.distributed_attention import AcrossRanks
from shardwise.engine.engine import Engine
from shardwise.engine.experts.loads import Assumed
from shardwise.engine.labels import Label
from shardwise.engine.optim import optimizer
from shardwise.engine.parameters import local
from shardwise.engine.recompute import apply as recompute_apply
from shardwise.engine.recompute.apply import recomputed_layers
from shardwise.engine.torch_private import unset_fake_temporarily
from shardwise.layout.payloads import Payload
from shardwise.layout.ranks import coordinate
from shardwise.layout.stages import built_layers, stages_of_rank
from shardwise.measure.dryrun.counters import CollectiveLog, FlopLog
from shardwise.measure.dryrun.extend import Moments, TracedShape
from shardwise.measure.dryrun.memory import LayerKind, MemoryLog, Places, StepPlace
from shardwise.measure.dryrun.result import Holder, TracedCollective
from shardwise.measure.dryrun.world import (
    block_kernel,
    chunks_of_all_layers,
    fake_tensors,
    nothing_moves,
    posing_as,
    replaced,
    updates_in_one_pass,
)
from shardwise.models.layer import window_of
from shardwise.models.moe import MoELayer
from shardwise.spec.job import Job


@dataclass(frozen=True)
class Trace:
    """What one traced step does."""

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
    """The kind of every layer of a rank."""
    stages = [built_layers(job)[stage] for stage in stages_of_rank(job, pipeline_rank)]
    some = job.strategy.recompute_layers if job.strategy.recompute == "full" else None
    recomputed = recomputed_layers([len(layers) for layers in stages], 0 if some is None else some)
    kinds = {}
    for layers, first in zip(stages, recomputed):
        for number, index in enumerate(layers):
            windowed = window_of(job.model, index) is not None
            predicts = index >= job.model.layers
            experts = job.model.moe is not None if predicts else job.model.is_moe_layer(index)
            kinds[index] = LayerKind(experts, windowed, number < first, predicts)
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

    def accumulated(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # else its gradient was deferred
            memory.claim("gradients", [local(parameter.grad)])

    for held in engine.parameters:
        held.parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]


def _step(engine: Engine, batch: Batch, places: Places, memory: MemoryLog) -> None:
    places.start_step()
    engine.forward_backward(batch)
    memory.claim("gradients", (held.gradient for held in engine.parameters if held.gradient is not None))
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
    return replaced((recompute_apply, "recomputed_layers", lambda *_: [numbers[stage] for stage in sorted(numbers)]))


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
