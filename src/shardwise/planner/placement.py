"""Which node gets which ranks: the order of the nodes with the fastest predicted step.

Groups of a dimension wait for the slowest link that they use. So an order is judged by what each dimension sends over
the slowest link between neighbours of its groups; the best order is then priced like any other job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from shardwise.collectives import CollectiveKind
from shardwise.cost.analysis import Analysis, analyze
from shardwise.cost.step.simulation import COMMUNICATION
from shardwise.layout.groups import along, division, expert_shape
from shardwise.layout.network import Neighbours, NodeLink, joining_level, link_between, neighbours_of, pairs_used
from shardwise.spec.job import Job
from shardwise.spec.network import NetworkLevel
from shardwise.spec.units import readable_change, readable_seconds
from shardwise.spec.wiring import Wiring

WORTHWHILE = 0.01  # of a step: a smaller gain is within the noise of any run
_ALL_ORDERS = 6  # up to this many nodes every order is tried: 720
_MOST_LOOKS = 2_000_000  # looks at a link in the search for an order of many nodes
_NEARNESS = 1e-3  # weight of all links together beside the slowest: of equal orders the nearer one wins


@dataclass(frozen=True)
class NodePlacement:
    """The best order of the hosts, against the order they were given in."""

    job: Job  # the job with its wiring in the order of the ranks
    given: tuple[str, ...]
    hosts: tuple[str, ...]
    given_seconds: float  # seconds of a step with the hosts as given
    seconds: float  # seconds of a step in the best order

    @property
    def gain(self) -> float:
        """The share of a step that is saved."""
        return 1 - self.seconds / self.given_seconds


def place_nodes(job: Job, hosts: Sequence[str]) -> NodePlacement | None:
    """The best order of ``hosts``, of which the job may need only some; None if the job's wiring lacks any of them.

    The order stays as given unless another is predicted to be faster, or as fast with nearer nodes.
    """
    wiring = None if job.cluster.wiring is None else job.cluster.wiring.of(hosts)
    nodes = job.cluster.nodes
    if wiring is None or nodes < 2 or len(hosts) < nodes:
        return None
    given = _wired(job, wiring)
    order = _best_order(given, len(hosts))
    best = _wired(job, wiring.ordered(order))
    before, after = (analyze(placed).predicted_seconds for placed in (given, best))
    judged = _Judged(given)
    first = tuple(range(nodes))
    if after > before or judged.seconds(order[:nodes]) >= judged.seconds(first):
        best, after = given, before
    assert best.cluster.wiring is not None
    chosen = best.cluster.wiring.hosts[:nodes]
    return NodePlacement(best, tuple(hosts[:nodes]), chosen, before, after)


def _wired(job: Job, wiring: Wiring) -> Job:
    return replace(job, cluster=replace(job.cluster, wiring=wiring))


def placement_words(placement: NodePlacement) -> str | None:
    """What the new order is worth; None if the nodes stay as given."""
    if placement.hosts == placement.given:
        return None
    if placement.gain < WORTHWHILE:
        return f"{_few(placement.hosts)}: neighbouring ranks on neighbouring nodes, with the same predicted step"
    step = f"a step of {readable_seconds(placement.seconds)} instead of {readable_seconds(placement.given_seconds)}"
    return f"{_few(placement.hosts)}: {step} ({readable_change(-placement.gain)}) is predicted"


def _few(hosts: Sequence[str], most: int = 8) -> str:
    return ", ".join(hosts[:most]) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")


# -- how good an order is --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BetweenNodes:
    """What one dimension sends between nodes in a step, priced at the planned links, and between which pairs."""

    bandwidth_seconds: float
    latency_seconds: float
    pairs: tuple[tuple[int, int], ...]


class _Judged:
    """Judges orders of the nodes by their seconds of communication; an order permutes the nodes as ``job`` has them."""

    def __init__(self, job: Job) -> None:
        plain = analyze(replace(job, cluster=replace(job.cluster, wiring=None)))
        self._cluster = job.cluster
        self._sent = list(_sent(plain))
        self.pairs = sum(len(sent.pairs) for sent in self._sent)
        self._levels = {pair: joining_level(job.cluster, *pair) for sent in self._sent for pair in sent.pairs}
        self._links: dict[tuple[str, int, int], NodeLink] = {}

    def seconds(self, order: Sequence[int]) -> float:
        total = 0.0
        for sent in self._sent:
            slow, late = [], []
            for pair in sent.pairs:
                level = self._levels[pair]
                link = self._link(level, order[pair[0]], order[pair[1]])
                slow.append(1 / link.share)
                late.append(link.latency / (level.latency_per_step or 1e-9))
            for weight, figures in ((sent.bandwidth_seconds, slow), (sent.latency_seconds, late)):
                # fsum rounds exactly, so that orders which use the same links are equal.
                total += weight * (max(figures) + _NEARNESS * math.fsum(figures) / len(figures))
        return total + _NEARNESS**2 * self._tiers(order)

    def _link(self, level: NetworkLevel, node: int, other: int) -> NodeLink:
        key = (level.name, node, other)
        if key not in self._links:
            self._links[key] = link_between(self._cluster, level, node, other)
        return self._links[key]

    def _tiers(self, order: Sequence[int]) -> int:
        """Switches between neighbouring nodes, summed: where links cost the same, nearer is better."""
        wiring = self._cluster.wiring
        assert wiring is not None
        return sum(wiring.tier(node, other) or 0 for node, other in zip(order, [*order[1:], order[0]]))


def _sent(analysis: Analysis) -> Iterator[_BetweenNodes]:
    """What each dimension sends over levels outside a node."""
    job = analysis.job
    node_devices, below, inner = job.cluster.node_devices, 1, set[str]()
    for level in job.cluster.levels:
        below *= level.width
        if below <= node_devices:
            inner.add(level.name)
    for dimension in COMMUNICATION:
        sent: dict[Neighbours, list[tuple[float, float]]] = {}
        for traffic in analysis.dimension_traffics(dimension):
            for part in traffic.cost.levels:
                if part.level_name not in inner:
                    figures = traffic.count * float(part.bandwidth_seconds), traffic.count * float(part.latency_seconds)
                    sent.setdefault(_neighbours_in(job, dimension, traffic.kind), []).append(figures)
        for neighbours, parts in sent.items():
            pairs = tuple(sorted(set(pairs_used(_groups(job, dimension), node_devices, neighbours))))
            if pairs:
                yield _BetweenNodes(
                    sum(bandwidth for bandwidth, _ in parts), sum(latency for _, latency in parts), pairs
                )


def _neighbours_in(job: Job, dimension: str, kind: CollectiveKind) -> Neighbours:
    """Which members of a group exchange messages, as `cost` prices it."""
    if dimension == "pp":
        return "line" if job.strategy.chunks_per_rank == 1 else "ring"
    if dimension == "ep" or (dimension == "cp" and job.strategy.context_method == "ulysses"):
        return "all"
    return neighbours_of(job.cluster.library, kind) if dimension == "dp" else "ring"


def _groups(job: Job, dimension: str) -> Iterable[Sequence[int]]:
    strategy = job.strategy
    if dimension == "offload":
        return ()
    if dimension == "ep":
        return division(strategy, expert_shape(strategy))
    return division(strategy, along(strategy, *(("cp", "dp") if dimension == "dp" else (dimension,))))


# -- the search --------------------------------------------------------------------------------------------


def _best_order(job: Job, hosts: int) -> tuple[int, ...]:
    """Few nodes: the best of all orders. More: the best of some guesses, improved by swaps and reversals until none
    helps."""
    nodes, judged = job.cluster.nodes, _Judged(job)
    if hosts <= _ALL_ORDERS:
        return min(permutations(range(hosts), nodes), key=lambda order: (judged.seconds(order), order))
    best = min(_guesses(job, hosts), key=lambda order: judged.seconds(order[:nodes]))
    least, tries, most = judged.seconds(best[:nodes]), 0, _MOST_LOOKS // max(1, judged.pairs)
    improved = True
    while improved and tries < most:
        improved = False
        for order in _neighbours(best, nodes):
            tries += 1
            seconds = judged.seconds(order[:nodes])
            if seconds < least * (1 - 1e-12):
                best, least, improved = order, seconds, True
            if tries >= most:
                break
    return tuple(best)


def _guesses(job: Job, hosts: int) -> Iterator[list[int]]:
    """The order as given; sorted by switches, outermost first; and chains that follow the best link from a node."""
    wiring = job.cluster.wiring
    assert wiring is not None
    yield list(range(hosts))
    yield sorted(range(hosts), key=lambda host: (tuple(reversed(wiring.switches.get(wiring.hosts[host], ()))), host))
    for first in range(min(hosts, 8)):
        chain, left = [first], set(range(hosts)) - {first}
        while left:
            links = {host: wiring.link(chain[-1], host) for host in left}
            rate = {host: link.bandwidth if link is not None else 0.0 for host, link in links.items()}
            chain.append(max(left, key=lambda host: (rate[host], -(wiring.tier(chain[-1], host) or 0), -host)))
            left.remove(chain[-1])
        yield chain


def _neighbours(order: Sequence[int], nodes: int) -> Iterator[list[int]]:
    """Orders one swap away, also with a host that the job does not need, or one reversed run away."""
    for first in range(nodes):
        for second in range(first + 1, len(order)):
            swapped = list(order)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            yield swapped
            if second < nodes and second - first > 1:
                yield [*order[:first], *reversed(order[first : second + 1]), *order[second + 1 :]]


# -- devices of one node -----------------------------------------------------------------------------------


def device_order(distances: Sequence[Sequence[int]], group: int) -> tuple[int, ...]:
    """The devices in an order that puts near ones side by side, ``group`` at a time (`spread` says how near).

    Greedy, each group around the first device left: exact for the pairs and quads that a node is made of.
    """
    left, order = list(range(len(distances))), list[int]()
    while left:
        first, *others = left
        best = min(
            combinations(others, min(group, len(left)) - 1),
            key=lambda some: (spread(distances, (first, *some)), some),
        )
        order += [first, *best]
        left = [device for device in others if device not in best]
    return tuple(order)


def spread(distances: Sequence[Sequence[int]], devices: Sequence[int]) -> tuple[int, int]:
    """The distance of the farthest two of some devices, and the sum of all distances between them."""
    apart = [distances[first][second] for first, second in combinations(devices, 2)]
    return max(apart, default=0), sum(apart)
