"""The parts of a predicted step, which add up to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.cost.compute.operators import OperatorKind
from shardwise.cost.step.prediction import Prediction, RankPrediction
from shardwise.cost.step.simulation import SimulatedStep, rank_predictions
from shardwise.cost.step.stage_time import optimizer_seconds, seconds_by_kind, step_overhead
from shardwise.cost.traffic.traffic import IN_LAYER, Traffic
from shardwise.layout.payloads import Payload
from shardwise.layout.sharding import sharding_of
from shardwise.spec.job import Job

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
    efficiency = device.efficiency.unchecked(operator_seconds=0.0, own=own)
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
