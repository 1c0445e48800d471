"""Documents of unlike lengths in sequences of one length: how many tokens are padding, and how many are attended to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import exp
from typing import Literal

from shardwise.spec.codec import Spec, count, setting
from shardwise.spec.errors import SpecError
from shardwise.spec.layers import LONGEST


@dataclass(frozen=True, kw_only=True)
class Lengths(Spec):
    """Lengths of the documents that sequences are made of, in tokens."""

    mean: float | None = setting(None, above=0)
    """Mean length; with `longest` in place of a histogram."""
    longest: int | None = count(None, maximum=LONGEST)
    """Longest document."""
    histogram: tuple[tuple[int, ...], ...] = ()
    """Pairs of a length and the number of documents of that length."""
    labels: float = setting(1.0, above=0, maximum=1)
    """Share of the tokens that count for the loss."""
    packing: Literal["packed", "padded"] = "packed"
    """`packed`: first-fit into sequences of `training.seq`, each document attends to itself; `padded`: one document a
    sequence, as long as the longest of its microbatch."""

    def check(self) -> None:
        if bool(self.histogram) == (self.mean is not None):
            raise SpecError("mean", "and histogram: one of them is needed", "give mean and longest, or histogram")
        if self.mean is not None and (self.longest is None or self.longest < self.mean):
            raise SpecError("longest", "is missing or below the mean", "give the length of the longest document")
        for index, pair in enumerate(self.histogram):
            if len(pair) != 2 or min(pair) < 1 or pair[0] > LONGEST:
                raise SpecError(
                    f"histogram[{index}]", f"{list(pair)} is not a length and a number", "write it like [512, 80]"
                )

    @cached_property
    def counts(self) -> tuple[tuple[int, float], ...]:
        """Lengths with the share of documents of each, shortest first; of a mean and a maximum, an exponential law
        cut off there: the distribution of largest entropy with that mean."""
        if self.histogram:
            total = sum(number for _, number in self.histogram)
            summed: dict[int, float] = {}
            for length, number in self.histogram:
                summed[length] = summed.get(length, 0.0) + number / total
            return tuple(sorted(summed.items()))
        assert self.mean is not None and self.longest is not None
        return _cut_exponential(self.mean, self.longest)

    def mean_tokens(self, seq: int) -> float:
        """Tokens of a document that are used; what is beyond ``seq`` is cut off."""
        return sum(share * min(length, seq) for length, share in self.counts)

    def cut_share(self, seq: int) -> float:
        """The share of all tokens that is cut off."""
        return 1 - self.mean_tokens(seq) / self.mean_tokens(LONGEST)

    def padded_tokens(self, documents: int, seq: int) -> float:
        """The mean length of the longest of some documents, which all of them are padded to."""
        return _mean_of_longest(self.counts, documents, seq)

    def attended_share(self, seq: int) -> float:
        """Keys that a query of a packed sequence sees on average, as a share of those of one whole document."""
        used = [(min(length, seq), share) for length, share in self.counts]
        return sum(share * length**2 for length, share in used) / (seq * sum(share * length for length, share in used))

    def packed_share(self, seq: int) -> float:
        """The share of packed sequences that is not padding."""
        return _packed_share(self.counts, seq)

    def computed_share(self, seq: int, documents: int) -> float:
        """Tokens that are computed with, as a share of ``documents`` whole sequences in a microbatch."""
        return 1.0 if self.packing == "packed" else self.padded_tokens(documents, seq) / seq

    def used_share(self, seq: int, documents: int) -> float:
        """The share of the tokens computed with that is not padding."""
        if self.packing == "packed":
            return self.packed_share(seq)
        return self.mean_tokens(seq) / self.padded_tokens(documents, seq)

    def spread(self, seq: int) -> float:
        """Standard deviation of a document's length, as a share of the mean."""
        mean = self.mean_tokens(seq)
        variance = sum(share * (min(length, seq) - mean) ** 2 for length, share in self.counts)
        return float(variance**0.5 / mean)


@lru_cache(maxsize=4096)
def _mean_of_longest(counts: tuple[tuple[int, float], ...], documents: int, seq: int) -> float:
    below = mean = 0.0
    for length, share in counts:
        upto = min(1.0, below + share)
        mean += min(length, seq) * (upto**documents - below**documents)
        below = upto
    return mean + min(counts[-1][0], seq) * (1 - below**documents)


_DOCUMENTS = 4096  # that first-fit is tried on


@lru_cache(maxsize=256)
def _packed_share(counts: tuple[tuple[int, float], ...], seq: int) -> float:
    """How full first-fit makes sequences of documents in a random order: tried, since it has no closed form."""
    drawn, total = [], 0.0
    for length, share in counts:
        last, total = round(total * _DOCUMENTS), total + share
        drawn += [min(length, seq)] * (round(total * _DOCUMENTS) - last)
    step = 1597  # coprime with their number: a fixed order that mixes all lengths
    order = [drawn[index * step % len(drawn)] for index in range(len(drawn))]
    open_rooms: list[int] = []
    used = sequences = 0
    for length in order:
        used += length
        place = next((index for index, room in enumerate(open_rooms) if room >= length), None)
        if place is None:
            sequences += 1
            open_rooms.append(seq - length)
        else:
            open_rooms[place] -= length
        open_rooms = [room for room in open_rooms if room >= counts[0][0]][-_OPEN:]
    return used / (sequences * seq)


_OPEN = 256  # sequences that are filled at a time


_STEPS = 64  # lengths that stand for a law; finer ones change no price by 1%


def _cut_exponential(mean: float, longest: int) -> tuple[tuple[int, float], ...]:
    """Shares exp(-rate·x) on (0, longest] with the given mean, the rate by bisection; flat or rising above half."""
    middles = [(step + 0.5) / _STEPS for step in range(_STEPS)]

    def shares(rate: float) -> list[float]:
        weights = [exp(-rate * (x - (0 if rate > 0 else 1))) for x in middles]
        return [weight / sum(weights) for weight in weights]

    target, low, high = min(max(mean / longest, 0.5 / _STEPS), 1 - 0.5 / _STEPS), -500.0, 500.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(map(float.__mul__, shares(rate), middles)) > target else (low, rate)
    lengths = [max(1, round(x * longest)) for x in middles]
    lengths[-1] = longest
    summed: dict[int, float] = {}
    for length, share in zip(lengths, shares((low + high) / 2)):
        summed[length] = summed.get(length, 0.0) + share
    return tuple(sorted(summed.items()))
