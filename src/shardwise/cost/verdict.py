"""What bounds a job, in a sentence, and which single change would expose less communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.cost.analysis import Analysis, analyze
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_seconds

EXPOSED_LIMIT = 0.30
_DIMENSION_WORDS = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "pp": "pipeline",
    "dp": "data-parallel",
    "offload": "offload",
}
_PART_REMEDIES = {
    "weights": "raise tp or pp, or use zero 3",
    "gradients": "use zero 2, or raise tp or pp",
    "optimizer": "use zero 1, or offload the optimizer",
    "activations": "recompute (selective or full), raise tp or cp, or lower the microbatch",
    "recomputed": "raise tp or cp, or lower the microbatch",
    "gathered": "raise tp",
    "communication": "raise tp or cp, or lower the microbatch",
    "temporary": "raise tp, or lower the microbatch",
    "allowance": "use a device with more memory",
}


def bottleneck(analysis: Analysis) -> str:
    """One sentence that names what bounds the job."""
    if not analysis.fits:
        return _memory_sentence(analysis)
    parts = {
        "compute": analysis.compute_seconds,
        "bubble": analysis.bubble_seconds,
        **analysis.exposed_by_dimension(),
    }
    name = max(parts, key=lambda part: parts[part])
    share = parts[name] / analysis.step_seconds
    if name == "compute":
        others = {part: seconds for part, seconds in parts.items() if part != "compute" and seconds > 0}
        if not others:
            return f"Bound by compute: {share:.0%} of the step even at the device's peak."
        second = max(others, key=lambda part: others[part])
        return (
            f"Bound by compute: {share:.0%} of the step even at the device's peak; next is {_cause(analysis, second)} "
            f"with {others[second] / analysis.step_seconds:.0%}."
        )
    return f"Bound by {_cause(analysis, name)}: {readable_seconds(parts[name])} or {share:.0%} of the step."


def _cause(analysis: Analysis, part: str) -> str:
    if part == "bubble":
        strategy = analysis.job.strategy
        return f"the pipeline bubble ({strategy.pp} stages, {analysis.job.microbatches} microbatches)"
    worst = max(analysis.dimension_traffics(part), key=lambda traffic: traffic.exposed_seconds)
    level = max(worst.cost.levels, key=lambda level: level.latency_seconds + level.bandwidth_seconds, default=None)
    over = f" over {level.level_name}" if level is not None else ""
    return f"{_DIMENSION_WORDS[part]} communication{over} ({worst.what})"


def _memory_sentence(analysis: Analysis) -> str:
    memory = analysis.memory
    largest = max(memory.PARTS, key=lambda part: getattr(memory, part))
    rank = f" on pipeline rank {memory.pipeline_rank}" if analysis.job.strategy.pp > 1 else ""
    needed, capacity = readable_bytes(memory.total), readable_bytes(analysis.capacity_bytes)
    return (
        f"Does not fit: a device{rank} needs {needed} of {capacity}; "
        f"the largest part is {largest} ({readable_bytes(getattr(memory, largest))}): {_PART_REMEDIES[largest]}."
    )


@dataclass(frozen=True)
class Change:
    """A change of the strategy and what it does to the exposed share."""

    what: str
    exposed_share: float
    step_seconds: float
    fits: bool


def best_change(analysis: Analysis) -> Change | None:
    """The single change that lowers the exposed share most, without a longer step or more than the memory."""
    found: Change | None = None
    for what, job in _alternatives(analysis.job):
        try:
            other = analyze(job)
        except SpecError:
            continue
        if (analysis.fits and not other.fits) or other.exposed_share >= analysis.exposed_share:
            continue
        # Hiding communication behind a longer step would be no gain.
        if other.step_seconds / other.job.tokens_per_step > analysis.step_seconds / analysis.job.tokens_per_step:
            continue
        if found is None or other.exposed_share < found.exposed_share:
            found = Change(what, other.exposed_share, other.step_seconds, other.fits)
    return found


def _alternatives(job: Job) -> Iterator[tuple[str, Job]]:
    """Neighbouring strategies on the same devices with the same batch; those that cannot be built are skipped."""
    strategy = job.strategy
    dp = strategy.data_parallel

    def changed(what: str, **changes: object) -> Iterator[tuple[str, Job]]:
        try:
            yield what, replace(job, strategy=replace(strategy, **changes))  # type: ignore[arg-type]
        except SpecError:
            return

    for name in ("tp", "cp", "pp"):
        degree = strategy.degree(name)
        if degree % 2 == 0:
            yield from changed(
                f"halve {name} to {degree // 2} and double dp to {dp * 2}",
                **{name: degree // 2, "dp": dp * 2},
            )
        if dp % 2 == 0:
            yield from changed(
                f"double {name} to {degree * 2} and halve dp to {dp // 2}",
                **{name: degree * 2, "dp": dp // 2},
            )
    yield from changed(f"double the microbatch to {strategy.microbatch * 2}", microbatch=strategy.microbatch * 2)
    for name in ("tp", "dp", "cp", "ep", "pp", "offload"):
        if not getattr(strategy.overlap, name):
            yield from changed(f"overlap {name} communication", overlap=replace(strategy.overlap, **{name: True}))
    if strategy.zero == 3:
        yield from changed("keep gathered parameters between microbatches", keep_parameters=True)
    if strategy.zero >= 2:
        yield from changed(f"lower zero to {strategy.zero - 1}", zero=strategy.zero - 1)
        yield from changed("accumulate gradients locally", accumulate="local")
        node = job.cluster.node_devices // strategy.tp
        if node > 1 and strategy.shard_group is None:
            yield from changed(f"shard inside a node (shard_group {node})", shard_group=node)
    if strategy.ep > 1:
        yield from changed(f"halve ep to {strategy.ep // 2}", ep=strategy.ep // 2)
        if strategy.dispatch == "all-to-all":
            yield from changed("send each token once per node (dispatch: deduplicated)", dispatch="deduplicated")
