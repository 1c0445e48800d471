"""The matrix of a cluster: bandwidth and latency between every two nodes, measured by round trips."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.engine.mesh import process_group
from shardwise.measure.calibrate.ranks import Rank, Ranks
from shardwise.spec.wiring import PairLink, Wiring

Pair = tuple[int, int]  # of nodes, the lower number first

# -- one pair ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairFigures:
    """Bytes/s in one direction and seconds one way, of the slowest rank among those that sent at once."""

    bandwidth: float
    latency: float


_SMALL, _PINGS, _ROUNDS = 8, 20, 3
_FIRST_BYTES, _MOST_BYTES, _ENOUGH_SECONDS = 2**18, 2**26, 0.05


def rounds_of_pairs(nodes: int) -> list[list[Pair]]:
    """Pairs every two nodes once, each node at most once in a round: a round-robin tournament (Kirkman 1847)."""
    seats: list[int | None] = list(range(nodes)) + [None] * (nodes % 2)
    rounds = []
    for _ in range(len(seats) - 1):
        facing = list(zip(seats[: len(seats) // 2], reversed(seats)))
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_pairs(rank: Rank, device: str, rounds: Sequence[Sequence[Pair]]) -> dict[Pair, PairFigures]:
    """Measures rank i of a node with rank i of another, for all i and all pairs of a round at once."""
    own, place = divmod(rank.number, rank.ranks_per_host)
    measured: dict[Pair, PairFigures] = {}
    with process_group(rank.number, rank.world, rank.store, device=device, seconds=600):
        for pairs in rounds:
            dist.barrier()
            for low, high in pairs:
                if own in (low, high):
                    other = (high if own == low else low) * rank.ranks_per_host + place
                    figures = _one_pair(other, device, asks=own == low)
                    if figures is not None:
                        measured[low, high] = figures
    return measured


def _one_pair(other: int, device: str, *, asks: bool) -> PairFigures | None:
    """The rank of the lower node ``asks``: it announces each size, and measures; the other sends everything back."""
    if not asks:
        while size := _received_size(other):
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            dist.recv(message, other)
            dist.send(message, other)
        return None
    _round_trip(other, _SMALL, device)  # connects
    latency = min(_round_trip(other, _SMALL, device) for _ in range(_PINGS)) / 2
    size, seconds = _FIRST_BYTES, _round_trip(other, _FIRST_BYTES, device)
    while seconds < _ENOUGH_SECONDS and size < _MOST_BYTES:
        size *= 4
        seconds = _round_trip(other, size, device)
    seconds = min(seconds, *(_round_trip(other, size, device) for _ in range(_ROUNDS)))
    _send_size(other, 0)
    return PairFigures(2 * size / seconds, latency)


def _round_trip(other: int, size: int, device: str) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    _send_size(other, size)
    _wait(device)
    began = time.perf_counter()
    dist.send(message, other)
    dist.recv(message, other)
    _wait(device)
    return time.perf_counter() - began


def _send_size(other: int, size: int) -> None:
    dist.send(torch.tensor([size]), other)


def _received_size(other: int) -> int:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, other)
    return int(size)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def slowest_of_ranks(of_ranks: Sequence[Mapping[Pair, PairFigures]]) -> dict[Pair, PairFigures]:
    """The figures of every pair of nodes, from those that each rank measured."""
    by_pair: dict[Pair, list[PairFigures]] = {}
    for own in of_ranks:
        for pair, figures in own.items():
            by_pair.setdefault(pair, []).append(figures)
    return {
        pair: PairFigures(min(figures.bandwidth for figures in same), max(figures.latency for figures in same))
        for pair, same in sorted(by_pair.items())
    }


def better(first: PairFigures, other: PairFigures) -> PairFigures:
    return PairFigures(max(first.bandwidth, other.bandwidth), min(first.latency, other.latency))


# -- all pairs ---------------------------------------------------------------------------------------

SLOW = 1.3  # times slower than the others
LATE = 3.0  # times the others' latency
_AGAIN = 2  # times that slow pairs are measured again


def measured_matrix(ranks: Ranks, nodes: int, device: str) -> dict[Pair, PairFigures]:
    """Measures every two nodes; slow pairs again by themselves, since something else may have run meanwhile."""
    matrix = slowest_of_ranks(ranks.run(measure_pairs, device, rounds_of_pairs(nodes)))
    for _ in range(_AGAIN):
        slow = slow_pairs(matrix)
        if not slow:
            break
        again = slowest_of_ranks(ranks.run(measure_pairs, device, [[pair] for pair in slow]))
        matrix |= {pair: better(matrix[pair], figures) for pair, figures in again.items()}
    return matrix


def usual(figures: Mapping[Pair, float], best: Callable[[Iterable[float]], float]) -> float:
    """The median of every node's ``best`` figure: of three nodes, one bad one spoils two thirds of the pairs."""
    nodes = {node for pair in figures for node in pair}
    bests = [best(figure for pair, figure in figures.items() if node in pair) for node in nodes]
    return (statistics.median_high if best is max else statistics.median_low)(bests)


def slow_pairs(matrix: Mapping[Pair, PairFigures]) -> list[Pair]:
    """The pairs that are much slower than most."""
    rate = usual({pair: figures.bandwidth for pair, figures in matrix.items()}, max)
    late = usual({pair: figures.latency for pair, figures in matrix.items()}, min)
    return [
        pair for pair, figures in matrix.items() if figures.bandwidth * SLOW < rate or figures.latency > LATE * late
    ]


def wiring_of(
    hosts: Sequence[str],
    figures: Mapping[Pair, PairFigures],
    source: str,
    switches: Mapping[str, tuple[str, ...]] | None = None,
) -> Wiring:
    """The `cluster.wiring` of a job; ``switches`` are those above the hosts, if known."""
    links = tuple(
        PairLink(
            between=(hosts[a], hosts[b]), bandwidth=_rounded(measured.bandwidth), latency=_rounded(measured.latency)
        )
        for (a, b), measured in figures.items()
    )
    how = f"{source}: messages there and back, all pairs of a round at once"
    return Wiring(hosts=tuple(hosts), switches=dict(switches or {}), links=links, source=how)


def _rounded(figure: float) -> float:
    return float(f"{figure:.3g}")
