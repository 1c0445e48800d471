"""Parameter servers beside an all-reduce: the same model, batches and optimizer, on local processes.

The all-reduce is the engine's own data parallelism without sharding. Every way starts from the same weights; a step is
one global batch, of which every worker has its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shardwise.cost.traffic.data import ServerPrice, server_price
from shardwise.engine.batch import Batch
from shardwise.engine.data.synchronisation import ParameterServer, ServerClient, ServerRecord
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.offload.store import MASTER
from shardwise.engine.parameters import divided_as, local
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.layout.pieces import ServerPlan
from shardwise.measure.reference import sample_batch, sample_weight
from shardwise.models.decoder import Decoder
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count

PRELOAD = ("torch", "shardwise.measure.parameter_server")
TOLERANCE = 1e-5  # between two ways to add up the same gradients, relative to the largest weight
BATCHES = 4  # that are repeated, so that there is something to learn
OPTIMIZERS = ("sgd", "adamw")
_LIMIT_SECONDS = 1800.0


@dataclass(frozen=True)
class ServerRequest:
    job: Job  # with a rank for every worker
    servers: int
    staleness: int
    steps: int
    slow_seconds: float = 0.0  # that the last worker takes longer for each step
    seed: int = 0

    def __post_init__(self) -> None:
        if self.job.model.moe is not None:
            raise SpecError("model", "experts balance over the global batch, which no worker has", "use a dense model")
        if self.job.training.optimizer not in OPTIMIZERS:
            problem = f"a server updates its part of the weights by itself, {self.job.training.optimizer} may not"
            raise SpecError("training.optimizer", problem, f"use {' or '.join(OPTIMIZERS)}")
        optimization = self.job.training.optimization
        if optimization.clip_norm or optimization.decay:
            problem = "clipping needs the norm of all gradients, and only matrices decay: no server knows either"
            raise SpecError("training.optimization", problem, "clip_norm: null, decay: 0")

    @property
    def plan(self) -> ServerPlan:
        return ServerPlan(self.job.strategy.world, self.servers, parameter_count(self.job.model))


@dataclass(frozen=True)
class MeasuredWay:
    """One way to share gradients: the loss of every step, its time, and the weights at the end."""

    name: str
    losses: tuple[float, ...]
    step_seconds: float
    compute_seconds: float
    weights: Tensor
    servers: tuple[ServerRecord, ...] = ()  # what each server counted; none for the all-reduce


@dataclass(frozen=True)
class ServerComparison:
    request: ServerRequest
    price: ServerPrice
    all_reduce: MeasuredWay
    synchronous: MeasuredWay
    asynchronous: MeasuredWay

    @property
    def ways(self) -> tuple[MeasuredWay, ...]:
        return self.all_reduce, self.synchronous, self.asynchronous

    def difference(self, way: MeasuredWay) -> float:
        """The largest difference of a weight from the all-reduce's, relative to the largest weight."""
        other = self.all_reduce.weights
        return float((way.weights - other).abs().max() / other.abs().max())

    def planned_bytes(self) -> list[tuple[int, int]]:
        """Bytes into and out of every server, in all steps."""
        plan, steps = self.request.plan, self.request.steps
        each = range(plan.servers)
        return [(int(plan.received_bytes(server, steps)), int(plan.sent_bytes(server, steps))) for server in each]

    def measured_bytes(self, way: MeasuredWay) -> list[tuple[int, int]]:
        return [(record.received_bytes, record.sent_bytes) for record in way.servers]

    def widest_gap(self, way: MeasuredWay) -> int:
        return max((gap for record in way.servers for gap in record.gaps), default=0)

    @property
    def faults(self) -> list[str]:
        """What contradicts the plan, in words."""
        faults = []
        if self.difference(self.synchronous) > TOLERANCE:
            faults.append(f"synchronous weights are {self.difference(self.synchronous):.1e} from the all-reduce's")
        faults += [
            f"{way.name}: bytes at the servers differ from the plan"
            for way in (self.synchronous, self.asynchronous)
            if self.measured_bytes(way) != self.planned_bytes()
        ]
        if self.widest_gap(self.asynchronous) > self.request.staleness:
            faults.append(f"a worker was {self.widest_gap(self.asynchronous)} steps ahead")
        return faults


def compare_servers(
    request: ServerRequest, on_progress: Callable[[str], None] = lambda text: None, pool: Pool | None = None
) -> ServerComparison:
    """Trains by an all-reduce, by synchronous servers, and by asynchronous ones; on processes of ``pool``, if given."""
    plan = request.plan
    with Pool(PRELOAD) if pool is None else nullcontext(pool) as pool:
        on_progress(f"all-reduce of {plan.workers} ranks")
        ways = [by_all_reduce(request, pool)]
        for name, staleness in (("synchronous", None), ("asynchronous", request.staleness)):
            on_progress(f"{name} servers")
            world = plan.workers + plan.servers
            ranks = pool.run(_serve_or_work, world, request, staleness, timeout_seconds=_LIMIT_SECONDS)
            ways.append(_way(name, ranks, plan))
    return ServerComparison(request, server_price(plan, request.job.cluster), *ways)


def by_all_reduce(request: ServerRequest, pool: Pool) -> MeasuredWay:
    """The engine's all-reduce, on as many ranks as there are workers."""
    plan = request.plan
    return _way("all-reduce", pool.run(_reduce, plan.workers, request, timeout_seconds=_LIMIT_SECONDS), plan)


def _way(name: str, ranks: list[dict[str, Any]], plan: ServerPlan) -> MeasuredWay:
    workers, servers = ranks[: plan.workers], ranks[plan.workers :]
    losses = tuple(sum(parts) for parts in zip(*(worker["losses"] for worker in workers)))
    weights = torch.cat([server["weights"] for server in servers]) if servers else workers[0]["weights"]
    seconds = max(rank["seconds"] for rank in ranks) / len(losses)
    compute = max(worker["compute_seconds"] for worker in workers) / len(losses)
    return MeasuredWay(name, losses, seconds, compute, weights, tuple(server["record"] for server in servers))


# -- the processes -----------------------------------------------------------------------------------


def _reduce(place: WorkerPlace, request: ServerRequest) -> dict[str, Any]:
    """A rank of the engine; the weights are in the order of the plain model's."""
    torch.set_num_threads(1)
    job = request.job
    with process_group(place.rank, place.world, place.rendezvous_file):
        engine = Engine(job, seed=request.seed)
        for held in engine.parameters:
            value = held.part.of(sample_weight(held.name, held.part.shape, request.seed, job.model))
            engine.optimizer.write(held.parameter, MASTER, divided_as(held.parameter, value))
        engine.on_weights_loaded()
        dist.barrier()
        began, compute, losses = time.perf_counter(), 0.0, []
        for step in range(request.steps):
            start = time.perf_counter()
            batch = _share(request, step, place.rank)
            loss = float(engine.forward_backward(batch))
            _be_slow(request, place.rank)
            compute += time.perf_counter() - start
            engine.update()
            losses.append(loss / place.world)  # the mean over all ranks, which `_way` adds up
        dist.barrier()
        seconds = time.perf_counter() - began
        by_name = {
            held.name: local(weight) for held in engine.parameters if (weight := engine.weight(held)) is not None
        }
        names = [name for name, _ in Decoder(job.model).named_parameters()]
        weights = torch.cat([by_name[name].detach().reshape(-1) for name in names])
    return {"losses": losses, "seconds": seconds, "compute_seconds": compute, "weights": weights}


def _serve_or_work(place: WorkerPlace, request: ServerRequest, staleness: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    plan = request.plan
    model = first_model(request)
    with process_group(place.rank, place.world, place.rendezvous_file):
        dist.barrier()
        began = time.perf_counter()
        if place.rank < plan.workers:
            result = _work(model, ServerClient(plan), request, place.rank)
        else:
            start = parameters_to_vector(model.parameters()).detach()
            server = ParameterServer(plan, place.rank - plan.workers, start, optimizer_of(request.job))
            if staleness is None:
                server.serve_together(request.steps)
            else:
                server.serve_apart(request.steps, staleness)
            result = {"weights": server.weights.detach(), "record": server.record}
        result["seconds"] = time.perf_counter() - began
    return result


def _work(model: Decoder, client: ServerClient, request: ServerRequest, worker: int) -> dict[str, Any]:
    losses, compute = [], 0.0
    vector_to_parameters(client.pull(), model.parameters())
    for step in range(request.steps):
        start = time.perf_counter()
        loss, gradient = own_gradient(model, request, step, worker)
        losses.append(loss)
        _be_slow(request, worker)
        compute += time.perf_counter() - start
        client.push(gradient)
        vector_to_parameters(client.pull(), model.parameters())
    return {"losses": losses, "compute_seconds": compute}


def first_model(request: ServerRequest) -> Decoder:
    """The whole model with the weights that all ways begin with."""
    model = Decoder(request.job.model)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(sample_weight(name, parameter.shape, request.seed, request.job.model))
    return model


def own_gradient(model: Decoder, request: ServerRequest, step: int, worker: int) -> tuple[float, Tensor]:
    """A worker's share of a step's loss, and of its gradient as one vector."""
    batch = _share(request, step, worker)
    counted = sample_batch(request.job, step % BATCHES, request.seed).counted
    model.zero_grad()
    loss = model(batch.tokens, batch.labels, positions=batch.positions, documents=batch.documents) / counted
    loss.backward()
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in model.parameters()
    ]
    return float(loss.detach()), parameters_to_vector(gradients)


def _share(request: ServerRequest, step: int, worker: int) -> Batch:
    return sample_batch(request.job, step % BATCHES, request.seed).share(worker, request.plan.workers)


def _be_slow(request: ServerRequest, worker: int) -> None:
    if request.slow_seconds and worker == request.plan.workers - 1:
        time.sleep(request.slow_seconds)


def optimizer_of(job: Job) -> Callable[[Tensor, float], torch.optim.Optimizer]:
    settings, name = job.training.optimization, job.training.optimizer

    def make(weights: Tensor, factor: float) -> torch.optim.Optimizer:
        rate = settings.learning_rate * factor
        if name == "sgd":
            return torch.optim.SGD([weights], lr=rate)
        betas = (settings.beta1, settings.beta2)
        return torch.optim.AdamW([weights], lr=rate, betas=betas, eps=settings.epsilon, weight_decay=0.0)

    return make
