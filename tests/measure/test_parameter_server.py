"""Parameter servers: the plan of their traffic, servers and workers that keep to it, and weights as by all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.running import run, run_json
from engine.workers import on_ranks, pool
from shardwise.cost.traffic.data import server_price
from shardwise.layout.pieces import ServerPlan
from shardwise.measure.parameter_server import TOLERANCE, ServerRequest, compare_servers
from shardwise.spec import Job
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError

# -- the plan --------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 10_000), st.integers(1, 9))
def test_the_parts_of_all_servers_are_all_weights_once(workers: int, servers: int, more: int, steps: int) -> None:
    plan = ServerPlan(workers, servers, servers + more)
    parts = [plan.part(server) for server in range(servers)]
    assert [one for part in parts for one in part] == list(range(plan.elements))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    received = sum(plan.received_bytes(server, steps) for server in range(servers))
    sent = sum(plan.sent_bytes(server, steps) for server in range(servers))
    assert (received, sent) == (workers * steps * plan.elements * 4, workers * (steps + 1) * plan.elements * 4)


def test_one_server_is_the_bottleneck_and_one_for_each_worker_is_as_an_all_reduce() -> None:
    """On a switch without latency: n·(G + W) over one link against 2·(n−1)/n·G over each."""
    text = {"levels": [{"name": "net", "topology": "switch", "size": 8, "bandwidth": "10GB/s", "latency": "0s"}]}
    cluster = cluster_from({"device": "h100-sxm", **text})
    plans = [ServerPlan(8, servers, 8_000_000) for servers in (1, 2, 4, 8)]
    prices = [server_price(plan, cluster) for plan in plans]
    gradients_seconds = 8_000_000 * 4 / 10e9
    assert [one.synchronous for one in prices] == pytest.approx([gradients_seconds * 2 * n for n in (8, 4, 2, 1)])
    reduced = float(prices[0].all_reduce.seconds)
    assert prices[-1].synchronous / reduced == pytest.approx(8 / 7)
    assert prices[0].synchronous / prices[-1].synchronous == pytest.approx(8)
    assert prices[0].asynchronous(1.0) == pytest.approx(1.0 + 2 * gradients_seconds)
    assert prices[0].asynchronous(0.0) == pytest.approx(8 * gradients_seconds)  # its link is the limit


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"servers": 0}, {"servers": 11}])
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SpecError):
        ServerPlan(**{"workers": 2, "servers": 1, "elements": 10, **wrong})


def test_the_explanation_has_the_bytes_of_the_plan() -> None:
    found = run_json("explain", "parameter-server", "--model", "llama3-8b", "--cluster", "dgx-h100:2", "--servers", "1")
    weights, workers, each = (
        next(one["number"] for one in found["numbers"] if one["symbol"] == symbol) for symbol in ("P", "n", "e_g")
    )
    plan = ServerPlan(workers, 1, weights, each, each)
    assert found["result"][0]["bytes"] == plan.received_bytes(0, 1) + plan.sent_bytes(0, 0) == 2 * 16 * weights * each


# -- servers and workers ---------------------------------------------------------------------------


def job_of(workers: int, optimizer: str = "sgd", **training: Any) -> Job:
    optimization = {"learning_rate": 0.1 if optimizer == "sgd" else 1e-3, "clip_norm": None, "decay": 0.0}
    return Job.from_dict(
        {
            "model": "tiny",
            "cluster": f"laptop:{workers}",
            "strategy": {"dp": workers, "zero": 0},
            "training": {
                "global_batch": 2 * workers, "seq": 16, "precision": "fp32", "optimizer": optimizer,
                "optimization": {**optimization, "epsilon": 1e-4}, **training,
            },
        }
    )  # fmt: skip


@pytest.mark.slow
def test_servers_that_wait_end_in_the_weights_of_the_all_reduce() -> None:
    """Three workers, two servers with parts of different sizes. Without staleness and momentum the asynchronous ones
    do the same: each gradient of a step is applied by itself, to weights that all have."""
    found = compare_servers(ServerRequest(job_of(3), servers=2, staleness=0, steps=5), pool=pool())
    assert found.faults == []
    assert found.difference(found.synchronous) <= TOLERANCE
    assert found.difference(found.asynchronous) <= TOLERANCE
    assert found.synchronous.losses == pytest.approx(found.all_reduce.losses, rel=1e-5)
    assert found.measured_bytes(found.synchronous) == found.planned_bytes()
    assert found.measured_bytes(found.asynchronous) == found.planned_bytes()
    plan = found.request.plan
    moved = found.all_reduce.weights
    assert len(moved) == plan.elements
    other = compare_servers(ServerRequest(job_of(3), servers=1, staleness=0, steps=1), pool=pool())
    assert not other.all_reduce.weights.equal(moved)  # it trained


@pytest.mark.slow
def test_adamw_at_the_servers_is_the_engines() -> None:
    found = compare_servers(ServerRequest(job_of(2, "adamw"), servers=1, staleness=3, steps=3), pool=pool())
    assert found.faults == []
    assert found.widest_gap(found.asynchronous) <= 3


def _two_paces(staleness: int) -> Any:
    """Worker 1 begins once worker 0 has pushed one gradient more than it may have an answer to."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from shardwise.engine.data.synchronisation import ParameterServer, ServerClient

    plan, steps, rank = ServerPlan(2, 1, 10), staleness + 3, dist.get_rank()
    store = distributed_c10d._get_default_store()
    if rank == 2:
        server = ParameterServer(plan, 0, torch.zeros(10), lambda weights, share: torch.optim.SGD([weights], lr=share))
        server.serve_apart(steps, staleness)
        return server.record.gaps, server.record.missed, server.weights.detach().tolist()
    client = ServerClient(plan)
    client.pull()
    if rank == 1:
        store.wait(["ahead"])
    for step in range(steps):
        client.push(torch.full((10,), -1.0))
        if rank == 0 and step == staleness:
            store.set("ahead", "1")
        client.pull()
    return client.weights.tolist()


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_goes_on_further_ahead_than_the_bound(staleness: int) -> None:
    gaps, missed, weights = on_ranks(3, _two_paces, staleness)[2]
    assert max(gaps) == staleness
    steps = staleness + 3
    assert len(gaps) == len(missed) == 2 * steps
    assert max(missed) <= 2 * staleness + 1  # the other worker's, since the weights were given
    assert weights == pytest.approx([2.0 * steps] * 10)  # every gradient of -1 moves by 1/2 · 2 · 1


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--workers", "0"), "--workers"),
        (("--servers", "x"), "--servers"),
        (("--staleness", "-1"), "--staleness: '-1' is not a number of steps"),
        (("--workers", "3", "--global-batch", "8"), "8 sequences do not divide over 3 workers"),
        (("--optimizer", "muon"), "--optimizer: 'muon' is not compared here; use sgd or adamw"),
        (("--model", "mixtral-8x7b"), "use a dense model"),
        (("--slow", "fast"), "--slow"),
        (("--workers", "4000"), "4,001 processes on"),
    ],
)
def test_bad_input_is_one_line(flags: tuple[str, ...], words: str) -> None:
    found = run("bench", "parameter-server", *flags)
    assert found.status == 2
    assert words in found.err.splitlines()[-1]


def test_a_job_with_parameter_servers_is_refused_with_the_reason() -> None:
    given = ("--model", "tiny", "--cluster", "laptop:2", "--seq", "32", "--global-batch", "4")
    for setting in ("strategy.synchronise=parameter-server", "strategy.synchronise.method=parameter-server"):
        found = run("train", *given, "--set", setting)
        assert found.status == 2
        assert "parameter-server is a comparison here, no way to train" in found.err
        assert "`shardwise bench parameter-server` shows the difference" in found.err
