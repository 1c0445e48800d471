"""A strategy priced by the simulator, with the figures that reports need."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from shardwise.cost.memory.device import DeviceMemory, peak_memory
from shardwise.cost.step.parts import COMPUTE, grouped, step_parts
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import SimulatedStep, simulated_step
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

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
