"""Ranks and links that are slower than others, or than their description."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from shardwise.layout.ranks import coordinate
from shardwise.layout.views import kind_of
from shardwise.measure.compare.exchanges import Exchange
from shardwise.measure.compare.step_parts import Measured, exchange_seconds, layers_of
from shardwise.spec.job import Job
from shardwise.spec.model import Model

SLOW = 1.25  # times as long for a layer as on the usual rank


def same_work(job: Job) -> tuple[Hashable, ...]:
    """For every rank, what the time of a layer depends on: the degrees of its stage, and its kind of device."""
    stages = (job.strategy.of_stage(coordinate(job.strategy, "pp", rank)) for rank in range(job.strategy.world))
    return tuple((own.tp, own.microbatch, kind_of(job, rank)) for rank, own in enumerate(stages))


def rank_slowness(
    model: Model, recorded: Measured, alike: Sequence[Hashable] | None = None
) -> tuple[float, ...] | None:
    """How many times as long each rank takes for a layer as the usual one; None if no layer was recorded.

    Layers are compared with others of their kind and, if ``alike`` is given, ranks with those of an equal value there.
    The usual rank is the median; of two, the faster.
    """
    kinds: list[dict[Hashable, float]] = []
    for rank in recorded.ranks:
        each: dict[Hashable, list[float]] = defaultdict(list)
        for layer, seconds in rank.layers.items():
            each[model.is_moe_layer(layer), None if alike is None else alike[rank.rank]].append(seconds)
        kinds.append({kind: statistics.fmean(seconds) for kind, seconds in each.items()})
    if not any(kinds):
        return None
    usual = {
        kind: statistics.median_low(own[kind] for own in kinds if kind in own)
        for kind in {kind for own in kinds for kind in own}
    }
    return tuple(
        statistics.mean(seconds / usual[kind] for kind, seconds in own.items()) if own else 1.0 for own in kinds
    )


def straggler(slowness: tuple[float, ...] | None) -> int | None:
    """The slowest rank, if it is much slower than the usual one."""
    if slowness is None or len(slowness) < 2:
        return None
    slowest = max(range(len(slowness)), key=lambda rank: slowness[rank])
    return slowest if slowness[slowest] >= SLOW else None


def straggler_of_steps(model: Model, recorded: Measured) -> int | None:
    """The rank that is the straggler in every single step; None if there is none."""
    named = set()
    for number in range(len(recorded.numbers)):
        ranks = tuple(
            replace(rank, layers=layers_of([own[number]])) for rank, own in zip(recorded.ranks, recorded.steps)
        )
        named.add(straggler(rank_slowness(model, replace(recorded, ranks=ranks))))
    return named.pop() if len(named) == 1 else None


# -- slow links, found by the collectives and messages that cross them -------------------------------

SLOW_LINK = 2.0  # times as long as the same exchange between other ranks
FAR = 3.0  # times the ratio of measured to priced time of everything else
WORTH = 0.02  # of the step: shorter exchanges are ignored


@dataclass(frozen=True)
class MeasuredLink:
    """Exchanges of one size between the same ranks: how many there are in a step, and their median time."""

    dimension: str
    what: str
    is_message: bool  # between the stages of a pipeline
    members: tuple[int, ...]
    nodes: tuple[int, ...]
    bytes: int
    count: float
    seconds: float
    price_seconds: float | None

    @property
    def step_seconds(self) -> float:
        return self.count * self.seconds

    @property
    def ratio(self) -> float | None:
        """Measured over priced."""
        return self.seconds / self.price_seconds if self.price_seconds else None

    @property
    def carries(self) -> tuple[str, str, int]:
        """Links with an equal value are compared: pipeline messages of one size are, whichever stage sends."""
        return self.dimension, "" if self.is_message else self.what, self.bytes

    @property
    def between(self) -> str:
        """Its two ends, in words."""
        ranks = f"ranks {' and '.join(map(str, sorted(self.members)))}"
        return ranks if len(self.nodes) == 1 else f"{ranks} (nodes {' and '.join(map(str, self.nodes))})"


@dataclass(frozen=True)
class SlowLink:
    link: MeasuredLink
    times: float  # as long
    than: str


def links_of(job: Job, recorded: Measured) -> tuple[MeasuredLink, ...]:
    """A link for every size and name of exchange between the same ranks, both directions together."""
    same: dict[tuple[str, str, tuple[int, ...], int], list[Exchange]] = defaultdict(list)
    for exchange in recorded.exchanges:
        same[exchange.dimension, exchange.what, tuple(sorted(exchange.members)), exchange.bytes].append(exchange)
    links = []
    for (dimension, what, members, size), some in same.items():
        shown = [exchange.seconds for exchange in some if exchange.shows_the_link]
        if not shown:
            continue
        nodes = tuple(sorted({recorded.records[rank].node for rank in members}))
        count, seconds = len(some) / len(recorded.numbers), statistics.median(shown)
        is_message, price = bool(some[0].label.message), exchange_seconds(job, some[0])
        links.append(MeasuredLink(dimension, what, is_message, members, nodes, size, count, seconds, price))
    return tuple(links)


def slow_link(links: Sequence[MeasuredLink], step_seconds: float, compute_ratio: float) -> SlowLink | None:
    """The slow link that costs most: slower than others that carry the same or, if none is, than its price.

    If everything takes longer than its price, even computation, the prices are wrong and no link is to blame.
    """
    worth = [link for link in links if link.step_seconds >= WORTH * step_seconds]
    slow_links = [slow for link in worth if (slow := _against_others(link, links)) is not None]
    if not slow_links:
        slow_links = [slow for link in worth if (slow := _against_price(link, links, compute_ratio)) is not None]
    return max(slow_links, key=lambda slow: slow.link.step_seconds * (1 - 1 / slow.times), default=None)


def _against_others(link: MeasuredLink, links: Sequence[MeasuredLink]) -> SlowLink | None:
    same = [other.seconds for other in links if other.members != link.members and other.carries == link.carries]
    usual = statistics.median_low(same) if same else None
    if not usual or link.seconds < SLOW_LINK * usual:
        return None
    return SlowLink(link, link.seconds / usual, "between other ranks")


def _against_price(link: MeasuredLink, links: Sequence[MeasuredLink], compute_ratio: float) -> SlowLink | None:
    others = [other.ratio for other in links if other.members != link.members and other.ratio is not None]
    usual = max(1.0, min([compute_ratio, *others]))
    if link.ratio is None or link.ratio < FAR * usual:
        return None
    return SlowLink(link, link.ratio, "its description")
