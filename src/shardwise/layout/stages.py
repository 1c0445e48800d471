"""Pipeline stages: on which rank each is, its layers, and what a pipeline rank holds in parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

from shardwise.spec.fine_tuning import EVERYTHING, Tuning
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model
from shardwise.spec.parameters import (
    LayerParameters,
    embedding_parameters,
    final_norm_parameters,
    head_parameters,
    prediction_module_parameters,
    tuned_layer,
)
from shardwise.spec.rules import stage_layer_counts

Kinds = tuple[tuple[LayerRecord, int], ...]
"""How many layers there are of each kind."""


@dataclass(frozen=True)
class RankContents:
    """The part of the model on one pipeline rank, in parameters that one device holds before ZeRO.

    Layers include those of multi-token-prediction modules, which sit beside the head. ``layer_matrices`` are
    weight matrices inside layers (what Muon treats as matrices), ``others`` norms, embeddings and head;
    ``experts`` are the routed ones, which have their own data-parallel group. Those three are trained, adapters
    included; the frozen ones have no gradients and states. Layers are the mean of the rank's layers of their kind.
    """

    rank: int
    kinds: Kinds
    has_embedding: bool
    has_head: bool
    layer_matrices: float
    others: float
    experts: float
    frozen_matrices: float = 0.0
    frozen_others: float = 0.0
    frozen_experts: float = 0.0
    reference: float = 0.0
    """Of a second, frozen copy of the model, experts included."""
    frozen_above: float = 0.0
    """Of ``frozen_matrices``, those that a gradient flows through: below the first trained layer there are none."""
    frozen_experts_above: float = 0.0

    @property
    def layers(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def moe_layers(self) -> int:
        """Those with experts."""
        return sum(count for kind, count in self.kinds if kind.feed_forward == "mixture")

    @property
    def held(self) -> Kinds:
        """The kinds that it has a layer of."""
        return tuple((kind, count) for kind, count in self.kinds if count)

    @property
    def dense(self) -> float:
        """Trained parameters outside the routed experts."""
        return self.layer_matrices + self.others

    @property
    def total(self) -> float:
        """All that are trained."""
        return self.dense + self.experts


def stages_of_rank(job: Job, rank: int) -> tuple[int, ...]:
    """The stages (model chunks, in model order) that a pipeline rank holds."""
    strategy = job.strategy
    return strategy.schedule_record.stages_of(rank, strategy.pp, strategy.chunks_per_rank)


def placement(job: Job) -> tuple[int, ...]:
    """The pipeline rank of every stage; where each has two, that of the first copy."""
    rank_of = {stage: rank for rank in range(job.strategy.pp) for stage in stages_of_rank(job, rank)}
    return tuple(rank_of[stage] for stage in range(job.strategy.stages))


def stage_layers(job: Job) -> tuple[range, ...]:
    """The layers of every stage, in model order; the first and the last may have none."""
    counts = stage_layer_counts(job.model, job.strategy)
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts)))


def built_layers(job: Job) -> tuple[range, ...]:
    """The same with the layers of prediction modules, which follow the last layer, in the last stage."""
    *others, last = stage_layers(job)
    return (*others, range(last.start, last.stop + job.model.mtp_layers))


def rank_contents(job: Job, rank: int) -> RankContents:
    """What pipeline rank ``rank`` holds."""
    return _rank_contents(job, rank, _layers_of_stages(job))


def _rank_contents(job: Job, rank: int, stages: tuple[_Counts, ...]) -> RankContents:
    model, strategy, last = job.model, job.strategy, len(stages) - 1
    chunks, held = stages_of_rank(job, rank), _held_by_rank(job, rank)
    degrees = {
        "tensor_parallel": strategy.tp,
        "expert_parallel": strategy.ep,
        "expert_tensor_parallel": strategy.expert_tensor_parallel,
    }
    tuning, ends = tuned_at(job, rank).training.tuning, _Ends(0.0, 0.0)
    layers = [
        (count, tuned_layer(model, tuning, body_layers_of_kind(model, kind), kind, **degrees))
        for kind, count in zip(model.kinds, _summed(stages, held))
        if count
    ]
    above = _frozen_above(job, rank, degrees) if job.training.freezes else (0.0, 0.0)
    if last in held and model.mtp_layers:
        layers.append((model.mtp_layers, prediction_module_parameters(model, tuning, **degrees)))
    if 0 in held:
        at_embedding = strategy.tp if job.stack.whole_ends == "none" else 1
        ends += _Ends.of(embedding_parameters(model, at_embedding), trained=_trains_embedding(job))
    elif last in held and embedding_on_both_ends(job):
        ends += _Ends.of(model.vocab * model.hidden / strategy.tp, trained=_trains_embedding(job))
    if last in held:
        norm = final_norm_parameters(model)
        ends += _Ends.of(norm, trained=tuning.trains("norms"))
        at_head = job.stack.head_tensor_parallel(strategy.tp)
        ends += _Ends.of(head_parameters(model, at_head) - norm, trained=tuning.trains("head"))
    trained, frozen = (
        (_sums([(count, getattr(layer, kept)) for count, layer in layers], at_ends))
        for kept, at_ends in (("trained", ends.trained), ("frozen", ends.frozen))
    )
    copied = _whole(job, rank, stages) if job.training.reference_copy else 0.0
    run = _layers_run(job, stages, chunks)
    return RankContents(rank, run, 0 in chunks, last in chunks, *trained, *frozen, copied, *above)


def _frozen_above(job: Job, rank: int, degrees: dict[str, int]) -> tuple[float, float]:
    """Matrices and experts of a rank that are frozen and that a gradient flows through."""
    model, tuning, matrices, experts = job.model, job.training.tuning, 0.0, 0.0
    first = tuning.first_trained(model)
    flowing = () if first is None else tuple(layer for layer in layers_held(job, rank) if layer >= first)
    for kind in model.kinds:
        layers = [layer for layer in layers_of_kind(model, kind) if layer in flowing]
        if layers:
            frozen = tuned_layer(model, tuning.over(layers), layers, kind, **degrees).frozen
            matrices += len(layers) * (frozen.dense - frozen.norms)
            experts += len(layers) * frozen.experts
    return matrices, experts


def _whole(job: Job, rank: int, stages: tuple[_Counts, ...]) -> float:
    """Parameters of a rank's part of the model without adapters."""
    plain = job.training.unchecked(task="pretrain", tuning=EVERYTHING)
    return _rank_contents(job.unchecked(training=plain), rank, stages).total


# -- Where some layers are tuned and others are not, each rank is priced as its own layers are


def tuned_at(job: Job, rank: int) -> Job:
    """The job with the tuning of a pipeline rank's layers in place of the mean of all."""
    return job if _tuned_alike(job) else tuned_over(job, layers_held(job, rank))


def tuned_over(job: Job, layers: Iterable[int]) -> Job:
    """The job with the tuning of some layers."""
    if _tuned_alike(job):
        return job
    return job.unchecked(training=job.training.unchecked(tuning=job.training.tuning.over(layers)))


def tuned_kinds(job: Job, rank: int) -> tuple[tuple[int, ...], ...]:
    """How the layers of a pipeline rank are tuned: equal for ranks that are priced alike; empty where all ranks are."""
    if _tuned_alike(job):
        return ()
    model, tuning = job.model, job.training.tuning
    of_layers = ((model.kind_of_layer[layer], *tuning.kind_of(layer, model)) for layer in layers_held(job, rank))
    return tuple(sorted(of_layers))


def layers_held(job: Job, rank: int) -> tuple[int, ...]:
    """The layers whose parameters a pipeline rank holds, those of prediction modules included."""
    layers = built_layers(job)
    return tuple(layer for stage in _held_by_rank(job, rank) for layer in layers[stage])


def _tuned_alike(job: Job) -> bool:
    """Whether all pipeline ranks are priced as the mean of all layers."""
    tuning = job.training.tuning
    return job.strategy.pp == 1 or tuning.everything or layers_tuned_alike(job.model, tuning)


@lru_cache
def layers_tuned_alike(model: Model, tuning: Tuning) -> bool:
    return len({tuning.kind_of(layer, model) for layer in range(model.layers + model.mtp_layers)}) == 1


@lru_cache
def layers_of_kind(model: Model, kind: LayerRecord) -> tuple[int, ...]:
    """The layers of one kind; prediction modules follow the last layer."""
    return tuple(index for index, layer in enumerate(model.every_layer) if layer == kind)


@lru_cache
def body_layers_of_kind(model: Model, kind: LayerRecord) -> tuple[int, ...]:
    """The same without those of prediction modules, whose parameters are counted apart."""
    return tuple(layer for layer in layers_of_kind(model, kind) if layer < model.layers)


def _trains_embedding(job: Job) -> bool:
    """A head that shares the embedding's weights trains them."""
    tuning = job.training.tuning
    return tuning.trains("embedding") or (job.model.tied_embeddings and tuning.trains("head"))


class _Ends(NamedTuple):
    """Parameters of a rank outside layers."""

    trained: float
    frozen: float

    @classmethod
    def of(cls, parameters: float, *, trained: bool) -> _Ends:
        return cls(parameters * trained, parameters * (not trained))

    def __add__(self, other: tuple[float, ...]) -> _Ends:  # type: ignore[override]
        return _Ends(*map(add, self, other))


def _sums(layers: list[tuple[int, LayerParameters]], at_ends: float) -> tuple[float, float, float]:
    """Matrices, others and experts of some layers and the ends of the model."""
    matrices = sum((count * (layer.dense - layer.norms) for count, layer in layers), 0.0)
    others = sum((count * layer.norms for count, layer in layers), 0.0)
    return matrices, others + at_ends, sum((count * layer.experts for count, layer in layers), 0.0)


def stage_contents(job: Job, stage: int) -> RankContents:
    """What one stage computes; without its parameters, which a pass does not need."""
    stages = _layers_of_stages(job)
    run = _layers_run(job, stages, (stage,))
    return RankContents(stage, run, stage == 0, stage == len(stages) - 1, 0.0, 0.0, 0.0)


def _layers_run(job: Job, stages: tuple[_Counts, ...], chunks: tuple[int, ...]) -> Kinds:
    """The layers of some stages; prediction modules run beside the head."""
    model, counts = job.model, list(_summed(stages, chunks))
    if len(stages) - 1 in chunks:
        counts[model.kind_of_layer[-1]] += model.mtp_layers
    return tuple(zip(model.kinds, counts))


def _held_by_rank(job: Job, rank: int) -> tuple[int, ...]:
    """The stages whose parameters a rank holds.

    DualPipe runs half of the microbatches from the other end: a rank holds its mirror's stage too.
    """
    chunks, last = stages_of_rank(job, rank), job.strategy.stages - 1
    return tuple({*chunks, last - rank}) if job.strategy.schedule_record.two_copies else chunks


def embedding_on_both_ends(job: Job) -> bool:
    """Whether the last stage needs the token embedding as well: tied to the head, or read by prediction modules."""
    return job.model.tied_embeddings or job.model.mtp_layers > 0


_Counts = tuple[int, ...]  # of layers of each of the model's kinds


def _summed(stages: tuple[_Counts, ...], held: tuple[int, ...]) -> _Counts:
    return tuple(map(sum, zip(*(stages[stage] for stage in held))))


def _layers_of_stages(job: Job) -> tuple[_Counts, ...]:
    return tuple(map(job.model.count_kinds, stage_layers(job)))


def rank_kinds(job: Job, ranks: Iterable[int]) -> dict[RankContents, tuple[int, ...]]:
    """One rank of every kind among ``ranks`` (equal contents take equal time), and all ranks of that kind."""
    return contents_of_kinds(job, ranks_of_kinds(job, ranks))


def ranks_of_kinds(job: Job, ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """All ranks of every kind among ``ranks``, which only the stages and their places decide."""
    alike: dict[Any, list[int]] = {}
    stages = _layers_of_stages(job)
    ends = (0, len(stages) - 1)
    for rank in ranks:
        chunks, held = stages_of_rank(job, rank), _held_by_rank(job, rank)
        kind = (_summed(stages, chunks), _summed(stages, held), *(end in chunks for end in ends))
        kind = (*kind, tuned_kinds(job, rank))
        alike.setdefault(kind, []).append(rank)
    return tuple(map(tuple, alike.values()))


def contents_of_kinds(job: Job, kinds: Iterable[tuple[int, ...]]) -> dict[RankContents, tuple[int, ...]]:
    """The contents of a rank of every kind, with all ranks of it."""
    stages = _layers_of_stages(job)
    return {_rank_contents(job, members[0], stages): members for members in kinds}


def pipeline_ranks_to_price(job: Job) -> tuple[int, ...]:
    """Pipeline ranks whose figures differ: all of a small pipeline, the ends and the middle of a large one."""
    p = job.strategy.pp
    uneven = job.strategy.stage_layers != "even" or len(job.model.kinds) > 1
    if p <= 8 or (uneven and p <= 64) or not _tuned_alike(job):
        return tuple(range(p))
    return (0, 1, p // 2, p - 1)
