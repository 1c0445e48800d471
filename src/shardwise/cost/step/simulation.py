"""The predicted step of a job with its pipeline simulated, every pass of every microbatch; and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from shardwise.cost.compute.flops import flops_per_token
from shardwise.cost.compute.operators import OperatorKind
from shardwise.cost.step.prediction import Prediction, RankPrediction, rank_floors
from shardwise.cost.step.stage_time import optimizer_seconds, part_seconds, seconds_by_kind, step_overhead
from shardwise.cost.traffic.pipeline import message_traffic
from shardwise.cost.traffic.traffic import IN_LAYER, Traffic
from shardwise.layout.payloads import Payload, Role, sent_forward
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import built_layers, placement, rank_kinds, stage_contents, stages_of_rank, tuned_over
from shardwise.layout.views import is_unlike, message_views, replicas_by_kind, same_kind
from shardwise.pipeline import StageTimes, Timeline, build, simulate, stage_times
from shardwise.pipeline.steady import simulated_pipeline
from shardwise.spec.job import Job
from shardwise.spec.schedules import PLAIN


@dataclass(frozen=True)
class SimulatedStep:
    """A predicted step whose pipeline was simulated; its ranks end it together or apart, as the stack says."""

    prediction: Prediction
    pipeline_seconds: float  # all microbatches through the pipeline
    timeline: Timeline | None
    """None without a pipeline, and where the simulation was extrapolated or replaced by the closed form."""
    is_closed_form: bool = False

    @property
    def job(self) -> Job:
        return self.prediction.job

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.prediction.tail_seconds

    @cached_property
    def floor_seconds(self) -> float:
        """What no software can beat with this layout on this network: the same step, computed at peak."""
        floors = rank_floors(self.prediction)
        at_peak = Prediction(self.job, tuple(rank.in_pipeline for rank in floors), self.prediction.counts)
        pipeline = at_peak.pipeline_seconds if self.is_closed_form else simulated_step(at_peak).pipeline_seconds
        return max(rank.step_seconds(pipeline) for rank in floors)

    def low_seconds(self, error: float) -> float:
        """The low end of an error bar, the (negative) share ``error`` from the step; never below the floor."""
        return max(self.floor_seconds, self.step_seconds * (1 + error))

    @property
    def bubble_seconds(self) -> float:
        """Pipeline seconds beyond the slowest rank's work; negative where DualPipe divides that among two ranks."""
        return self.pipeline_seconds - self.prediction.microbatches * self.prediction.slowest.microbatch_seconds

    @cached_property
    def message_seconds(self) -> float:
        """Seconds that the pipeline would save if messages between its stages took no time."""
        if self.is_closed_form:
            return self.prediction.bubble_seconds - self.prediction.bubble_with(0.0)
        if self.job.strategy.pp == 1:
            return 0.0
        return max(0.0, self.pipeline_seconds - _pipeline(self.prediction, 0.0)[0])

    @property
    def tokens_per_second(self) -> float:
        """Without padding."""
        return self.job.document_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, causal attention counted once, recomputed FLOPs not counted."""
        job = self.job
        return (
            flops_per_token(job.model, job.training.seq, tuning=job.training.tuning)
            * self.tokens_per_second
            / job.peak_flops
        )


def simulated_step(prediction: Prediction, *, whole: bool = False, most_passes: int | None = None) -> SimulatedStep:
    """The step with its pipeline simulated.

    Many microbatches reach a steady state that repeats: then a simulation of fewer is extrapolated, which changes only
    rounding and yields no timeline. ``whole`` simulates all of them. A schedule without a steady state is priced by its
    closed form if it has more than ``most_passes``.
    """
    strategy = prediction.job.strategy
    if strategy.pp == 1:
        return SimulatedStep(prediction, prediction.microbatches * prediction.slowest.microbatch_seconds, None)
    passes = 3 * prediction.microbatches * strategy.stages
    if most_passes is not None and strategy.schedule_record.repeats == "unknown" and passes > most_passes:
        return SimulatedStep(prediction, prediction.pipeline_seconds, None, is_closed_form=True)
    return SimulatedStep(prediction, *_pipeline(prediction, boundary_seconds(prediction), whole=whole))


def boundary_seconds(prediction: Prediction) -> float | list[float]:
    """Seconds of one message; of unlike stages, across every boundary between two of them.

    Where the stages differ the larger side decides: each rank moves what it holds of a microbatch.
    """
    job = prediction.job
    if not is_unlike(job) or replicas_by_kind(job):
        return prediction.slowest.message_seconds
    views = [message_views(job, rank) for rank in range(job.strategy.pp)]
    along = placement(job)
    return [
        max(
            _message(inside if same_kind(job, rank, next_rank) else beyond)
            for inside, beyond in (views[rank], views[next_rank])
        )
        for rank, next_rank in pairwise(along)
    ]


def _message(job: Job) -> float:
    message = message_traffic(job, sent_forward(Role.ACTIVATIONS))
    return 0.0 if message is None else float(message.cost.seconds)


def _pipeline(
    prediction: Prediction, message_seconds: float | list[float], *, whole: bool = False
) -> tuple[float, Timeline | None]:
    strategy = prediction.job.strategy
    return simulated_pipeline(
        strategy.schedule,
        strategy.pp,
        prediction.microbatches,
        strategy.chunks_per_rank,
        pipeline_times(prediction),
        message_seconds,
        ends=prediction.job.stack.step_ends,
        whole=whole,
        ahead=prediction.job.stack.forwards_ahead(strategy, strategy.schedule_record),
    )


def step_timeline(prediction: Prediction) -> Timeline:
    """Every pass of the step; without a pipeline, one microbatch after the other (or all forwards first, as GPipe)."""
    timeline = simulated_step(prediction, whole=True).timeline
    if timeline is not None:
        return timeline
    own = prediction.job.strategy.schedule_record
    order = own.name if own.forwards_first else PLAIN
    return simulate(build(order, 1, prediction.microbatches), pipeline_times(prediction))


def pipeline_times(prediction: Prediction) -> StageTimes:
    """Seconds of one microbatch on every stage: pp × chunks of them in model order, or one without a pipeline."""
    job = prediction.job
    if job.strategy.pp == 1:
        rank = prediction.slowest
        return stage_times(*([seconds] for seconds in rank.passes.passes))
    passes = [(0.0, 0.0, 0.0)] * job.strategy.stages
    for number, rank in enumerate(rank_predictions(prediction)):
        stages = stages_of_rank(job, number)
        for stage, seconds in zip(stages, seconds_of_stages(_whole(rank.job, job), rank, stages)):
            passes[stage] = seconds
    return stage_times(*zip(*passes))


def _whole(view: Job, job: Job) -> Job:
    """A rank's view of a job with all stages of the job."""
    pp = job.strategy.pp
    return view if view.strategy.pp == pp else view.unchecked(strategy=view.strategy.unchecked(pp=pp))


def rank_predictions(prediction: Prediction) -> list[RankPrediction]:
    """The prediction of every pipeline rank: that of its kind."""
    if len(prediction.ranks) == prediction.job.strategy.pp:
        return list(prediction.ranks)
    members = rank_kinds(prediction.job, range(prediction.job.strategy.pp)).values()
    of_rank = {number: rank for rank, numbers in zip(prediction.ranks, members) for number in numbers}
    return [of_rank[number] for number in range(prediction.job.strategy.pp)]


def seconds_of_stages(job: Job, rank: RankPrediction, stages: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """A rank's forward, input-gradient and weight-gradient seconds, divided over its stages.

    In proportion to the computation of each stage: its layers, its head, its call. Exposed communication is known only
    for the whole rank and is divided in the same way.
    """
    whole = rank.passes.passes
    if len(stages) == 1:
        return [whole]
    layers = built_layers(job)
    alone = [part_seconds(tuned_over(job, layers[stage]), stage_contents(job, stage)) for stage in stages]
    call = job.cluster.device.efficiency.stage_call_seconds
    columns = zip(*((passes.forward + call, passes.input_gradient + call, passes.weight_gradient) for passes in alone))
    parts = []
    for seconds, column in zip(whole, columns):
        total = sum(column)
        parts.append([seconds * weight / total if total else seconds / len(column) for weight in column])
    return list(zip(*parts))


# -- The parts of a predicted step, which add up to it

COMPUTE = ("products", "attention", "memory-bound", "launches")
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp", "offload")
_KINDS: dict[str, OperatorKind] = {"products": "product", "attention": "attention", "memory-bound": "traffic"}
STEP_PARTS = (
    *COMPUTE,
    "recompute",
    "tp",
    "cp",
    "ep",
    "bubble",
    "pp",
    "dp",
    "offload",
    "optimizer",
    "overhead",
    "stragglers",
)


def step_parts(step: SimulatedStep) -> dict[str, float]:
    """Seconds of each of ``STEP_PARTS``.

    Time per microbatch is that of the busiest pipeline rank, time once per step that of the rank that takes longest for
    it. ``pp`` is what the pipeline would save if messages took no time.
    """
    prediction, last = step.prediction, step.prediction.last
    stages = busiest_stages(prediction)
    computed = [_compute(stage) for stage in stages]
    parts = {name: sum(seconds[name] for seconds in computed) / len(computed) for name in computed[0]}
    parts |= {name: sum(traffic.added_seconds for traffic in traffics_of(step, name)) for name in COMMUNICATION}
    work = prediction.microbatches * sum(stage.microbatch_seconds for stage in stages) / len(stages)
    overhead = step_overhead(last.job)
    update = float(optimizer_seconds(last.job, last.contents, sharding_of(last.job.strategy)))
    parts["bubble"] = _beyond_rounding(step.pipeline_seconds - work - step.message_seconds, step.pipeline_seconds)
    parts |= {"optimizer": update - overhead, "overhead": overhead}
    parts["stragglers"] = prediction.straggler_seconds(last)
    return {name: parts[name] for name in STEP_PARTS}


def busiest_stages(prediction: Prediction) -> tuple[RankPrediction, ...]:
    """The slowest stage; for DualPipe the two stages of the busiest rank, each for half of the microbatches."""
    if not prediction.job.strategy.schedule_record.two_copies or prediction.job.strategy.pp == 1:
        return (prediction.slowest,)
    stages = rank_predictions(prediction)
    pairs = list(zip(stages, reversed(stages)))[: (len(stages) + 1) // 2]
    return max(pairs, key=lambda pair: sum(stage.microbatch_seconds for stage in pair))


def _compute(stage: RankPrediction) -> dict[str, float]:
    """Seconds of a stage's operators by kind, of their launches, and of what is recomputed."""
    m, compute = stage.microbatches, stage.compute
    alone = seconds_by_kind(_launched_at_once(stage.job), stage.contents)
    parts = {name: m * alone[kind] for name, kind in _KINDS.items()}
    whole = m * (compute.forward + compute.backward - compute.recomputed)
    launches = _beyond_rounding(whole - sum(parts.values()), whole)
    return {**parts, "launches": launches, "recompute": m * compute.recomputed}


def _beyond_rounding(difference: float, of: float) -> float:
    """``difference``, or 0 if it is no more than the rounding error of ``of``."""
    return difference if abs(difference) > 1e-9 * of else 0.0


def _launched_at_once(job: Job) -> Job:
    """The job on a device where starting a kernel takes no time."""
    cluster, device = job.cluster, job.cluster.device
    own = device.efficiency.own and device.efficiency.own.unchecked(host_seconds={})
    efficiency = device.efficiency.unchecked(operator_seconds=0.0, host_seconds={}, own=own)
    return job.unchecked(cluster=cluster.unchecked(device=device.unchecked(efficiency=efficiency)))


def traffics_of(step: SimulatedStep, dimension: str) -> tuple[Traffic, ...]:
    """The traffic of a dimension on the rank that sets its pace, with its exposed time in the predicted step."""
    once = [traffic for traffic in step.prediction.last.traffics if traffic.dimension == dimension]
    if dimension not in (*IN_LAYER, "pp"):
        return tuple(once)
    own = _of_stages(busiest_stages(step.prediction), dimension)
    messages = [traffic for traffic in own if traffic.fixed_exposed_seconds is not None]
    if messages:
        each = step.message_seconds / len(messages)
        own = [replace(traffic, exposed_seconds=each) if traffic in messages else traffic for traffic in own]
    return (*own, *(traffic for traffic in once if traffic.once))


def _of_stages(stages: Sequence[RankPrediction], dimension: str) -> list[Traffic]:
    """Traffic of layers and messages of a dimension; a rank with several stages has the mean of theirs."""
    by_payload: dict[Payload, list[Traffic]] = {}
    for stage in stages:
        for traffic in stage.traffics:
            if traffic.dimension == dimension and not traffic.once:
                by_payload.setdefault(traffic.payload, []).append(traffic)
    return [_shared(members, len(stages)) for members in by_payload.values()]


def _shared(members: Sequence[Traffic], stages: int) -> Traffic:
    if stages == 1:
        return members[0]
    names = ("count", "exposed_seconds", "under_compute_seconds")
    return replace(members[0], **{name: sum(getattr(traffic, name) for traffic in members) / stages for name in names})


def grouped(parts: Mapping[str, float], groups: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """The same seconds in fewer parts: those in each of ``groups`` are added up."""
    return {name: sum(parts[part] for part in members) for name, members in groups.items()}
