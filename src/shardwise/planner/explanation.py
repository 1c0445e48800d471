"""Why the first strategy wins, and what would have to change for the second to win."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardwise.cost.prediction import predict
from shardwise.planner.candidate import Candidate
from shardwise.planner.describe import strategy_words
from shardwise.planner.plan import TIE, Plan
from shardwise.planner.why_not import largest_differences
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

_MOST = 16.0  # a factor beyond which nobody builds


@dataclass(frozen=True)
class Turning:
    """A change of the machine or the batch that makes the second strategy as fast as the first."""

    what: str
    factor: float

    def __str__(self) -> str:
        return f"{self.what} × {self.factor:.3g}"


@dataclass(frozen=True)
class Explanation:
    first: Candidate
    second: Candidate | None
    differences: str
    turnings: tuple[Turning, ...]

    @property
    def loss(self) -> float:
        assert self.second is not None
        return self.second.seconds_per_token / self.first.seconds_per_token - 1

    def sentence(self) -> str:
        """One sentence about the two."""
        if self.second is None:
            return "no other layout fits"
        words = strategy_words(self.second.job.strategy)
        if self.loss <= 0:
            return f"{words}, is as fast within {TIE:.1%} ({self.loss:+.1%}: {self.differences}) and less simple"
        text = f"{words}, takes {self.loss:+.1%}: {self.differences}"
        if not self.turnings:
            return text + f"; no link, device or batch up to {_MOST:g} times as fast or large turns that round"
        return text + "; it would win with " + " or ".join(str(one) for one in self.turnings)


def explain(found: Plan) -> Explanation:
    """The plan's first strategy against the best of another layout."""
    first = found.best
    second = next((one for one in found.layouts if one.degrees != first.degrees), None)
    if second is None:
        return Explanation(first, None, "", ())
    return Explanation(first, second, largest_differences(first, second), tuple(turnings(first, second)))


def turnings(first: Candidate, second: Candidate) -> Iterator[Turning]:
    """The smallest change of each link's speed, of the arithmetic or of the batch that makes the second win."""
    for index, level in enumerate(first.job.cluster.levels):
        if level.width > 1:
            yield from _turning(first, second, f"{level.name} bandwidth", _with_link(index))
    yield from _turning(first, second, "arithmetic", _with_arithmetic)
    yield from _turning(first, second, "global batch", _with_batch, whole=True)


Change = Callable[[Job, float], Job]


def _turning(
    first: Candidate, second: Candidate, what: str, change: Change, *, whole: bool = False
) -> Iterator[Turning]:
    def ahead(factor: float) -> bool:
        """Whether the second is at least as fast with the change."""
        try:
            seconds = [_seconds_per_token(change(one.job, factor)) for one in (first, second)]
        except SpecError:
            return False
        return seconds[1] <= seconds[0]

    if ahead(1.0):
        return  # the closed form sees it the other way round already: nothing to say
    for direction in (1,) if whole else (1, -1):
        factor = 1.0
        while factor < _MOST:
            factor *= 2
            if ahead(factor**direction):
                yield Turning(what, factor if whole else _refined(ahead, factor, direction))
                break


def _refined(ahead: Callable[[float], bool], factor: float, direction: int) -> float:
    """The smallest factor between half of this one and itself, to a few percent."""
    low, high = factor / 2, factor
    for _ in range(5):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if ahead(middle**direction) else (middle, high)
    return float(high**direction)


def _seconds_per_token(job: Job) -> float:
    return predict(job).step_seconds / job.tokens_per_step


def _with_link(index: int) -> Change:
    def change(job: Job, factor: float) -> Job:
        level = job.cluster.levels[index]
        faster = level.with_speed(level.bandwidth_per_direction * factor, level.wire_latency)
        return job.unchecked(cluster=job.cluster.with_level(index, faster))

    return change


def _with_arithmetic(job: Job, factor: float) -> Job:
    device = job.cluster.device
    peak = {name: flops * factor for name, flops in device.peak.items()}
    return job.unchecked(cluster=replace(job.cluster, device=replace(device, peak=peak)))


def _with_batch(job: Job, factor: float) -> Job:
    return replace(job, training=replace(job.training, global_batch=int(job.sequences * factor)))
