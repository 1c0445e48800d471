"""The predicted step of a job: operators, priced communication, overlap and the pipeline; and the floor under it.

The rules that lead from passes to a step are the same for numbers (a job) and for columns (a table).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.collectives.arrays import select
from shardwise.cost.compute.flops import head_forward_flops, layer_forward_flops, prediction_forward_flops
from shardwise.cost.compute.operators import (
    LayerShape,
    Operator,
    OperatorRole,
    gradient_share,
    layer_operators,
    reaches_head,
    trains_head,
)
from shardwise.cost.compute.recompute import fully_recomputed_share, share_run_again
from shardwise.cost.compute.roofline import Seconds
from shardwise.cost.step.stage_time import StageSeconds, layer_shape, optimizer_seconds, stage_seconds
from shardwise.cost.traffic.execution import in_its_step, step_traffic
from shardwise.cost.traffic.traffic import ComputeWindows, OverlappedTransfer, Traffic, with_exposed_seconds
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import RankContents, rank_contents, rank_kinds, tuned_at, tuned_kinds
from shardwise.layout.views import is_unlike, replicas_by_kind, timed_on
from shardwise.pipeline import bubble_seconds as idle_seconds
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.schedules import StepEnds
from shardwise.spec.stack import Stack
from shardwise.spec.training import Training


def passes_with_exposed(
    compute: Seconds, transfers: Sequence[OverlappedTransfer], hidden: Sequence[Any], microbatches: Any
) -> Seconds:
    """Passes of a microbatch with what the layers' communication adds: exposed time, and slower computation beside it.

    Forward communication that recompute repeats is part of the backward pass.
    """
    in_forward = in_backward = 0.0
    for transfer, under in zip(transfers, hidden):
        added = transfer.seconds - under + transfer.units_taken * under
        if transfer.in_pass == "backward":
            in_backward = in_backward + added
            continue
        again = added * transfer.repeated
        in_forward, in_backward = in_forward + (added - again), in_backward + again
    forward = compute.forward + in_forward / microbatches
    return Seconds(forward, compute.input_gradient + in_backward / microbatches, compute.weight_gradient)


def slowest_and_others(ranks: Sequence[Seconds], counts: Sequence[int]) -> tuple[Seconds, Seconds]:
    """The slowest rank's passes, and the mean of all other ranks'."""
    slowest = ranks[0]
    for rank in ranks[1:]:
        slower = rank.total > slowest.total
        slowest = Seconds(*(select(slower, *both) for both in zip(rank.passes, slowest.passes)))
    others = sum(counts) - 1

    def mean(of_slowest: Any, of_ranks: Sequence[Any]) -> Any:
        total = sum(count * seconds for seconds, count in zip(of_ranks, counts))
        return (total - of_slowest) / others if others else 0.0

    return slowest, Seconds(*map(mean, slowest.passes, zip(*(rank.passes for rank in ranks))))


def pipeline_bubble(
    schedule: str, pp: int, microbatches: Any, chunks: int, others: Seconds, message_seconds: Any, ends: StepEnds
) -> Any:
    """Idle seconds that the schedule adds to the slowest rank's work, given the other ranks' passes."""
    if pp == 1:
        return 0.0
    forward, input_gradient, weight_gradient = (seconds / chunks for seconds in others.passes)
    passes = {"forward": forward, "input_grad": input_gradient, "weight_grad": weight_gradient}
    return idle_seconds(schedule, pp, microbatches, chunks, **passes, comm_seconds=message_seconds, ends=ends)


def slowest_of(count: int) -> float:
    """How many standard deviations the slowest of ``count`` is behind the mean: at most √(2 ln n).

    Boucheron, Lugosi and Massart 2013, "Concentration Inequalities", section 2.5; close to it for many.
    """
    return math.sqrt(2 * math.log(count))


def waiting_share(cluster: Cluster, stack: Stack, *, gathers_once: bool) -> float:
    """Share of the layers' time that all devices of a synchronous step wait for the slowest.

    Once a step for the slowest device; where parameters are gathered for every layer by hosts that launch kernel after
    kernel, in every layer for the node that is slowest at that moment.
    """
    efficiency = cluster.device.efficiency
    share = efficiency.device_spread * slowest_of(cluster.devices)
    if gathers_once or stack.elementwise != "eager":
        return share
    return share + efficiency.layer_jitter * slowest_of(cluster.nodes)


def length_wait(training: Training, replicas: int) -> float:
    """Share of the layers' time that replicas wait for the one with the longest documents, times √sequences of a step.

    Padded documents are drawn at random: the sum of n lengths varies by their spread over √n. Packed sequences are
    equally long, and batches balanced by length would be.
    """
    lengths = training.lengths
    if lengths is None or lengths.packing == "packed" or replicas == 1:
        return 0.0
    return lengths.spread(training.seq) * math.sqrt(replicas) * slowest_of(replicas)


_PER_STEP = ("dp", "offload")


@dataclass(frozen=True)
class RankPrediction:
    """The computation and communication of one kind of pipeline rank."""

    job: Job  # as that rank sees it
    contents: RankContents
    compute: StageSeconds
    traffics: tuple[Traffic, ...]

    @property
    def microbatches(self) -> int:
        return self.job.microbatches

    def exposed(self, dimension: str) -> float:
        """Seconds that a dimension adds to the step: exposed, and by slowing the computation it overlaps with."""
        return sum(traffic.added_seconds for traffic in self.traffics if traffic.dimension == dimension)

    @cached_property
    def passes(self) -> Seconds:
        """Seconds of one microbatch, including the exposed communication of its layers."""
        layers = [traffic for traffic in self.traffics if traffic.in_layer]
        transfers = [traffic.transfer for traffic in layers]
        hidden = [traffic.under_compute_seconds for traffic in layers]
        return passes_with_exposed(self.compute, transfers, hidden, self.microbatches)

    @property
    def once_seconds(self) -> float:
        """Communication after the last microbatch: gradients that both ends, or all tensor-parallel ranks, hold."""
        return sum(traffic.exposed_seconds for traffic in self.traffics if traffic.once)

    @property
    def microbatch_seconds(self) -> float:
        return float(self.passes.total)

    @property
    def layers_seconds(self) -> float:
        """All microbatches of a step through its layers: computation and exposed communication."""
        exposed = sum(traffic.exposed_seconds for traffic in self.traffics if traffic.in_layer)
        return self.microbatches * float(self.compute.forward + self.compute.backward) + exposed

    @property
    def message_seconds(self) -> float:
        """One message to a neighbouring stage."""
        messages = [t for t in self.traffics if t.dimension == "pp" and t.fixed_exposed_seconds is not None]
        return max((float(traffic.cost.seconds) for traffic in messages), default=0.0)


@dataclass(frozen=True)
class Prediction:
    """A predicted step and its parts."""

    job: Job
    ranks: tuple[RankPrediction, ...]  # one of every kind
    counts: tuple[int, ...]  # pipeline ranks of each kind

    @property
    def slowest(self) -> RankPrediction:
        return max(self.ranks, key=lambda rank: rank.microbatch_seconds)

    @property
    def microbatches(self) -> int:
        """Microbatches of a pipeline; where pipelines have unlike shares of the batch, of the slowest."""
        return self.slowest.microbatches

    @property
    def pipeline_seconds(self) -> float:
        """All microbatches through the slowest stage, plus the schedule's idle time over the other stages."""
        return self.microbatches * self.slowest.microbatch_seconds + self.bubble_seconds

    @cached_property
    def bubble_seconds(self) -> float:
        return self.bubble_with(self.slowest.message_seconds)

    def bubble_with(self, message_seconds: float) -> float:
        """The schedule's idle seconds if one message took so long."""
        strategy = self.job.strategy
        _, others = slowest_and_others([rank.passes for rank in self.ranks], self.counts)
        chunks, m, ends = strategy.chunks_per_rank, self.microbatches, self.job.stack.step_ends
        return float(pipeline_bubble(strategy.schedule, strategy.pp, m, chunks, others, message_seconds, ends))

    @cached_property
    def last(self) -> RankPrediction:
        """The rank that takes longest for the work done once per step."""
        return max(self.ranks, key=self._once_a_step)

    @property
    def tail_seconds(self) -> float:
        """Time of a step beside its microbatches: exposed reductions, gathers, optimizer, overhead, stragglers."""
        return self._once_a_step(self.last)

    def straggler_seconds(self, rank: RankPrediction) -> float:
        """How long devices of this rank wait for slower devices."""
        once = sharding_of(rank.job.strategy).gathers_once
        waits = waiting_share(rank.job.cluster, rank.job.stack, gathers_once=once)
        waits += length_wait(rank.job.training, rank.job.strategy.data_parallel) / math.sqrt(rank.job.sequences)
        return waits * rank.layers_seconds

    def _once_a_step(self, rank: RankPrediction) -> float:
        update = float(optimizer_seconds(rank.job, rank.contents, sharding_of(rank.job.strategy)))
        exposed = sum(rank.exposed(name) for name in _PER_STEP)
        return exposed + rank.once_seconds + update + self.straggler_seconds(rank)

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.tail_seconds


def predict(job: Job) -> Prediction:
    """The step of ``job`` as its stack and its cluster are described."""
    replicas = replicas_by_kind(job)
    if replicas:  # those that take longest, which the others wait for
        own = max((predict(replica) for replica in replicas), key=lambda prediction: prediction.step_seconds)
        return Prediction(job, own.ranks, own.counts)
    if is_unlike(job):
        return _of_unlike_stages(job)
    kinds = rank_kinds(job, range(job.strategy.pp))
    ranks = tuple(rank_prediction(tuned_at(job, contents.rank), contents) for contents in kinds)
    return Prediction(job, ranks, tuple(len(members) for members in kinds.values()))


def _of_unlike_stages(job: Job) -> Prediction:
    """Every pipeline rank by itself, as it sees the job."""
    known: dict[object, RankPrediction] = {}
    ranks = []
    for number in range(job.strategy.pp):
        view, contents = timed_on(job, number), rank_contents(job.of_stage(number), number)
        key = (view.strategy, view.cluster, tuned_kinds(job, number), replace(contents, rank=0))
        if key not in known:
            known[key] = rank_prediction(view, contents)
        ranks.append(known[key])
    return Prediction(job, tuple(ranks), (1,) * len(ranks))


def rank_prediction(job: Job, contents: RankContents) -> RankPrediction:
    """The computation and communication of a pipeline rank with these contents."""
    compute, m = stage_seconds(job, contents), job.microbatches
    attention = compute.attention
    windows = ComputeWindows(m * compute.forward, m * compute.backward, m * attention.forward, m * attention.backward)
    traffics = with_exposed_seconds([in_its_step(job, t) for t in step_traffic(job, contents)], windows)
    return RankPrediction(job, contents, compute, tuple(traffics))


# -- A floor under the step time: the predicted step with its matmuls at the device's peak, and nothing else computed


@dataclass(frozen=True)
class StageCompute:
    """Seconds of computation of one microbatch on one device of a pipeline rank, at peak."""

    matrices_forward: float
    attention_forward: float
    matrices_recomputed: float
    attention_recomputed: float
    weights_at_once: float  # weight gradients that are computed with the input gradients
    input_gradients: float  # of matmuls
    weight_gradients: float
    attention_backward: float
    forward_passes: int = 1

    @property
    def forward(self) -> float:
        return self.forward_passes * (self.matrices_forward + self.attention_forward)

    @property
    def backward(self) -> float:
        gradients = self.input_gradients + self.weight_gradients + self.attention_backward
        return gradients + self.matrices_recomputed + self.attention_recomputed

    @property
    def passes(self) -> StageSeconds:
        weights = self.weight_gradients - self.weights_at_once
        attention = Seconds(self.attention_forward, self.attention_backward)
        again = self.matrices_recomputed + self.attention_recomputed
        return StageSeconds(self.forward, self.backward - weights, weights, attention, again)

    def windows(self, microbatches: int) -> ComputeWindows:
        attention = (self.attention_forward, self.attention_backward + self.attention_recomputed)
        return ComputeWindows(*(microbatches * seconds for seconds in (self.forward, self.backward, *attention)))


def stage_compute(job: Job, contents: RankContents) -> StageCompute:
    """Ideal seconds per microbatch; low-precision recipes speed up layer matmuls only, not attention or head."""
    device, recipe = job.cluster.device, job.training.recipe
    narrow_peak, wide_peak = device.peak_flops(recipe.compute), device.peak_flops(recipe.wide)
    tokens = job.computed_tokens / job.strategy.tp
    shape, share = layer_shape(job), fully_recomputed_share(job, contents)
    tuning, flows = job.training.tuning, gradient_share(job.model, job.training.tuning)
    matrices = attention = again_matrices = again_attention = inputs = weights = 0.0
    for kind, count in contents.held:
        flops = layer_forward_flops(job.model, shape.seq, kind)
        operators = layer_operators(job.model, shape, kind)
        products = count * flops.matrices * tokens / narrow_peak
        seen = 1.0 if kind.mixer == "delta" else shape.attended_share
        scores = count * flops.attention * seen * tokens / wide_peak
        if tuning.everything:
            inputs, weights = inputs + products, weights + products
        else:
            forward, input_gradients, weight_gradients = _tuned_passes(operators, job, shape, kind)
            inputs, weights = inputs + products * input_gradients, weights + products * weight_gradients
            products *= forward
        matrices, attention = matrices + products, attention + scores
        again_matrices += products * _run_again(job, operators, "product", share)
        again_attention += scores * _run_again(job, operators, "attention", share)
    after_layers = head_forward_flops(job.model) + prediction_forward_flops(job.model)
    head = after_layers * tokens / wide_peak if contents.has_head else 0.0
    of_head = reaches_head(job.model, tuning) * head, trains_head(job.model, tuning) * head
    return StageCompute(
        matrices + head, attention, again_matrices, again_attention, share * weights,
        inputs + of_head[0], weights + of_head[1], 2 * flows * attention, job.training.forward_passes,
    )  # fmt: skip


def _tuned_passes(operators: tuple[Operator, ...], job: Job, shape: LayerShape, kind: LayerRecord) -> tuple[float, ...]:
    """Matmuls of each pass of a layer that is not trained whole, as shares of its forward pass without adapters."""
    plain = sum(operator.flops for operator in operators if operator.kind == "product")
    tuned = [
        operator
        for operator in layer_operators(job.model, shape, kind, job.training.tuning)
        if operator.kind == "product"
    ]
    inputs, weights = (sum(o.flops * share for o, share in zip(tuned, shares)) for shares in _shares(tuned))
    return sum(operator.flops for operator in tuned) / plain, inputs / plain, weights / plain


def _shares(operators: Sequence[Operator]) -> tuple[list[float], list[float]]:
    return [operator.flows for operator in operators], [operator.trained for operator in operators]


def _run_again(job: Job, operators: tuple[Operator, ...], kind: str, full_share: float) -> float:
    """Share of a layer's matmuls, or of its attention, that recompute runs again."""
    own = [one for one in operators if one.kind != "traffic" and _mixes(one) == (kind == "attention")]
    again = sum(operator.flops * share_run_again(job, operator, full_share) for operator in own)
    return again / sum(operator.flops for operator in own)


def _mixes(operator: Operator) -> bool:
    """Whether it brings tokens together."""
    return operator.kind == "attention" or operator.role is OperatorRole.STATES


@dataclass(frozen=True)
class RankFloor:
    """A pipeline rank that computes at peak."""

    job: Job  # as that rank sees it
    contents: RankContents
    compute: StageCompute
    traffics: tuple[Traffic, ...]

    def step_seconds(self, pipeline_seconds: float) -> float:
        """The larger of two bounds: the pipeline with what nothing can hide, and this rank's work with all that it
        waits for. Not their sum, since a rank may wait during the pipeline's idle time.
        """
        timed = [traffic for traffic in self.traffics if traffic.fixed_exposed_seconds is None]
        alone = sum(traffic.seconds for traffic in timed if traffic.window == "none" and not traffic.in_layer)
        work = self.job.microbatches * (self.compute.forward + self.compute.backward)
        return max(pipeline_seconds + alone, work + sum(traffic.exposed_seconds for traffic in timed))

    @property
    def in_pipeline(self) -> RankPrediction:
        """The rank with passes none of which is longer than the predicted one.

        Communication that could hide in the backward pass is left out: beside faster weight gradients less of it would
        hide, which would lengthen the input gradients that other ranks wait for.
        """
        kept = (traffic for traffic in self.traffics if traffic.window == "none" or traffic.in_pass == "forward")
        return RankPrediction(self.job, self.contents, self.compute.passes, tuple(map(_in_its_pass, kept)))


def _in_its_pass(traffic: Traffic) -> Traffic:
    """The traffic without what recompute repeats in the backward pass, if that can hide there."""
    if traffic.window == "none":
        return traffic
    once = 1 - traffic.repeated
    hidden = once * traffic.under_compute_seconds
    return replace(traffic, count=once * traffic.count, repeated=0.0, under_compute_seconds=hidden)


def rank_floor(job: Job, contents: RankContents) -> RankFloor:
    """The floor of a rank; its traffic may hide under the whole pass, whichever matmul a stack runs it beside."""
    compute = stage_compute(job, contents)
    traffics = [
        replace(traffic, unhideable=0.0) if traffic.in_layer else traffic for traffic in step_traffic(job, contents)
    ]
    exposed = with_exposed_seconds(traffics, compute.windows(job.microbatches))
    return RankFloor(job, contents, compute, tuple(exposed))


def rank_floors(prediction: Prediction) -> list[RankFloor]:
    """The floor of every kind of rank in a prediction."""
    return [rank_floor(rank.job, rank.contents) for rank in prediction.ranks]
