"""What bounds a job, in a sentence, and which single change would make its predicted step shorter, or make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.cost.analysis import Analysis, analyze
from shardwise.cost.memory.device import DeviceMemory, peak_memory
from shardwise.cost.memory.room import fit_of
from shardwise.cost.prediction import predict
from shardwise.cost.step_parts import COMMUNICATION, grouped
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_bytes, readable_seconds

EXPOSED_LIMIT = 0.30
WORTH_A_CHANGE = 0.01  # of the predicted step
_GROUPS = {
    "arithmetic": ("products", "attention", "recompute"),
    "memory-bound operators": ("memory-bound",),
    "kernel launches and the fixed cost of a step": ("launches", "overhead"),
    "the optimizer": ("optimizer",),
    "bubble": ("bubble",),
    **{name: (name,) for name in COMMUNICATION},
}
_DIMENSION_WORDS = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "pp": "pipeline",
    "dp": "data-parallel",
    "offload": "offload",
}


def bottleneck(analysis: Analysis) -> str:
    """One sentence that names what bounds the job: memory, or the largest part of the predicted step."""
    if analysis.fit == "does not fit":
        return _memory_sentence(analysis)
    parts, whole = grouped(analysis.parts, _GROUPS), analysis.predicted_seconds
    first, second = sorted(parts, key=lambda part: -parts[part])[:2]
    sentence = (
        f"Bound by {_cause(analysis, first)}: {readable_seconds(parts[first])} or {parts[first] / whole:.0%} "
        "of the predicted step"
    )
    if parts[second] < WORTH_A_CHANGE * whole:
        return sentence + "."
    return f"{sentence}; next is {_cause(analysis, second)} with {parts[second] / whole:.0%}."


def _cause(analysis: Analysis, part: str) -> str:
    if part == "bubble":
        strategy = analysis.job.strategy
        return f"the pipeline bubble ({strategy.pp} stages, {analysis.job.microbatches} microbatches)"
    if part not in COMMUNICATION:
        return part
    worst = max(analysis.dimension_traffics(part), key=lambda traffic: traffic.added_seconds, default=None)
    if worst is None:
        return f"{_DIMENSION_WORDS[part]} communication"
    level = max(worst.cost.levels, key=lambda level: level.latency_seconds + level.bandwidth_seconds, default=None)
    over = f" over {level.level_name}" if level is not None else ""
    return f"{_DIMENSION_WORDS[part]} communication{over} ({worst.what})"


def _memory_sentence(analysis: Analysis) -> str:
    memory, room = analysis.memory, analysis.room
    if memory.total <= room.usable_bytes:
        nodes = analysis.job.cluster.node_devices
        needed, there = readable_bytes(analysis.host_bytes), readable_bytes(room.host_bytes * nodes)
        return f"Does not fit: offload needs {needed} of host memory per node, which has {there}."
    largest = max(memory.PARTS, key=lambda part: getattr(memory, part))
    rank = f" on pipeline rank {memory.pipeline_rank}" if analysis.job.strategy.pp > 1 else ""
    needed, usable = readable_bytes(memory.total), readable_bytes(room.usable_bytes)
    part = readable_bytes(getattr(memory, largest))
    return f"Does not fit: a device{rank} needs {needed} of {usable}; the largest part is {largest} ({part})."


@dataclass(frozen=True)
class Change:
    """One change of the strategy, priced: the job with it takes ``predicted_seconds`` a step and fits."""

    what: str
    job: Job
    predicted_seconds: float
    exposed_share: float
    memory: DeviceMemory

    @property
    def seconds_per_token(self) -> float:
        return self.predicted_seconds / self.job.tokens_per_step


def best_change(analysis: Analysis) -> Change | None:
    """The single change that shortens the predicted step most, by what is worth a word; it fits as well as the job."""
    allowed = ("fits",) if analysis.fit == "fits" else ("fits", "tight")
    found = _quickest(analysis.job, allowed)
    limit = (1 - WORTH_A_CHANGE) * analysis.predicted_seconds / analysis.job.tokens_per_step
    return found if found is not None and found.seconds_per_token < limit else None


def fitting_change(job: Job) -> Change | None:
    """The single change with which a job that does not fit does, with room to spare; of several the quickest."""
    return _quickest(job, ("fits",))


def _quickest(job: Job, allowed: tuple[str, ...]) -> Change | None:
    """What is advised is not only priced: a change adds nothing that the engine does not run to what the job has."""
    found = []
    for what, other in neighbours(job):
        try:
            if _as_runnable(job, other) and fit_of(other) in allowed:
                found.append((predict(other).step_seconds / other.tokens_per_step, what, other))
        except SpecError:  # a group would cut across the network
            continue
    if not found:
        return None
    _, what, best = min(found, key=lambda one: one[0])
    priced = analyze(best)
    return Change(what, best, priced.predicted_seconds, priced.exposed_share, peak_memory(best))


def _as_runnable(job: Job, other: Job) -> bool:
    """Whether our engine runs ``other`` where it runs ``job``, and lacks no more for it; what others lack is theirs."""
    now, then = verdict(job), verdict(other)
    lacked = {one.techniques for one in now.findings}
    return now.status == then.status and not (
        job.stack.is_own and any(f.techniques not in lacked for f in then.findings)
    )


def neighbours(job: Job) -> Iterator[tuple[str, Job]]:
    """Strategies one change away on the same devices with the same batch; those that cannot be built are skipped."""
    for what, changes in _changes(job):
        try:
            yield what, replace(job, strategy=replace(job.strategy, **changes))  # type: ignore[arg-type]
        except SpecError:
            continue


def _changes(job: Job) -> Iterator[tuple[str, dict[str, object]]]:
    strategy = job.strategy
    dp = strategy.data_parallel
    for name in ("tp", "cp", "pp"):
        degree = strategy.degree(name)
        if degree % 2 == 0:
            yield f"halve {name} to {degree // 2} and double dp to {dp * 2}", {name: degree // 2, "dp": dp * 2}
        if dp % 2 == 0:
            yield f"double {name} to {degree * 2} and halve dp to {dp // 2}", {name: degree * 2, "dp": dp // 2}
    yield f"double the microbatch to {strategy.microbatch * 2}", {"microbatch": strategy.microbatch * 2}
    if strategy.microbatch % 2 == 0:
        yield f"halve the microbatch to {strategy.microbatch // 2}", {"microbatch": strategy.microbatch // 2}
    for recompute in ("none", "selective", "full"):
        if recompute != strategy.recompute:
            what = "recompute nothing" if recompute == "none" else f"use {recompute} recompute"
            yield what, {"recompute": recompute, "recompute_layers": None}
    for name in ("tp", "dp", "cp", "ep", "pp", "offload"):
        if not getattr(strategy.overlap, name):
            yield f"overlap {name} communication", {"overlap": replace(strategy.overlap, **{name: True})}
    yield from _sharding_changes(job)
    if strategy.ep > 1:
        yield f"halve ep to {strategy.ep // 2}", {"ep": strategy.ep // 2}
        if strategy.dispatch == "all-to-all":
            yield "send each token once per node (dispatch: deduplicated)", {"dispatch": "deduplicated"}
    # The memory of a CPU is the host's own.
    if strategy.offload == Offload() and job.cluster.host_link is not None and job.run_device != "cpu":
        yield "offload the optimizer", {"offload": Offload(optimizer=1.0)}


def _sharding_changes(job: Job) -> Iterator[tuple[str, dict[str, object]]]:
    strategy = job.strategy
    for zero in range(4):
        if zero != strategy.zero:
            yield f"{'raise' if zero > strategy.zero else 'lower'} zero to {zero}", {"zero": zero}
    if strategy.zero == 3:
        yield "keep gathered parameters between microbatches", {"keep_parameters": True}
    if strategy.zero >= 2:
        yield "accumulate gradients locally", {"accumulate": "local"}
        node = job.cluster.node_devices // strategy.tp
        if node > 1 and strategy.shard_group is None:
            yield f"shard inside a node (shard_group {node})", {"shard_group": node}
