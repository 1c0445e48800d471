"""A request to the planner, and its time limit.

Time is CPU time of this process, so that other load on the machine does not change a plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from shardwise.cost.memory.room import Room, fit_probability, probability_words, room_of
from shardwise.planner.constraints import Constraints, has
from shardwise.planner.search.space import Space
from shardwise.planner.search.supported import offers_priced, require_offered
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_bytes

T = TypeVar("T")
USUAL_SECONDS = 60.0
THOROUGH_SECONDS = 3600.0


class Deadline:
    """A time limit that starts when created; without ``seconds`` it never ends.

    ``was_hit``: something was left out because this limit, or a part of it, had passed.
    """

    def __init__(self, seconds: float | None, parent: Deadline | None = None) -> None:
        self.seconds, self._parent = seconds, parent
        self._started = time.process_time()
        self.was_hit = False

    @property
    def spent_seconds(self) -> float:
        return time.process_time() - self._started

    @property
    def passed(self) -> bool:
        return self.seconds is not None and self.spent_seconds > self.seconds

    def part(self) -> Deadline:
        """Half of the time left, for one part of an answer, so that the next parts have time too."""
        left = None if self.seconds is None else max(0.0, self.seconds - self.spent_seconds)
        return Deadline(None if left is None else left / 2, self)

    def hit(self) -> None:
        self.was_hit = True
        if self._parent is not None:
            self._parent.hit()

    def leaves_out(self) -> bool:
        """Whether it has passed, so that the caller leaves out what comes next."""
        if self.passed:
            self.hit()
        return self.passed

    def until(self, several: Iterable[T]) -> Iterator[T]:
        """As many items as there is time for, and always the first."""
        for number, item in enumerate(several):
            if number and self.passed:
                self.hit()
                return
            yield item


MOST_GROUPS = 1200  # a space of this many groups is searched in seconds


@dataclass(frozen=True)
class Request:
    """What to plan for, within which constraints, and how long to search."""

    job: Job  # model, cluster, training and stack, and the parts of the strategy that no search varies
    constraints: Constraints = Constraints()
    minimum_batch: int | None = None
    """Asks for the smallest batch of at least this many sequences that divides; None: the batch of the training."""
    memory_bytes: float | None = None  # cap on a device's memory; None: a plan leaves its usual margin free
    offload: bool | None = None  # always (True), never (False), or where it gains (None)
    any_priced: bool = False  # includes strategies that are priced but not run
    thorough: bool = False  # searches the whole space, however large
    time_limit_seconds: float | None = None
    """After this an answer ends with the best so far; None: a minute, or an hour if ``thorough``."""
    running: Deadline | None = field(default=None, compare=False, repr=False)
    """The limit that all plans from a request which has `started` share."""

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise SpecError("⟨max_memory⟩", f"{self.memory_bytes:g} bytes is not enough", "give a size such as 70GB")
        if self.minimum_batch is None and self.job.training.global_batch is None:
            raise SpecError("training.global_batch", "is missing", "give ⟨global_batch⟩, such as 4M-tokens or 1024")
        require_offered(self.job, any_priced=self.any_priced)

    @property
    def seconds(self) -> float:
        """The time limit of an answer."""
        usual = THOROUGH_SECONDS if self.thorough else USUAL_SECONDS
        return usual if self.time_limit_seconds is None else self.time_limit_seconds

    @property
    def deadline(self) -> Deadline:
        return self.running or Deadline(self.seconds)

    def started(self) -> Self:
        return replace(self, running=self.deadline)

    @property
    def offers_priced(self) -> bool:
        """Whether priced-only strategies are offered: on request, or if our engine does not run the model."""
        return offers_priced(self.job, self.any_priced)

    @property
    def room(self) -> Room:
        return room_of(self.job, self.memory_bytes)

    @property
    def capacity_bytes(self) -> float:
        """Predicted device memory that a plan may use."""
        return self.room.planned_bytes

    def short_words(self, needed_bytes: float) -> str:
        """Why a strategy that needs ``needed_bytes`` is not planned."""
        if needed_bytes <= self.capacity_bytes:
            return f"needs {readable_bytes(needed_bytes)} per device, and more host memory than there is"
        needs, there = readable_bytes(needed_bytes), readable_bytes(self.capacity_bytes)
        words = f"needs at least {needs} per device, a plan may use up to {there}"
        if needed_bytes > self.room.refused_bytes:
            return words
        likely = probability_words(fit_probability(self.job, needed_bytes))
        return f"{words}: tight, it fits with {likely} probability"

    def space(self, *, offload: bool, straddling: bool = False) -> Space:
        space = Space(
            self.job, self.constraints, self.minimum_batch, offload, self.offers_priced, straddling=straddling
        )
        return space if self.thorough else space.within(MOST_GROUPS)

    def allows(self, strategy: Strategy) -> bool:
        """Whether the constraints allow the strategy; fields without effect may have any value."""
        wanted, excluded = self.constraints.allowed, self.constraints.excluded
        return all(has(strategy, name, values, idle=True) for name, values in wanted.items()) and not any(
            all(has(strategy, name, values, idle=False) for name, values in entry.items()) for entry in excluded
        )

    def on(self, cluster: Cluster) -> Self:
        return replace(self, job=self.job.unchecked(cluster=cluster))
