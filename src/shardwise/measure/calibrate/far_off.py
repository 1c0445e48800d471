"""Ranks much slower than the others, which a median hides but every training step waits for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.measure.calibrate.link_samples import LinkSample
from shardwise.measure.calibrate.samples import DeviceSamples

FAR = 1.3  # times the seconds of the others


@dataclass(frozen=True)
class FarOff:
    """A rank whose ``what`` take ``times`` the median of the others."""

    what: str
    rank: int
    host: str
    times: float

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} takes {self.times:.1f} times as long as others for {self.what}"


def far_off(what: str, seconds: Mapping[int, Sequence[float]], hosts: Sequence[str]) -> Iterator[FarOff]:
    """Of every rank the same figures, in the same order; ``hosts`` by rank."""
    for rank, own in seconds.items():
        others = zip(*(figures for other, figures in seconds.items() if other != rank))
        shares = [one / statistics.median(same) for one, same in zip(own, others)]
        if shares and (times := statistics.median(shares)) > FAR:
            yield FarOff(what, rank, hosts[rank], times)


def far_off_devices(samples: Sequence[DeviceSamples], hosts: Sequence[str]) -> Iterator[FarOff]:
    kinds: dict[str, Callable[[DeviceSamples], list[float]]] = {
        "products": lambda one: [product.seconds for product in one.products],
        "attention": lambda one: [attention.forward_seconds for attention in one.attentions],
        "copies in memory": lambda one: [copy.seconds for copy in one.copies],
        "steps of small models": lambda one: [step.passes_seconds for step in one.steps],
    }
    for what, figures in kinds.items():
        yield from far_off(what, {rank: figures(one) for rank, one in enumerate(samples)}, hosts)


def far_off_links(
    of_ranks: Sequence[Sequence[LinkSample]], level: int, name: str, hosts: Sequence[str]
) -> Iterator[FarOff]:
    """Among the groups of one level while all of them worked: the ranks of a group wait for each other."""
    seconds = {
        rank: [one.seconds for one in samples if one.level == level and sum(map(len, one.groups)) == len(of_ranks)]
        for rank, samples in enumerate(of_ranks)
    }
    yield from far_off(f"collectives over {name}", seconds, hosts)
