"""Every line of communication that `analyze` prints costs what `explain` says of that collective on that network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from cost.builders import LLAMA, MLA_MOE, MOE, job, switched
from cost.jobs import valid_jobs
from effort import examples
from shardwise.collectives import CollectiveKind, Topology, collective_cost, p2p_latency
from shardwise.cost.analysis import analyze
from shardwise.cost.step.simulation import COMMUNICATION
from shardwise.cost.traffic.traffic import Traffic
from shardwise.layout.groups import expert_runs, expert_tensor_runs, group_runs
from shardwise.layout.network import level_names, network, spanned
from shardwise.layout.payloads import Share
from shardwise.layout.sharding import dense_ranks, divided_over, expert_ranks
from shardwise.report.explain.collective import explain_collective
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.network import Link
from shardwise.spec.stack import Stack

PROPERTY = settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))


def networks(case: Job, line: Traffic) -> Iterator[Topology]:
    """Those that a line of its dimension may go over, by the ranks that the layout gives it."""
    strategy, shards = case.strategy, divided_over(case.strategy)
    experts = line.payload.share is Share.EXPERTS
    if line.dimension == "dp":
        held = expert_ranks(strategy, shards) if experts else dense_ranks(strategy, shards)
        runs = [held.sharded, held.replicas]
    elif line.dimension == "tp" and experts and (strategy.sequence_parallel or strategy.tp == 1):
        runs = [expert_tensor_runs(strategy)]
    else:
        runs = [expert_runs(strategy) if line.dimension == "ep" else group_runs(strategy, (line.dimension,))]
    for one in runs:
        found = spanned(case.cluster, one, "strategy")
        if found is not None:  # stages move in step: the slowest boundary sets the pace of all messages
            yield Topology(found.levels[-1:]) if line.dimension == "pp" else found


def lines_of(case: Job) -> list[Traffic]:
    analysis = analyze(case)
    return [line for name in COMMUNICATION for line in analysis.dimension_traffics(name)]


def of_line(case: Job, line: Traffic) -> Topology:
    """Its network; of two that are called alike (on a torus, near and far ranks) the one with its price."""
    alike = [one for one in networks(case, line) if level_names(one) == line.network]
    seconds = float(line.cost.seconds)
    prices = [
        float(collective_cost(line.kind, line.size_bytes, one, case.strategy.collective).seconds) for one in alike
    ]
    return min(zip(prices, alike), key=lambda one: abs(one[0] - seconds))[1]


def check(case: Job) -> set[str]:
    """Checks all lines; the dimensions that have some."""
    lines = lines_of(case)
    for line in lines:
        if line.dimension == "offload":
            _check_message(case, line)
        elif line.cost.algorithm == "deduplicated":
            _check_deduplicated(of_line(case, line), line)
        else:
            parts = line.cost.algorithm.split(", then all-gather, ")
            cost = collective_cost(line.kind, line.size_bytes, of_line(case, line), case.strategy.collective)
            if len(parts) == 1:
                assert line.cost == cost
            else:
                _check_scattered(case, line, float(cost.seconds))
    return {line.dimension for line in lines}


def _check_message(case: Job, line: Traffic) -> None:
    link = case.cluster.host_link
    if link is not None and case.strategy.offload.target == "cpu":
        memory = case.cluster.host.copied_bytes / case.cluster.node_devices
        rates = (min(link.bandwidth * link.efficiency, memory / busy) for busy in (1, 2))  # in one direction, in both
        links = (replace(link, bandwidth=rate, efficiency=1.0) for rate in rates)
        prices = [pytest.approx(float(p2p_latency(line.size_bytes, one).latency)) for one in links]
        assert float(line.cost.seconds) in prices


def _check_deduplicated(topology: Topology, line: Traffic) -> None:
    """A composite: an exchange on every level alone, of the tokens that visit it, of which the slowest counts."""
    alone = []
    for level, part in zip(topology.levels, line.cost.levels):
        blocks = level.shape.exchange_load * topology.sharing(part.level_index)
        one = collective_cost(CollectiveKind.ALL_TO_ALL, part.bytes / blocks * level.size, Topology((level,)), "direct")
        alone.append(float(one.bandwidth_seconds) * topology.sharing(part.level_index))
        assert part.latency_seconds == pytest.approx(float(one.latency_seconds))
    assert float(line.cost.bandwidth_seconds) == pytest.approx(max(alone))
    assert float(line.cost.latency_seconds) == pytest.approx(sum(part.latency_seconds for part in line.cost.levels))


def _check_scattered(case: Job, line: Traffic, message_seconds: float) -> None:
    """A composite: a part of the activations is sent by every tensor-parallel rank, and all of them gathered."""
    within = spanned(case.cluster, group_runs(case.strategy, ("tp",)), "strategy.tp")
    assert within is not None
    gather = collective_cost("all_gather", line.size_bytes * case.strategy.tp, within, case.strategy.collective)
    assert line.cost.algorithm.endswith(gather.algorithm)
    assert float(line.cost.seconds) == pytest.approx(message_seconds + float(gather.seconds))


@PROPERTY
@given(valid_jobs())
def test_a_line_costs_what_its_collective_does(case: Job) -> None:
    check(case)


DGX = cluster_from("dgx-h100:2")
CASES = {
    "zero 1": job(LLAMA, DGX, tp=2, dp=8, zero=1),
    "zero 3 in groups": job(LLAMA, DGX, tp=2, dp=8, zero=3, shard_group=4),
    "no sp": job(LLAMA, DGX, tp=4, dp=4, sequence_parallel=False),
    "ring": job(LLAMA, DGX, cp=4, dp=4, context_method="ring"),
    "gathered keys": job(LLAMA, DGX, cp=4, dp=4, context_method="all-gather"),
    "ulysses": job(LLAMA, DGX, cp=2, dp=8, context_method="ulysses"),
    "experts on a node": job(MOE, DGX, dp=16, ep=8),
    "experts across": job(MOE, DGX, dp=16, ep=16),
    "deduplicated": job(MLA_MOE, DGX, dp=16, ep=16, dispatch="deduplicated"),
    "split experts": job(MOE, DGX, tp=2, dp=8, ep=4),
    "pipeline": job(LLAMA, DGX, tp=2, dp=2, pp=4),
    "straddling": job(LLAMA, switched(6, 4), tp=4, dp=6),
}


@pytest.mark.parametrize("name", CASES)
def test_lines_of_each_dimension(name: str) -> None:
    case = CASES[name]
    strategy = case.strategy
    used = {one for one in ("tp", "cp", "pp") if strategy.degree(one) > 1} | ({"ep"} if strategy.ep > 1 else set())
    assert used <= check(case) | {"dp"}


def test_scattered_messages_name_their_parts() -> None:
    """Megatron of 2022 without sequence parallelism: each tensor-parallel rank sends a part."""
    plain = job(LLAMA, DGX, tp=4, dp=2, pp=2, sequence_parallel=False)
    case = replace(plain, stack=presets.load("stack", Stack, "megatron-core@2022"))
    check(case)
    message = next(line for line in lines_of(case) if line.dimension == "pp")
    assert ", then all-gather, " in message.cost.algorithm


def test_explain_prints_the_same() -> None:
    """The exchange of expert tokens on one node, as the issue tracker had it: one price in both."""
    one_node = cluster_from("dgx-h100:1")
    case = job(MOE, one_node, dp=8, ep=8)
    line = next(one for one in lines_of(case) if one.dimension == "ep")
    told = dict(explain_collective(line.kind, line.size_bytes, network(one_node), "auto").result)
    assert told["total"].value == pytest.approx(float(line.cost.seconds))
    assert told["bytes the busiest rank sends"].value == pytest.approx(float(line.cost.sent_bytes))


def test_a_message_reaches_what_its_link_does() -> None:
    link = Link(bandwidth=10e9, latency=1e-6, efficiency=0.8)
    assert float(p2p_latency(8e9, link).latency) == pytest.approx(1 + 1e-6)
