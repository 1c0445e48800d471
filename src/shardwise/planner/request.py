"""What is asked of the planner, and how long its answer may take.

Time is that of this process, so that what else a machine does changes no plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardwise.cost.memory.room import Room, room_of
from shardwise.planner.constraints import Constraints, has
from shardwise.planner.search.space import Space
from shardwise.planner.search.supported import offers_priced, require_offered
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

T = TypeVar("T")
USUAL_SECONDS = 60.0
THOROUGH_SECONDS = 3600.0


class Deadline:
    """Begins when it is made; ``None`` never ends. ``was_hit``: something was left out for it, or for a part of it."""

    def __init__(self, seconds: float | None, whole: Deadline | None = None) -> None:
        self.seconds, self._whole = seconds, whole
        self._started = time.process_time()
        self.was_hit = False

    @property
    def spent_seconds(self) -> float:
        return time.process_time() - self._started

    @property
    def passed(self) -> bool:
        return self.seconds is not None and self.spent_seconds > self.seconds

    def part(self) -> Deadline:
        """Half of what is left, for one part of an answer: so there is time for what comes after it."""
        left = None if self.seconds is None else max(0.0, self.seconds - self.spent_seconds)
        return Deadline(None if left is None else left / 2, self)

    def hit(self) -> None:
        self.was_hit = True
        if self._whole is not None:
            self._whole.hit()

    def leaves_out(self) -> bool:
        """Whether it has passed, so that what is asked now is left out."""
        if self.passed:
            self.hit()
        return self.passed

    def until(self, several: Iterable[T]) -> Iterator[T]:
        """As many of ``several`` as there is time for, the first in any case."""
        for number, one in enumerate(several):
            if number and self.passed:
                self.hit()
                return
            yield one


MOST_GROUPS = 1200  # of a space that answers in seconds


@dataclass(frozen=True)
class Request:
    """``job`` says the model, the cluster, the training and the stack; of its strategy only what no search varies.

    ``memory_bytes`` caps a device's memory, in place of the margin that a plan leaves free by itself. ``offload``:
    always (True), never (False), or where nothing else fits (None). ``any_priced`` also offers what is priced and not
    run. ``thorough`` searches the whole space however large.
    ``time_limit_seconds``, of this process, end an answer with the best so far (a minute; an hour where thorough). What
    is asked of a request that has `started` shares one limit; of another, each plan has its own.
    """

    job: Job
    constraints: Constraints = Constraints()
    minimum_batch: int | None = None
    memory_bytes: float | None = None
    offload: bool | None = None
    any_priced: bool = False
    thorough: bool = False
    time_limit_seconds: float | None = None
    running: Deadline | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise SpecError("--max-memory", f"{self.memory_bytes:g} bytes is not enough", "give a size such as 70GB")
        if self.minimum_batch is None and self.job.training.global_batch is None:
            raise SpecError("training.global_batch", "is missing", "give --global-batch, such as 4M-tokens or 1024")
        require_offered(self.job, any_priced=self.any_priced)

    @property
    def seconds(self) -> float:
        """How long an answer may take."""
        usual = THOROUGH_SECONDS if self.thorough else USUAL_SECONDS
        return usual if self.time_limit_seconds is None else self.time_limit_seconds

    @property
    def deadline(self) -> Deadline:
        """The one that runs, or a new one."""
        return self.running or Deadline(self.seconds)

    def started(self) -> Request:
        """The same with its time running, for all that is asked of it from now on."""
        return replace(self, running=self.deadline)

    @property
    def offers_priced(self) -> bool:
        """Whether what is priced and not run is offered: as asked for, or because our engine lacks the model itself."""
        return offers_priced(self.job, self.any_priced)

    @property
    def room(self) -> Room:
        return room_of(self.job, self.memory_bytes)

    @property
    def capacity_bytes(self) -> float:
        """What the predicted memory of a plan may take of a device."""
        return self.room.planned_bytes

    def space(self, *, offload: bool) -> Space:
        space = Space(self.job, self.constraints, self.minimum_batch, offload, self.offers_priced)
        return space if self.thorough else space.within(MOST_GROUPS)

    def allows(self, strategy: Strategy) -> bool:
        """Whether the constraints do; fields that make no difference may have any value."""
        wanted, excluded = self.constraints.allowed, self.constraints.excluded
        return all(has(strategy, name, values, idle=True) for name, values in wanted.items()) and not any(
            all(has(strategy, name, values, idle=False) for name, values in entry.items()) for entry in excluded
        )

    def on(self, cluster: Cluster) -> Request:
        """The same asked of another cluster."""
        return replace(self, job=self.job.unchecked(cluster=cluster))
