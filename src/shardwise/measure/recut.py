"""Rebalances a pipeline by measured speed: slow ranks get fewer layers and, where possible, share one stage."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.cost.memory.room import room_of
from shardwise.engine.labels import label_of
from shardwise.layout.groups import coordinate
from shardwise.layout.stages import stages_of_rank
from shardwise.measure.compare.comparison import profiled_run, rank_slowness, straggler_of_steps
from shardwise.measure.compare.recorded import Step
from shardwise.measure.compare.step_parts import Measured
from shardwise.pipeline import Place, StageTimes, stage_times
from shardwise.pipeline.steady import simulated_pipeline
from shardwise.planner.candidate import candidate
from shardwise.planner.search.stages import Piece, Pieces, divisions, fits, pieces_of, room_for_pieces
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.records import path_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.run import RecutPolicy
from shardwise.spec.strategy import DIMENSIONS

WORTH = 0.01  # of the step: a smaller gain is not worth another checkpoint layout
_AROUND = ("data", "optimizer", "checkpoint", "host", "dp")  # not the pipeline


@dataclass(frozen=True)
class Recut:
    """A new cut of a pipeline, expected to be at least as fast as the old one."""

    old: Job
    job: Job
    slowness: tuple[float, ...]  # of every rank; 1 for the usual one
    step_seconds: float  # measured
    expected_seconds: float

    @property
    def gain(self) -> float:
        """How many times faster the step is expected to be."""
        return self.step_seconds / self.expected_seconds

    def new_run(self) -> Job:
        """The job as a new run: in another folder, and not stopped where the old one was."""
        return replace(self.job, run=replace(self.job.run, folder=None, stop_at=None))

    @property
    def layers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The number of layers of every stage, before and after."""
        before, after = (stage_layer_counts(job.model, job.strategy) for job in (self.old, self.job))
        return before, after


def recut(job: Job, recorded: Measured) -> Recut:
    """The best division into stages, and order of the dimensions, for the measured speeds of the ranks."""
    if job.strategy.pp == 1:
        problem = "the run has one pipeline stage: no layer can move to another rank"
        raise SpecError("strategy.pp", problem, "`shardwise compare` names slow ranks")
    if job.strategy.has_unlike_stages:
        problem = "stages of unlike degrees are not cut anew: their layers take unlike times on equal devices"
        raise SpecError("strategy", problem, "`shardwise plan` cuts them")
    priced = pieces_of(job)
    slowness = rank_slowness(job.model, recorded)
    if slowness is None:
        raise SpecError("profile", "no layer was recorded", "record the run anew")
    pieces = measured_pieces(job, recorded, priced, slowness)
    forward = _forward_share(recorded)
    now = _simulated(job, pieces, slowness, forward)
    best, seconds = job, now
    for other in _proposals(job, pieces, slowness):
        moved = 0.0 if other.strategy.order == job.strategy.order else _priced_difference(other, job)
        simulated = _simulated(other, pieces, slowness, forward) + moved
        if simulated < seconds:
            best, seconds = other, simulated
    measured = recorded.step_seconds
    pipeline = measured - sum(recorded.busiest.parts.get(part, 0.0) for part in _AROUND)
    expected = measured - pipeline * (1 - seconds / now)
    if expected > measured * (1 - WORTH):
        best, expected = job, measured
    return Recut(job, best, slowness, measured, expected)


def measured_pieces(job: Job, recorded: Measured, priced: Pieces, slowness: Sequence[float]) -> Pieces:
    """Seconds of the model's pieces on a usual rank: layers by their share of the forward pass, ends by the rest."""
    last = job.strategy.stages - 1
    layers, ends = [], {0: 0.0, last: 0.0}
    for record, steps, times in zip(recorded.records, recorded.steps, recorded.ranks):
        for stage, (forward, all_passes) in _stage_seconds(steps).items():
            usual = all_passes / slowness[record.rank]
            held = record.stages[stage]
            in_layers = min(1.0, sum(times.layers[layer] for layer in held) / forward) if held else 0.0
            if held:
                layers.append(usual * in_layers / sum(priced.layers[layer].seconds for layer in held))
            if stage in ends:
                ends[stage] = max(ends[stage], usual * (1 - in_layers))
    scale = statistics.median(layers)
    return Pieces(
        replace(priced.embedding, seconds=ends[0]),
        tuple(replace(layer, seconds=scale * layer.seconds) for layer in priced.layers),
        replace(priced.head, seconds=ends[last] if last else 0.0),
    )


def _stage_seconds(steps: Sequence[Step]) -> dict[int, tuple[float, float]]:
    """For every stage of a rank: seconds of the forward pass and of all passes, without communication."""
    seconds: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        for named in step.ranges:
            label = label_of(named.name)
            if label.pass_kind is None or label.stage is None:
                continue
            sent = sum(
                inner.seconds
                for inner in step.ranges
                if label_of(inner.name).kind in ("begin", "wait")
                and named.start <= inner.start
                and inner.end <= named.end
            )
            seconds[label.stage][label.pass_kind].append(named.seconds - sent)
    return {
        stage: (statistics.fmean(passes["forward"]), sum(statistics.fmean(some) for some in passes.values()))
        for stage, passes in seconds.items()
    }


def _forward_share(recorded: Measured) -> float:
    stages = [seconds for steps in recorded.steps for seconds in _stage_seconds(steps).values()]
    return sum(forward for forward, _ in stages) / sum(all_passes for _, all_passes in stages)


def _speeds(job: Job, slowness: Sequence[float]) -> list[float]:
    """The speed of every pipeline rank: that of its slowest member."""
    slowest = [1e-9] * job.strategy.pp
    for rank, slow in enumerate(slowness):
        place = coordinate(job.strategy, "pp", rank)
        slowest[place] = max(slowest[place], slow)
    return [1 / slow for slow in slowest]


def _proposals(job: Job, pieces: Pieces, slowness: Sequence[float]) -> list[Job]:
    """Other divisions into stages, for all orders of the dimensions: another order may put slow ranks in one stage."""
    capacity, proposals = room_of(job).planned_bytes, []
    for order in [job.strategy.order, *permutations(DIMENSIONS)]:
        try:
            laid_out = job.with_strategy(order=order)
            speeds = _speeds(laid_out, slowness)
            rooms = [room_for_pieces(laid_out, pieces, rank, capacity) for rank in range(job.strategy.pp)]
            places = [
                Place(speed, max(1.0, room), microbatches_in_flight(laid_out, rank))
                for rank, (speed, room) in enumerate(zip(speeds, rooms))
            ]
            cuts = [laid_out.with_strategy(stage_layers=cut) for cut in divisions(laid_out, pieces, places)]
        except SpecError:
            continue  # a layout that this cluster or model cannot have
        proposals += [cut for cut in cuts if fits(cut, capacity)]
    return proposals


def _simulated(job: Job, pieces: Pieces, slowness: Sequence[float], forward_share: float) -> float:
    strategy, times = job.strategy, _stage_times(job, pieces, _speeds(job, slowness), forward_share)
    message_seconds = candidate(job).prediction.slowest.message_seconds
    shape = strategy.schedule, strategy.pp, job.microbatches, strategy.chunks_per_rank
    return simulated_pipeline(*shape, times, message_seconds, ends=job.stack.step_ends)[0]


def _stage_times(job: Job, pieces: Pieces, speeds: Sequence[float], forward_share: float) -> StageTimes:
    counts = stage_layer_counts(job.model, job.strategy)
    seconds = [0.0] * len(counts)
    for rank, speed in enumerate(speeds):
        for stage in stages_of_rank(job, rank):
            held: Piece = pieces.stage(counts, stage)
            seconds[stage] = held.seconds / speed
    backward = [(1 - forward_share) / 2 * spent for spent in seconds]
    return stage_times([forward_share * spent for spent in seconds], backward, backward)


def _priced_difference(proposed: Job, other: Job) -> float:
    """What the network costs more (or less) with another order of the dimensions, as priced."""
    same_cut = proposed.with_strategy(stage_layers=stage_layer_counts(other.model, other.strategy))
    return candidate(same_cut).step_seconds - candidate(other).step_seconds


# -- while the run trains: a rank that `compare` would call slow gets fewer layers -------------------


@dataclass
class RunRecuts:
    """Finds better cuts of a run; looks at each of its profiles once."""

    folder: RunFolder
    policy: RecutPolicy
    _seen_ns: int = 0

    def better_cut(self, since_ns: int) -> tuple[Job, str] | None:
        """A better cut, from a profile newer than ``since_ns``, and why; it is also written to `recut.yaml`."""
        written_ns = self._recorded_ns()
        if written_ns <= max(since_ns, self._seen_ns):
            return None
        try:
            run = profiled_run(str(self.folder.path))
            if len(run.measured.numbers) < self.policy.steps:
                return None
            self._seen_ns = written_ns
            slow = straggler_of_steps(run.job.model, run.measured)
            better = None if slow is None else recut(run.job, run.measured)
        except SpecError:  # ranks are writing the next record, or the layout has just changed
            return None
        if better is None or better.job == run.job or better.gain < 1 + self.policy.gain:
            return None
        self.folder.recut.write_text(better.job.to_yaml(), encoding="utf-8")
        before, after = (", ".join(map(str, counts)) for counts in better.layers)
        times = better.slowness[slow or 0]
        why = f"rank {slow} took {times:.2f} times as long for a layer in {len(run.measured.numbers)} steps"
        return better.job, f"{why}; stages of {before} layers become {after}, expected {better.gain:.2f} times as fast"

    def _recorded_ns(self) -> int:
        """When rank 0 wrote its newest profile; 0 if there is none."""
        try:
            return path_of(self.folder.profile, 0).stat().st_mtime_ns
        except OSError:
            return 0
