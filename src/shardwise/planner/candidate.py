"""A strategy in words, and priced by the simulator with the figures that reports need."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from shardwise.cost.memory.device import DeviceMemory, peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import COMPUTE, SimulatedStep, grouped, simulated_step, step_parts
from shardwise.spec.job import Job
from shardwise.spec.strategy import DIMENSIONS, Offload, Overlap, Strategy
from shardwise.spec.units import readable_flops

# -- Strategies in words; those that behave differently have different words


def strategy_words(strategy: Strategy) -> str:
    """What a strategy sets: "tp 8 · pp 4 (interleaved 2) · dp 16 · ZeRO-1 · selective recompute"; no defaults."""
    words = []
    if strategy.tp > 1:
        words.append(degree_words(strategy, "tp") + ("" if strategy.sequence_parallel else " without SP"))
    if strategy.cp > 1:
        words.append(f"cp {strategy.cp} ({strategy.context_method})")
    if strategy.pp > 1:
        words.append(f"pp {strategy.pp} ({schedule_words(strategy)})")
    words.append(degree_words(strategy, "dp"))
    if strategy.ep > 1 or strategy.expert_tensor_parallel != strategy.tp:
        split = strategy.expert_tensor_parallel
        words.append(f"ep {strategy.ep}" + (f" × {split}" if split > 1 else ""))
    words += [sharding_words(strategy), f"microbatch {strategy.microbatch}"]
    words += [recompute_words(strategy), offload_words(strategy)]
    words += [*less_communication_words(strategy), *communication_words(strategy), order_words(strategy)]
    return " · ".join(word for word in words if word)


def change_words(before: Strategy, after: Strategy) -> str:
    """The change from ``before`` to ``after`` as advice: "halve tp to 4 and double dp to 32"."""
    for name in ("tp", "cp", "pp", "ep", "microbatch"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            scaled = _scaled("the microbatch" if name == "microbatch" else name, old, new)
            if name in ("ep", "microbatch"):
                return scaled
            return f"{scaled} and {_scaled('dp', before.data_parallel, after.data_parallel)}"
    for field in fields(Overlap):
        if getattr(before.overlap, field.name) != getattr(after.overlap, field.name):
            return f"overlap {field.name} communication"
    advice = {
        "recompute": "recompute nothing" if after.recompute == "none" else f"use {after.recompute} recompute",
        "zero": f"{'raise' if after.zero > before.zero else 'lower'} zero to {after.zero}",
        "shard_group": f"shard inside a node (shard_group {after.shard_group})",
        "keep_parameters": "keep gathered parameters between microbatches",
        "accumulate": "accumulate gradients locally",
        "dispatch": "send each token once per node (dispatch: deduplicated)",
        "offload": "offload the optimizer",
    }
    changed = (words for name, words in advice.items() if getattr(before, name) != getattr(after, name))
    return next(changed, strategy_words(after))  # any other change: the whole strategy


def _scaled(what: str, before: int, after: int) -> str:
    return f"{'halve' if after < before else 'double'} {what} to {after}"


def schedule_words(strategy: Strategy) -> str:
    """The schedule of a pipeline, with the layers of its stages if the strategy lists them: "zbv, layers 9-8×2-7"."""
    chunks = f" {strategy.interleave}" if strategy.schedule_record.chooses_chunks else ""
    layers = ""
    if isinstance(strategy.stage_layers, tuple):
        layers = f", layers {_in_turn(strategy.stage_layers)}"
    return f"{strategy.schedule}{chunks}{layers}"


def degree_words(strategy: Strategy, name: str) -> str:
    """The degree of a dimension: "tp 8"; per stage if stages differ: "tp 4-2×2"; with shares if replicas differ."""
    of_stages = {"tp": strategy.stage_tp, "dp": strategy.stage_dp}.get(name)
    shares = f" in shares {_in_turn(strategy.dp_shares)}" if name == "dp" and strategy.dp_shares is not None else ""
    return f"{name} {strategy.degree(name) if of_stages is None else _in_turn(of_stages)}{shares}"


def _in_turn(numbers: tuple[int, ...]) -> str:
    """The numbers with runs of equal ones written once: "9-8×2-7"."""
    runs = ((number, len(list(same))) for number, same in groupby(numbers))
    return "-".join(f"{number}×{times}" if times > 1 else str(number) for number, times in runs)


def less_communication_words(strategy: Strategy) -> list[str]:
    """How gradients are compressed and how often workers synchronise, if not the default."""
    sync, words = strategy.synchronise, []
    if strategy.compression.is_used:
        chosen = _unusual(strategy.compression, "method")
        words.append(f"{strategy.compression.method} gradients" + (f" ({', '.join(chosen)})" if chosen else ""))
    if not sync.every_step:
        times = sync.staleness if sync.is_async else sync.inner_steps
        chosen = _unusual(sync, "method", "staleness", "inner_steps")
        words.append(f"{sync.method} {times}" + (f" ({', '.join(chosen)})" if chosen else ""))
    return words


def communication_words(strategy: Strategy) -> list[str]:
    """How communication differs from the default."""
    words = []
    if strategy.ep > 1 and strategy.dispatch != "all-to-all":
        words.append(f"{strategy.dispatch} dispatch")
    usual = Overlap()
    changed = [
        field.name for field in fields(Overlap) if getattr(strategy.overlap, field.name) != getattr(usual, field.name)
    ]
    for hidden, word in ((True, "overlaps"), (False, "does not overlap")):
        names = [name for name in changed if getattr(strategy.overlap, name) is hidden and _has(strategy, name)]
        words += [f"{word} {', '.join(names)}"] if names else []
    if strategy.collective != "auto":
        words.append(f"by {strategy.collective}")
    if strategy.bucket is not None:
        words.append(f"buckets of {strategy.bucket:g} bytes")
    return words


def _has(strategy: Strategy, name: str) -> bool:
    """Whether a dimension communicates at all."""
    if name == "offload":
        return strategy.offload.any
    return (strategy.gradient_group if name == "dp" else int(getattr(strategy, name))) > 1


def sharding_words(strategy: Strategy) -> str:
    if not strategy.zero:
        return ""
    words = f"ZeRO-{strategy.zero}"
    if strategy.keep_parameters and strategy.zero == 3:
        words += " kept"
    if strategy.accumulate == "local" and strategy.zero > 1:
        words += " local"
    return words + (f" over {strategy.shard_group}" if strategy.shard_group else "")


def recompute_words(strategy: Strategy) -> str:
    if strategy.recompute == "none":
        return ""
    named = strategy.recompute == "selective" and strategy.recompute_operators != ("attention",)
    operators = f" of {', '.join(strategy.recompute_operators)}" if named else ""
    layers = "" if strategy.recompute_layers is None else f" of {strategy.recompute_layers} layers per rank"
    return f"{strategy.recompute} recompute{operators}{layers}"


def offload_words(strategy: Strategy) -> str:
    """What is kept outside the device: "offload optimizer", or shares of it: "offload optimizer 0.5"."""
    offload = strategy.offload
    if not offload.any:
        return ""
    from shardwise.planner.constraints import offload_name  # pricing a job without offload does not import it

    name = offload_name(offload)
    if name == "own":
        kinds = ("optimizer", "gradients", "weights", "activations")
        name = ", ".join(f"{kind} {getattr(offload, kind):g}" for kind in kinds if getattr(offload, kind))
    return f"offload {name}" + ("" if offload.target == Offload().target else f" to {offload.target}")


def order_words(strategy: Strategy) -> str:
    """The rank order of the dimensions in use, if it is not the default."""
    used = [name for name in strategy.order if strategy.degree(name) > 1]
    usual = [name for name in DIMENSIONS if strategy.degree(name) > 1]
    return "" if used == usual else "-".join(strategy.order)


def _unusual(spec: Any, *mentioned: str) -> list[str]:
    """Fields of a part of the strategy that differ from their defaults, except those already ``mentioned``."""
    usual = type(spec)()
    names = (field.name for field in fields(spec) if field.name not in mentioned)
    return [f"{name} {getattr(spec, name)}" for name in names if getattr(spec, name) != getattr(usual, name)]


def peak_words(job: Job) -> str:
    """The peak that utilisation is measured against, which is that of the data type of the matmuls."""
    data_type = job.training.recipe.compute
    return f"the {data_type} peak, {readable_flops(job.cluster.device.peak_flops(data_type))}/s a device"


# -- A strategy priced by the simulator, with the figures that reports need

_GROUPS = {
    "compute": COMPUTE,
    "recompute": ("recompute",),
    **{name: (name,) for name in ("tp", "cp", "ep")},
    "bubble": ("bubble", "pp"),
    **{name: (name,) for name in ("dp", "offload")},
    "optimizer": ("optimizer", "overhead"),
    "stragglers": ("stragglers",),
}
PARTS = tuple(_GROUPS)
Degrees = tuple[int, int, int, int, int]


class Candidate(SimulatedStep):
    """A simulated step of a job, beside those of other strategies."""

    def loss_to(self, other: Candidate) -> float:
        """The extra time per token compared with ``other``, as a share."""
        return self.seconds_per_token / other.seconds_per_token - 1

    @property
    def seconds_per_token(self) -> float:
        return self.step_seconds / self.job.tokens_per_step

    @cached_property
    def memory(self) -> DeviceMemory:
        return peak_memory(self.job)

    @property
    def margin_bytes(self) -> float:
        """Usable device memory that is left free."""
        return self.job.cluster.device.usable_memory - self.memory.total

    @property
    def degrees(self) -> Degrees:
        return degrees_of(self.job.strategy)

    @property
    def dimensions(self) -> tuple[str, ...]:
        return dimensions_used(self.degrees)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Where the seconds of the step go; they add up to it."""
        return grouped(step_parts(self), _GROUPS)

    @property
    def shares(self) -> dict[str, float]:
        return {name: seconds / self.step_seconds for name, seconds in self.parts.items()}

    @property
    def bubble_share(self) -> float:
        return max(0.0, self.shares["bubble"])

    @property
    def exposed_share(self) -> float:
        """The share of the step that waits for communication other than pipeline messages."""
        return sum(self.parts[name] for name in ("tp", "cp", "ep", "dp", "offload")) / self.step_seconds


def candidate(job: Job) -> Candidate:
    return Candidate(**vars(simulated_step(predict(job))))


def job_with(job: Job, strategy: Strategy, sequences: int) -> Job:
    """The job with ``strategy`` and a batch of ``sequences``; a batch written otherwise stays as written if equal."""
    training = job.training
    if training.global_batch is None or training.sequences(strategy.batch_multiple) != sequences:
        training = replace(training, global_batch=sequences)
    return replace(job, strategy=strategy, training=training)


def degrees_of(strategy: Strategy) -> Degrees:
    """tp, cp, pp, dp, ep: what tells layouts apart."""
    return strategy.tp, strategy.cp, strategy.pp, strategy.data_parallel, strategy.ep


def dimensions_used(degrees: Degrees) -> tuple[str, ...]:
    """Names of the dimensions beside data parallelism that ``degrees`` use."""
    tp, cp, pp, _, ep = degrees
    return tuple(name for name, degree in (("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep)) if degree > 1)


def complexity(strategy: Strategy) -> int:
    """How complicated a strategy is: points for each dimension in use and each unusual setting."""
    return (
        3 * len(dimensions_used(degrees_of(strategy)))
        + strategy.schedule_record.complexity * (strategy.pp > 1)
        + isinstance(strategy.stage_layers, tuple)
        + (strategy.zero > 1)
        + (strategy.shard_group is not None)
        + strategy.keep_parameters
        + (strategy.accumulate == "local" and strategy.zero > 1)
        + 3 * strategy.offload.any
        + (strategy.recompute != "none")
        + (strategy.recompute_layers is not None)
        + (strategy.order[-1] != "pp" and strategy.pp > 1)
        + (not strategy.sequence_parallel and strategy.tp > 1)
    )
