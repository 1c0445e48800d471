"""Likely causes of a part of a step differing from its price: a table, of which the first matching entry applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.engine.labels import DIMENSIONS
from shardwise.measure.compare.links import SlowLink


@dataclass(frozen=True)
class Evidence:
    """What is known besides the part itself."""

    part: str
    predicted: float
    measured: float
    slow_rank: int | None
    slowness: float  # of that rank
    slow_link: SlowLink | None

    @property
    def longer(self) -> bool:
        return self.measured > self.predicted

    @property
    def own_link(self) -> SlowLink | None:
        """The slow link, where this part goes over it."""
        return self.slow_link if self.slow_link is not None and self.slow_link.link.dimension == self.part else None


@dataclass(frozen=True)
class Cause:
    parts: tuple[str, ...]
    applies: Callable[[Evidence], bool]
    text: Callable[[Evidence], str]


def _always(evidence: Evidence) -> bool:
    return True


def _said(text: str) -> Callable[[Evidence], str]:
    return lambda evidence: text


CAUSES = (
    Cause(
        ("compute",),
        lambda e: e.slow_rank is not None and e.longer and e.measured < 2 * e.slowness * e.predicted,
        lambda e: f"rank {e.slow_rank} takes {e.slowness:.2f} times as long for a layer as others do",
    ),
    Cause(
        ("compute",),
        lambda e: e.longer,
        _said("slower on every rank than the device's description: `shardwise calibrate` measures this device"),
    ),
    Cause(("compute",), _always, _said("the device is faster than its description: `shardwise calibrate`")),
    Cause(
        ("bubble", "late ranks"),
        lambda e: e.slow_rank is not None and e.longer,
        lambda e: f"the others wait for rank {e.slow_rank}",
    ),
    Cause(("bubble",), lambda e: e.longer, _said("stages differ: `shardwise calibrate --from` cuts them again")),
    Cause(
        ("late ranks",),
        _always,
        _said("ranks arrive at different times: other work on their machines, or uneven data and experts"),
    ),
    Cause(
        DIMENSIONS,
        lambda e: e.own_link is not None and e.longer,
        lambda e: (
            f"the link between {e.own_link.link.between} takes {e.own_link.times:.1f} times as long as "
            f"{e.own_link.than}"
            if e.own_link
            else ""
        ),
    ),
    Cause(
        DIMENSIONS,
        lambda e: e.longer,
        _said("slower than the network's description, or less of it is hidden: `shardwise calibrate` measures links"),
    ),
    Cause(DIMENSIONS, _always, _said("the network is faster than its description, or more of it is hidden")),
    Cause(("data",), _always, _said("the loop waits for batches: more run.data.workers, or run.data.stage")),
    Cause(
        ("checkpoint",),
        _always,
        _said("the state is copied, or written, while nothing trains: fewer checkpoints, or asynchronous ones"),
    ),
    Cause(
        ("optimizer",),
        lambda e: e.longer,
        _said("the update moves fewer bytes per second here than predicted: `shardwise calibrate`"),
    ),
    Cause(("optimizer",), _always, _said("the update is faster than predicted: `shardwise calibrate`")),
    Cause(("host",), _always, _said("the host between the phases: figures, logging, garbage collection")),
)  # fmt: skip


def cause_of(evidence: Evidence) -> str:
    """Empty if nothing is known."""
    for cause in CAUSES:
        if evidence.part in cause.parts and cause.applies(evidence):
            return cause.text(evidence)
    return ""
