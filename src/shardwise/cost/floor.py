"""A floor under the step time: arithmetic at the device's peak, communication as priced, the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.communication import step_traffic
from shardwise.cost.communication.pipeline import waiting_for_links
from shardwise.cost.compute import StageCompute, at_peak, bubble_seconds, stage_compute
from shardwise.cost.traffic import Traffic, with_exposed_seconds
from shardwise.layout.stages import RankContents, pipeline_ranks_to_price, rank_kinds
from shardwise.spec.job import Job


@dataclass(frozen=True)
class Floor:
    """The pipeline rank whose step is longest even so: what no software beats with this layout on this network."""

    job: Job
    contents: RankContents
    compute: StageCompute
    traffics: tuple[Traffic, ...]
    bubble_seconds: float

    @property
    def compute_seconds(self) -> float:
        return self.job.microbatches * (self.compute.forward + self.compute.backward)

    @property
    def exposed_seconds(self) -> float:
        return sum(traffic.exposed_seconds for traffic in self.traffics)

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.bubble_seconds + self.exposed_seconds


def step_floor(job: Job) -> Floor:
    """The floor under the step of ``job``."""
    ideal = at_peak(job)
    floors = []
    for contents in rank_kinds(job, pipeline_ranks_to_price(job)):
        compute = stage_compute(job, contents)
        traffics = with_exposed_seconds(step_traffic(ideal, contents), compute.windows(job.microbatches))
        bubble = bubble_seconds(job, compute)
        silent = job.microbatches * (compute.forward + compute.backward) + bubble
        floors.append(Floor(job, contents, compute, tuple(waiting_for_links(job, traffics, silent)), bubble))
    return max(floors, key=lambda floor: floor.seconds)
