"""One job, priced: the figures behind `shardwise analyze`."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.collectives.cost import check_algorithm
from shardwise.cost.communication import step_traffic
from shardwise.cost.communication.pipeline import waiting_for_links
from shardwise.cost.compute import StageCompute, at_peak, bubble_seconds, stage_compute
from shardwise.cost.flops import flops_per_token
from shardwise.cost.memory import DeviceMemory, device_memories
from shardwise.cost.stages import RankContents, pipeline_ranks_to_price, rank_kinds
from shardwise.cost.traffic import Traffic, with_exposed_seconds
from shardwise.spec.job import Job
from shardwise.spec.parameters import active_parameter_count, parameter_count
from shardwise.spec.units import readable_bytes

DIMENSIONS = ("tp", "cp", "ep", "pp", "dp", "offload")


@dataclass(frozen=True)
class Analysis:
    """What a job costs. Times are floors: arithmetic at the device's peak, communication as priced.

    ``contents`` is the pipeline rank whose step is longest; ``traffics`` and ``compute`` are its own.
    """

    job: Job
    contents: RankContents
    compute: StageCompute
    traffics: tuple[Traffic, ...]
    memories: tuple[DeviceMemory, ...]
    bubble_seconds: float

    # -- time ----------------------------------------------------------------------------------------

    @property
    def compute_seconds(self) -> float:
        return self.job.microbatches * (self.compute.forward + self.compute.backward)

    @property
    def exposed_seconds(self) -> float:
        return sum(traffic.exposed_seconds for traffic in self.traffics)

    @property
    def step_seconds(self) -> float:
        """A floor under the step time: arithmetic at peak, pipeline bubble, exposed communication."""
        return self.compute_seconds + self.bubble_seconds + self.exposed_seconds

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.step_seconds

    def dimension_traffics(self, dimension: str) -> tuple[Traffic, ...]:
        return tuple(traffic for traffic in self.traffics if traffic.dimension == dimension)

    def exposed_by_dimension(self) -> dict[str, float]:
        present = [name for name in DIMENSIONS if self.dimension_traffics(name)]
        return {name: sum(t.exposed_seconds for t in self.dimension_traffics(name)) for name in present}

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens_per_step / self.step_seconds

    # -- arithmetic ----------------------------------------------------------------------------------

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of the whole cluster in the format of the matrix products."""
        return self.job.cluster.devices * self.job.cluster.device.peak_flops(self.job.training.recipe.compute)

    def flops_per_step(self, convention: str = "causal") -> float:
        return flops_per_token(self.job.model, self.job.training.seq, convention) * self.job.tokens_per_step

    @property
    def mfu_ceiling(self) -> float:
        """Model FLOPs utilisation if the step took no longer than its floor (recomputed FLOPs not counted)."""
        return self.flops_per_step() / (self.step_seconds * self.peak_flops)

    @property
    def parameters(self) -> int:
        """Parameters of the model as published: without multi-token-prediction modules."""
        return parameter_count(self.job.model)

    @property
    def trained_parameters(self) -> int:
        """Every parameter that is trained and saved, prediction modules included."""
        return parameter_count(self.job.model, with_prediction_modules=True)

    @property
    def active_parameters(self) -> int:
        return active_parameter_count(self.job.model)

    # -- memory --------------------------------------------------------------------------------------

    @property
    def memory(self) -> DeviceMemory:
        """The fullest device."""
        return max(self.memories, key=lambda memory: memory.total)

    @property
    def capacity_bytes(self) -> float:
        return self.job.cluster.device.memory

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity_bytes

    @property
    def host_bytes(self) -> float:
        """What offload keeps outside the devices of one node."""
        return max(memory.host for memory in self.memories) * self.job.cluster.node_devices

    @property
    def notes(self) -> tuple[str, ...]:
        """What was rounded or assumed."""
        note = self.job.training.batch_note(self.job.strategy.batch_multiple)
        host = self.job.cluster.host_memory
        over: tuple[str, ...] = ()
        if host is not None and self.job.strategy.offload.target == "cpu" and self.host_bytes > host:
            needed, there = readable_bytes(self.host_bytes), readable_bytes(host)
            over = (f"offload needs {needed} of host memory per node, {there} are there",)
        return (*((note,) if note else ()), *over)


def analyze(job: Job) -> Analysis:
    """Prices one job."""
    check_algorithm(job.strategy.collective, "strategy.collective")
    memories = device_memories(job)
    slowest: Analysis | None = None
    ideal = at_peak(job)
    for contents in rank_kinds(job, pipeline_ranks_to_price(job)):
        compute = stage_compute(job, contents)
        traffics = with_exposed_seconds(step_traffic(ideal, contents), compute.windows(job.microbatches))
        bubble = bubble_seconds(job, compute)
        silent = job.microbatches * (compute.forward + compute.backward) + bubble
        traffics = waiting_for_links(job, traffics, silent)
        analysis = Analysis(job, contents, compute, tuple(traffics), memories, bubble)
        if slowest is None or analysis.step_seconds > slowest.step_seconds:
            slowest = analysis
    assert slowest is not None
    return slowest
