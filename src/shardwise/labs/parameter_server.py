"""Lab: a parameter server on Ray (server actors and worker actors) against the engine's all-reduce.

Workers push gradients and pull weights through Ray; an all-reduce trains the same model with the same batches and
optimizer. In the end the weights must be the same, and a server's link must have carried what the formula says. Without
Ray the servers are processes of `torch.distributed`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shardwise.cost.traffic.data import server_price
from shardwise.engine.data.synchronisation import ServerRecord
from shardwise.labs.ranks import DENSE
from shardwise.labs.registry import LabFinding, LabReport, LabSetup
from shardwise.launch.ray.cluster import ray_cluster
from shardwise.layout.pieces import ServerPlan
from shardwise.measure.parameter_server import (
    TOLERANCE,
    MeasuredWay,
    ServerRequest,
    by_all_reduce,
    compare_servers,
    first_model,
    optimizer_of,
    own_gradient,
)
from shardwise.report.console import bar, table
from shardwise.report.page import Line, Piece
from shardwise.spec.installation import is_installed
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_bytes, readable_seconds

WORKERS, STEPS, SHORT_STEPS = 2, 8, 3
_DRAWING = """\
one server: every worker's bytes cross its link        all-reduce: every link carries the same

   worker 0 ──┐ G in                                    rank 0 ⇄ rank 1
              ├──▶ server ──┬─▶ worker 0                  ▲         │
   worker 1 ──┘             └─▶ worker 1 (W out)          └── ... ◀─┘
   server: n·G in, n·W out                              each: 2(n−1)/n·G out, as much in
"""


class ServerActor:
    """Keeps a part of the weights, and updates it once the gradients of all workers have arrived."""

    def __init__(self, request: ServerRequest, number: int) -> None:
        torch.set_num_threads(1)
        self.plan, part = request.plan, request.plan.part(number)
        start = parameters_to_vector(first_model(request).parameters()).detach()
        self.weights = start[part.start : part.stop].clone().requires_grad_()
        self.optimizer = optimizer_of(request.job)(self.weights, 1.0)
        self.record, self.gradients = ServerRecord(), dict[int, Tensor]()

    def pull(self) -> Any:
        self.record.sent_bytes += self.weights.nbytes
        return self.weights.detach().numpy().copy()

    def push(self, worker: int, gradient: Any) -> None:
        self.record.received_bytes += gradient.nbytes
        self.gradients[worker] = torch.from_numpy(gradient.copy())
        if len(self.gradients) == self.plan.workers:
            total = torch.zeros_like(self.weights)
            for number in sorted(self.gradients):  # in a fixed order, so that every run has the same bits
                total += self.gradients[number]
            self.gradients.clear()
            self.weights.grad = total
            self.optimizer.step()

    def result(self) -> tuple[Any, ServerRecord]:
        return self.weights.detach().numpy().copy(), self.record


class WorkerActor:
    """Computes the gradient of its share of each batch."""

    def __init__(self, request: ServerRequest, number: int, servers: Sequence[Any]) -> None:
        torch.set_num_threads(1)
        self.request, self.number, self.servers = request, number, servers
        self.model = first_model(request)

    def pull(self) -> None:
        import ray

        parts = ray.get([server.pull.remote() for server in self.servers])
        whole = torch.cat([torch.from_numpy(part.copy()) for part in parts])
        vector_to_parameters(whole, self.model.parameters())

    def compute(self, step: int) -> float:
        import ray

        loss, gradient = own_gradient(self.model, self.request, step, self.number)
        plan = self.request.plan
        parts = [gradient[part.start : part.stop].numpy() for part in map(plan.part, range(plan.servers))]
        ray.get([server.push.remote(self.number, part) for server, part in zip(self.servers, parts)])
        return loss


@dataclass(frozen=True)
class ServedRun:
    """A run with some number of servers: what they counted, and how it ended."""

    plan: ServerPlan
    steps: int
    way: MeasuredWay

    @property
    def busiest_bytes(self) -> int:
        """Bytes in and out of the busiest server in a step."""
        return max(
            server.received_bytes // self.steps + server.sent_bytes // (self.steps + 1) for server in self.way.servers
        )


def run(setup: LabSetup) -> LabReport:
    steps, numbers = (SHORT_STEPS, (1,)) if setup.short else (STEPS, (1, WORKERS))
    requests = [ServerRequest(_job(), servers, staleness=0, steps=steps) for servers in numbers]
    setup.on_progress(f"all-reduce of {WORKERS} ranks")
    reduced = by_all_reduce(requests[0], setup.pool)
    if is_installed("ray"):
        with ray_cluster(None, processors=WORKERS + max(numbers)):
            runs = [_on_ray(setup, request) for request in requests]
        where = "Ray actors on a local Ray"
    else:
        served = [compare_servers(request, setup.on_progress, setup.pool).synchronous for request in requests]
        runs = [ServedRun(request.plan, request.steps, way) for request, way in zip(requests, served)]
        where = "processes of torch.distributed (Ray is not installed: pip install 'shardwise[ray]')"
    findings = [finding for each in runs for finding in _findings(each, reduced)]
    pieces = (Line(_DRAWING, fixed=True), Line(f"Servers and workers are {where}.\n"), *_tables(runs, reduced))
    return LabReport(pieces, tuple(findings))


def _job() -> Job:
    optimization = {"learning_rate": 0.1, "clip_norm": None, "decay": 0.0, "epsilon": 1e-5}
    training = {"global_batch": 4, "seq": 32, "precision": "fp32", "optimizer": "sgd", "optimization": optimization}
    strategy = {"dp": WORKERS, "zero": 0, "microbatch": 2}
    return Job.from_dict({"model": DENSE, "cluster": f"laptop:{WORKERS}", "strategy": strategy, "training": training})


def _on_ray(setup: LabSetup, request: ServerRequest) -> ServedRun:
    import ray

    setup.on_progress(f"{counted(request.servers, 'server actor')} and {counted(WORKERS, 'worker actor')} on Ray")
    server, worker = (ray.remote(num_cpus=1)(kind) for kind in (ServerActor, WorkerActor))
    servers = [server.remote(request, number) for number in range(request.servers)]
    workers = [worker.remote(request, number, servers) for number in range(WORKERS)]
    ray.get([worker.pull.remote() for worker in workers])
    began, losses = time.perf_counter(), []
    for step in range(request.steps):
        losses.append(sum(ray.get([worker.compute.remote(step) for worker in workers])))
        ray.get([worker.pull.remote() for worker in workers])
    seconds = (time.perf_counter() - began) / request.steps
    ends = ray.get([server.result.remote() for server in servers])
    for actor in (*servers, *workers):
        ray.kill(actor)
    weights = torch.cat([torch.from_numpy(part.copy()) for part, _ in ends])
    way = MeasuredWay("ray", tuple(losses), seconds, 0.0, weights, tuple(record for _, record in ends))
    return ServedRun(request.plan, request.steps, way)


# -- theory beside measurement ---------------------------------------------------------------------------


def _findings(served: ServedRun, reduced: MeasuredWay) -> Iterator[LabFinding]:
    name = counted(served.plan.servers, "server")
    apart = (served.way.weights - reduced.weights).abs() <= TOLERANCE * reduced.weights.abs().max()
    yield LabFinding(
        f"{name}: weights that are the all-reduce's", reduced.weights.numel(), int(apart.sum()), 0,
        f"weights: the same sums in another place, to {TOLERANCE:g} of the largest weight",
    )  # fmt: skip
    yield LabFinding(
        f"{name}: loss of the last step", reduced.losses[-1], served.way.losses[-1], 1e-5, "loss: the same training"
    )
    planned = [
        (served.plan.received_bytes(at, served.steps), served.plan.sent_bytes(at, served.steps))
        for at in range(served.plan.servers)
    ]
    for what, number in (("gradients into", 0), ("weights out of", 1)):
        got = [(each.received_bytes, each.sent_bytes)[number] for each in served.way.servers]
        yield LabFinding(
            f"{name}: {what} the busiest", max(each[number] for each in planned), max(got), 0,
            "bytes: n workers push G and pull W; a server has its part of both (Li et al., OSDI 2014)", unit="bytes",
        )  # fmt: skip
    ring = 2 * float(server_price(served.plan, _job().cluster).all_reduce.sent_bytes)  # out and in
    theory = (served.plan.push_bytes + served.plan.pull_bytes) / ring
    yield LabFinding(
        f"{name}: the busiest link over a ring's", theory, served.busiest_bytes / ring, 1e-3,
        "link: n·(G + W)/s of s servers against 2·2(n−1)/n·G of a ring (Jiang et al., OSDI 2020, section 3)",
    )  # fmt: skip


def _tables(runs: Sequence[ServedRun], reduced: MeasuredWay) -> Iterator[Piece]:
    plan = runs[0].plan
    ring = 2 * float(server_price(plan, _job().cluster).all_reduce.sent_bytes)
    links = [(counted(served.plan.servers, "server"), float(served.busiest_bytes)) for served in runs]
    links.append(("all-reduce", ring))
    most = max(size for _, size in links)
    rows = [(name, bar(size / most, 30), readable_bytes(size)) for name, size in links]
    yield table("Bytes over the busiest link, in and out, in a step", ("", "", "bytes"), rows, numbers_from=2)
    times = [(counted(served.plan.servers, "server"), readable_seconds(served.way.step_seconds)) for served in runs]
    times.append(("all-reduce", readable_seconds(reduced.step_seconds)))
    yield table("A step on these shared cores", ("", "step"), times)
