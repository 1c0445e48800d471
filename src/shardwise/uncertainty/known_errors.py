"""What errors of published runs say about a new job: the rule behind error bars.

Every error is that of a row whose source was left out of the fit, so a row stands to the other sources as a new job
stands to all: its device may be fitted on none of them, its framework and its number of devices may be in none. A band
holds a share of the errors of rows that stand as far away as the job does (conformal prediction: Lei et al. 2018, JASA
113(523)). Rows of one source are not independent, so that a source counts as `MOST_OF_A_SOURCE` rows at most (Dunn,
Wasserman and Ramdas 2022, "Distribution-free prediction sets for two-layer hierarchical models", JASA 118(544)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MOST_OF_A_SOURCE = 40.0
ENOUGH_ROWS, ENOUGH_SOURCES = 15, 3
KINDS = {"dense": "dense", "moe": "mixtures"}


class Standing(NamedTuple):
    """What of a job decides how well it is known."""

    device: str
    kind: str
    stack: str
    devices: int


class RunError(NamedTuple):
    """Predicted over reported, as a logarithm, of one row whose source is in no fit behind the prediction.

    ``job`` is the same for rows that differ in the strategy alone, empty for a row without such another.
    """

    row_id: str
    source: str
    standing: Standing
    job: str
    error: float


@dataclass(frozen=True)
class Band:
    """|error| is at most ``width`` for the stated share of ``rows`` from ``sources``; ``of`` says which these are."""

    width: float
    rows: int
    sources: int
    of: str


class KnownErrors:
    """Errors of rows, each with its source left out of the fit; ``fitted`` devices have constants of their own."""

    def __init__(self, errors: Iterable[RunError], fitted: frozenset[str]) -> None:
        self.errors = tuple(errors)
        self.fitted = fitted

    # -- how far a job is from all rows, and a row from those of other sources -------------------------------

    @cached_property
    def _largest(self) -> dict[str, dict[str, int]]:
        """The most devices of a row: by kind of device, then by source."""
        largest: dict[str, dict[str, int]] = {}
        for error in self.errors:
            of_device = largest.setdefault(error.standing.device, {})
            of_device[error.source] = max(error.standing.devices, of_device.get(error.source, 0))
        return largest

    @cached_property
    def _stacks(self) -> dict[str, set[str]]:
        sources: dict[str, set[str]] = {}
        for error in self.errors:
            sources.setdefault(error.standing.stack, set()).add(error.source)
        return sources

    def largest(self, device: str, besides: str = "") -> int:
        """The most of this device in a row of any source, or of any ``besides`` one; 0 without rows."""
        return max((most for source, most in self._largest.get(device, {}).items() if source != besides), default=0)

    def is_fitted(self, device: str, besides: str = "") -> bool:
        return device in self.fitted and self.largest(device, besides) > 0

    def is_framework_known(self, stack: str, besides: str = "") -> bool:
        return bool(self._stacks.get(stack, set()) - {besides})

    def is_larger(self, standing: Standing, besides: str = "") -> bool:
        """Whether the job is beyond every row of its device."""
        return 0 < self.largest(standing.device, besides) < standing.devices

    @cached_property
    def _seen_by_others(self) -> list[tuple[RunError, bool, bool]]:
        """Every row, and whether for the other sources its device is fitted and its framework known."""
        seen: dict[tuple[str, str, str], tuple[bool, bool]] = {}
        for error in self.errors:
            key = device, stack, source = error.standing.device, error.standing.stack, error.source
            if key not in seen:
                seen[key] = self.is_fitted(device, source), self.is_framework_known(stack, source)
        return [(error, *seen[error.standing.device, error.standing.stack, error.source]) for error in self.errors]

    # -- bands ---------------------------------------------------------------------------------------------

    def band(self, standing: Standing, share: float) -> Band:
        """Of rows that stand to the other sources as the job does to all; where it is larger than any, if wider."""
        band = next(_band(rows, share, of) for rows, of in self._classes(standing) if of == "all" or _is_enough(rows))
        if not self.is_larger(standing):
            return band
        larger = [error for error in self.errors if self.is_larger(error.standing, error.source)]
        if not _is_enough(larger):
            return band
        beyond = _band(larger, share, f"beyond {self.largest(standing.device):,} devices")
        return beyond if beyond.width > band.width else band

    def _classes(self, standing: Standing) -> Iterator[tuple[Sequence[RunError], str]]:
        """Rows like the job, from the closest to all, with words for them."""
        fitted, known = self.is_fitted(standing.device), self.is_framework_known(standing.stack)
        alike = [
            error for error, was_fitted, was_known in self._seen_by_others if (was_fitted, was_known) == (fitted, known)
        ]
        own_kind = [error for error in alike if error.standing.kind == standing.kind]
        kind, framework = KINDS[standing.kind], "" if known else ", framework not seen"
        if fitted:
            own = [error for error in own_kind if error.standing.device == standing.device]
            yield own, f"{standing.device}, {kind}{framework}, up to {self.largest(standing.device):,} devices"
        words = "fitted devices" if fitted else "devices without a fit"
        yield own_kind, f"{words}, {kind}{framework}"
        either = [error for error, was_fitted, _ in self._seen_by_others if was_fitted == fitted]
        yield [error for error in either if error.standing.kind == standing.kind], f"{words}, {kind}"
        yield either, words
        yield self.errors, "all"


def _is_enough(rows: Sequence[RunError]) -> bool:
    """Whether a class speaks for itself; fewer rows or sources do not, and a wider class is asked."""
    return len(rows) >= ENOUGH_ROWS and len({row.source for row in rows}) >= ENOUGH_SOURCES


def _band(rows: Sequence[RunError], share: float, of: str) -> Band:
    width = quantile([(abs(row.error), weight) for row, weight in weighed(rows)], share)
    return Band(width, len(rows), len({row.source for row in rows}), of)


def weighed(rows: Sequence[RunError], most: float = MOST_OF_A_SOURCE) -> list[tuple[RunError, float]]:
    """The rows with their weights: a source of many counts as ``most``."""
    count: dict[str, int] = {}
    for row in rows:
        count[row.source] = count.get(row.source, 0) + 1
    return [(row, min(1.0, most / count[row.source])) for row in rows]


def quantile(values: Iterable[tuple[float, float]], share: float) -> float:
    """The smallest value that, of these and one more of weight 1 to come, a ``share`` by weight does not exceed.

    With equal weights the ⌈share·(n + 1)⌉-th smallest. The largest, where so few cannot say.
    """
    ordered = sorted(values)
    wanted, reached = share * (math.fsum(weight for _, weight in ordered) + 1), 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted - 1e-9:
            return value
    return ordered[-1][0]
