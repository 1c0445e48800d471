"""One job, priced: the figures behind `shardwise analyze`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.collectives.cost import check_algorithm
from shardwise.cost.compute.flops import flops_per_token
from shardwise.cost.memory.device import DeviceMemory, device_memories
from shardwise.cost.memory.room import Fit, Room, fit_probability, room_of, tightest
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import COMMUNICATION, SimulatedStep, simulated_step, step_parts, traffics_of
from shardwise.cost.traffic.traffic import Traffic
from shardwise.spec.efficiency import Efficiency
from shardwise.spec.job import Job
from shardwise.spec.parameters import active_parameter_count, parameter_count, trained_parameters
from shardwise.spec.rules import sequence_note

_MOST_PASSES = 10_000  # of schedules that are slow to build: half a second


@dataclass(frozen=True)
class Analysis:
    """What a job costs.

    There are two times of a step. ``predicted_seconds`` is what a run should take: every part, share, rate and
    utilisation here is of it. ``floor_seconds`` is what no software can beat with this layout on this network:
    arithmetic at the device's peak, communication as priced, nothing else.
    """

    job: Job
    step: SimulatedStep
    memories: tuple[DeviceMemory, ...]

    # -- time ----------------------------------------------------------------------------------------

    @property
    def predicted_seconds(self) -> float:
        return self.step.step_seconds

    @property
    def floor_seconds(self) -> float:
        return self.step.floor_seconds

    @cached_property
    def parts(self) -> dict[str, float]:
        """Where the predicted seconds go (`STEP_PARTS`); they add up to ``predicted_seconds``."""
        return step_parts(self.step)

    @property
    def exposed_seconds(self) -> float:
        """Communication that the predicted step waits for."""
        return sum(self.parts[name] for name in COMMUNICATION)

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.predicted_seconds

    def dimension_traffics(self, dimension: str) -> tuple[Traffic, ...]:
        """What a dimension sends on the rank that sets its pace."""
        return traffics_of(self.step, dimension)

    def dimension_rank(self, dimension: str) -> int:
        """The pipeline rank that ``dimension_traffics`` are of."""
        prediction = self.step.prediction
        return (prediction.last if dimension in ("dp", "offload") else prediction.slowest).contents.rank

    def exposed_by_dimension(self) -> dict[str, float]:
        return {name: self.parts[name] for name in COMMUNICATION if self.dimension_traffics(name)}

    def level_use(self, dimension: str) -> dict[str, tuple[float, float]]:
        """Of each network level: the seconds that its busiest link moves bytes of a dimension in a step, and the bytes.

        Latencies are left out; levels may be busy at the same time.
        """
        by_level: dict[str, tuple[float, float]] = {}
        for traffic in self.dimension_traffics(dimension):
            for level in traffic.cost.levels:
                seconds, size = by_level.get(level.level_name, (0.0, 0.0))
                seconds += traffic.count * float(level.bandwidth_seconds)
                by_level[level.level_name] = seconds, size + traffic.count * float(level.bytes)
        return {name: both for name, both in by_level.items() if both[1]}

    @property
    def tokens_per_second(self) -> float:
        return self.step.tokens_per_second

    # -- arithmetic ----------------------------------------------------------------------------------

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of the whole cluster in the format of the matmuls."""
        return self.job.peak_flops

    def flops_per_token(self, convention: str = "causal") -> float:
        return flops_per_token(self.job.model, self.job.training.seq, convention, self.job.training.tuning)

    def flops_per_step(self, convention: str = "causal") -> float:
        return self.flops_per_token(convention) * self.job.tokens_per_step

    @property
    def mfu(self) -> float:
        """Predicted model FLOPs utilisation, causal attention counted once (recomputed FLOPs not counted)."""
        return self.step.mfu

    @property
    def mfu_ceiling(self) -> float:
        """Model FLOPs utilisation if the step took no longer than its floor."""
        return self.flops_per_step() / (self.floor_seconds * self.peak_flops)

    @property
    def parameters(self) -> int:
        """Parameters of the model as published: without multi-token-prediction modules."""
        return parameter_count(self.job.model)

    @property
    def trained_parameters(self) -> int:
        """Every parameter that is trained and saved, prediction modules and adapters included."""
        return trained_parameters(self.job.model, self.job.training.tuning)

    @property
    def active_parameters(self) -> int:
        return active_parameter_count(self.job.model)

    # -- memory --------------------------------------------------------------------------------------

    @property
    def memory(self) -> DeviceMemory:
        """The fullest device."""
        return self._tightest[1]

    @cached_property
    def _tightest(self) -> tuple[Job, DeviceMemory]:
        return tightest(self.job, self.memories)

    @cached_property
    def room(self) -> Room:
        """Of the fullest device."""
        return room_of(self._tightest[0])

    @property
    def fit(self) -> Fit:
        """Whether the fullest device fits, may fit without the margin that plans keep ("tight"), or does not fit."""
        return self.room.fit(self.memory)

    @property
    def fit_probability(self) -> float:
        """How likely the fullest device does not run out of memory."""
        return fit_probability(self._tightest[0], self.memory.total)

    @property
    def fits(self) -> bool:
        """Whether the job may fit, even if tightly."""
        return self.fit != "does not fit"

    @property
    def host_bytes(self) -> float:
        """What offload keeps outside the devices of one node."""
        return max(memory.host for memory in self.memories) * self.job.cluster.node_devices

    @property
    def notes(self) -> tuple[str, ...]:
        """What was rounded or assumed."""
        rounded = self.job.training.batch_note(self.job.strategy.batch_multiple)
        device = self.job.cluster.device
        generic = device.efficiency.source == Efficiency().source
        assumed = f"no measurement of {device.name}: its step is predicted with generic efficiencies" if generic else ""
        longer = sequence_note(self.job.model, self.job.training)
        of_job = (_experts_note(self.job), lengths_note(self.job))
        return tuple(note for note in (rounded, assumed, longer, *of_job) if note)


def _experts_note(job: Job) -> str:
    recipe, wide = job.training.recipe, job.stack.for_experts(job.training.recipe).compute
    if job.model.moe is None or wide == recipe.compute:
        return ""
    return f"{job.stack.name} multiplies routed experts in {wide}, not in {recipe.compute}"


def lengths_note(job: Job) -> str:
    """How much of a step is padding or cut off, and what packing gains."""
    lengths, seq, microbatch = job.training.lengths, job.training.seq, job.strategy.microbatch
    if lengths is None:
        return ""
    cut = lengths.cut_share(seq)
    ends = f"; {cut:.1%} of all tokens are beyond {seq:,} and cut off" if cut >= 0.0005 else ""
    if lengths.labels < 1:
        ends += f"; {lengths.labels:.0%} of the tokens count for the loss"
    if lengths.packing == "packed":
        return f"{1 - lengths.packed_share(seq):.1%} of packed sequences is padding{ends}"
    used, packed = lengths.used_share(seq, microbatch), lengths.packed_share(seq)
    saved = f"packing would train the same documents with {used / packed:.0%} of the tokens" if used < packed else ""
    return f"{1 - used:.0%} of the tokens are padding" + (f", {saved}" if saved else "") + ends


def analyze(job: Job) -> Analysis:
    """Prices one job."""
    check_algorithm(job.strategy.collective, "strategy.collective")
    return Analysis(job, simulated_step(predict(job), most_passes=_MOST_PASSES), device_memories(job))
