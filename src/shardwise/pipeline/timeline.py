"""What a simulated schedule took: start and end of every action, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.pipeline.schedule import PipelineSchedule
from shardwise.pipeline.times import checked_seconds
from shardwise.spec.errors import SpecError


@dataclass(frozen=True)
class Timeline:
    """``starts[rank][i]`` and ``ends[rank][i]`` belong to ``schedule.actions[rank][i]``, in seconds.

    ``arrivals[rank][i]`` is when the result of that action is where it is needed next: its end, unless a message
    carries it to another rank. ``busy`` is what every rank computes, without overhead and messages.
    """

    schedule: PipelineSchedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    arrivals: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]

    @property
    def makespan_seconds(self) -> float:
        """From the first action of any rank to the last end of any rank."""
        return max(self._last_ends()) - min(self._first_starts())

    @property
    def rank_seconds(self) -> tuple[float, ...]:
        """From its first start to its last end, for every rank."""
        return tuple(end - start for start, end in zip(self._first_starts(), self._last_ends()))

    @property
    def longest_rank_seconds(self) -> float:
        """The zero-bubble papers' cost: steps can follow each other this closely when no rank waits for all.

        A rank may start its next step when its own is over, so a step that is skewed over the ranks costs
        only its longest rank (Qi et al. 2023, arXiv 2401.10241, section 4 and Table 5).
        """
        return max(self.rank_seconds)

    @property
    def bubble_seconds(self) -> float:
        """``longest_rank_seconds`` less the mean work of a rank."""
        return self.longest_rank_seconds - sum(self.busy) / len(self.busy)

    @property
    def bubble_rate(self) -> float:
        """1 - m(F + I + W)/cost, cost being the longest rank (Qi et al. 2023, section 5.3); work: mean over ranks."""
        cost = self.longest_rank_seconds
        return self.bubble_seconds / cost if cost else 0.0

    @property
    def makespan_bubble_rate(self) -> float:
        """1 - busy/makespan: the rate when all ranks start and end the step together."""
        span = self.makespan_seconds
        return 1 - sum(self.busy) / len(self.busy) / span if span else 0.0

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Per rank, within the makespan."""
        span = self.makespan_seconds
        return tuple(span - busy for busy in self.busy)

    def step_seconds(self, optimizer_seconds: float | Sequence[float] = 0.0, synchronized: bool = True) -> float:
        """One training step with its optimizer.

        ``synchronized``: the gradient norm of all ranks comes first, so every optimizer starts at the end of
        the makespan. Otherwise every rank continues alone and the norm is checked afterwards
        (post-validation: Qi et al. 2023, section 4).
        """
        ranks = self.schedule.ranks
        given = [optimizer_seconds] * ranks if isinstance(optimizer_seconds, (int, float)) else list(optimizer_seconds)
        if len(given) != ranks:
            raise SpecError("optimizer_seconds", f"{len(given)} values for {ranks} ranks", "give one per rank")
        optimizer = checked_seconds("optimizer_seconds", given)
        if synchronized:
            return self.makespan_seconds + max(optimizer)
        return max(own + step for own, step in zip(self.rank_seconds, optimizer))

    def _first_starts(self) -> list[float]:
        return [own[0] for own in self.starts if own]

    def _last_ends(self) -> list[float]:
        return [own[-1] for own in self.ends if own]
