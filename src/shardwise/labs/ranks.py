"""What labs share: small jobs, runs of the engine that are counted and timed, slow links, counted messages."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import CollectiveKind
from shardwise.engine import profiler_ranges
from shardwise.engine.collectives import Communicator
from shardwise.engine.data import apply as data_parallelism
from shardwise.engine.engine import Engine
from shardwise.engine.labels import Label, PassKind, label_of
from shardwise.engine.mesh import process_group
from shardwise.engine.offload.store import MASTER
from shardwise.engine.parameters import divided_as, local
from shardwise.labs.registry import PRELOAD
from shardwise.launch.emulate.network import EmulatedPool, why_not
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.layout.groups import node_of
from shardwise.measure.dryrun.result import TracedCollective
from shardwise.measure.dryrun.trace import dimension_of_collectives
from shardwise.measure.dryrun.world import CollectiveLog, FlopLog, Sent, replaced
from shardwise.measure.reference import sample_batch, sample_weight
from shardwise.models.layer import Layer
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.training.memory import tensors_counted

DENSE: dict[str, Any] = {
    "name": "lab", "layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 192, "vocab": 256, "max_seq": 8192,
    "activation": "swiglu", "norm": "rmsnorm",
}  # fmt: skip


def lab_job(strategy: dict[str, Any], *, batch: int, seq: int, cluster: Any = None, **model: Any) -> Job:
    """A job in fp32 for this machine's processes, or for ``cluster``; ``model`` changes fields of the small Llama."""
    world = 1
    for name in ("tp", "cp", "dp", "pp"):
        world *= strategy.get(name, 1)
    return Job.from_dict(
        {
            "model": {**DENSE, **model},
            "cluster": f"laptop:{world}" if cluster is None else cluster,
            "strategy": strategy,
            "training": {"global_batch": batch, "seq": seq, "precision": "fp32"},
        }
    )


# -- runs of the engine --------------------------------------------------------------------------------


_LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class TimedRange:
    """A range of the engine on a rank, in seconds of the machine's clock, which all processes share."""

    label: Label
    start: float
    end: float


@dataclass(frozen=True)
class Pace:
    """How long passes and layers take: one that is done sooner sleeps until then.

    Ranks that share cores would slow each other down; ranks that sleep do not. Messages are never paced.
    """

    passes: Mapping[PassKind, float] = field(default_factory=dict)
    full: frozenset[tuple[int | None, int]] = frozenset()
    """Backward passes, by stage and microbatch, that compute weight gradients too."""
    layer_forward: float = 0.0
    layer_backward: float = 0.0

    def of_pass(self, label: Label) -> float:
        seconds = self.passes.get(label.pass_kind, 0.0) if label.pass_kind else 0.0
        if label.pass_kind == "backward" and (label.stage, label.number) in self.full:
            seconds += self.passes.get("weight gradients", 0.0)
        return seconds


@dataclass(frozen=True)
class EngineRun:
    """Some steps of a job on the engine."""

    job: Job
    steps: int = 2  # timed
    counts: bool = True  # runs another step, which is counted and not timed
    pace: Pace = field(default_factory=Pace)
    prepare: Callable[[Engine], None] | None = None  # changes a rank's engine before the first step; it is pickled
    prefetch: int = data_parallelism.PREFETCH  # units that ZeRO-3 gathers ahead
    seed: int = 0


@dataclass(frozen=True)
class RankResult:
    """What a rank measured and counted."""

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    ranges: tuple[tuple[TimedRange, ...], ...]  # of each step
    peak_bytes: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its own weights, gradients and optimizer states before the update."""
    sent: Mapping[TracedCollective, int] = field(default_factory=dict)  # bytes, as the cost model counts them
    calls: Mapping[TracedCollective, int] = field(default_factory=dict)
    flops: Mapping[str, float] = field(default_factory=dict)
    loads: tuple[tuple[float, ...], ...] = ()  # of experts, by layer


def run_engine(pool: Pool, request: EngineRun) -> list[RankResult]:
    results: list[RankResult] = pool.run(_rank, request.job.strategy.world, request, timeout_seconds=_LIMIT_SECONDS)
    return results


def least_step(ranks: Sequence[RankResult]) -> float:
    """Of the slowest rank, the first step left out; what else the machine does only adds."""
    return float(min(max(each) for each in list(zip(*(rank.step_seconds for rank in ranks)))[1:]))


def _rank(place: WorkerPlace, request: EngineRun) -> RankResult:
    torch.set_num_threads(1)
    job = request.job
    with process_group(place.rank, place.world, place.rendezvous_file), ExitStack() as entered:
        entered.enter_context(replaced((data_parallelism, "PREFETCH", request.prefetch)))
        if request.pace.layer_forward or request.pace.layer_backward:
            entered.enter_context(_paced_layers(request.pace))
        engine = lab_engine(request)
        losses, seconds = [], []
        ranges: list[tuple[TimedRange, ...]] = []
        for step in range(request.steps):
            own: list[TimedRange] = []
            batch = sample_batch(job, step, request.seed).rows(engine.rows)
            dist.barrier()
            began = time.monotonic()
            with _recorded(own, request.pace):
                losses.append(float(engine.step(batch).loss))
            seconds.append(time.monotonic() - began)
            ranges.append(tuple(own))
        counted = _counted(engine, request) if request.counts else {}
        dist.barrier()
    return RankResult(tuple(losses), tuple(seconds), tuple(ranges), **counted)


def lab_engine(request: EngineRun) -> Engine:
    """An engine whose weights are the same in every layout."""
    job = request.job
    engine = Engine(job, seed=request.seed)
    for held in engine.parameters:
        value = held.part.of(sample_weight(held.name, held.part.shape, request.seed, job.model))
        engine.optimizer.write(held.parameter, MASTER, divided_as(held.parameter, value))
    engine.on_weights_loaded()
    if request.prepare is not None:
        request.prepare(engine)
    return engine


def _counted(engine: Engine, request: EngineRun) -> dict[str, Any]:
    """Runs another step and counts every tensor, collective and matmul."""
    collectives, flops = CollectiveLog(), FlopLog()
    gc.collect()
    batch = sample_batch(engine.job, request.steps, request.seed).rows(engine.rows)
    with tensors_counted() as memory:
        memory.observers += [collectives, flops]
        with collectives.naming():
            engine.forward_backward(batch)
            loads = tuple(tuple(mixture.load.tolist()) for mixture in engine.mixtures)
            held = _held(engine)
            engine.update()
    gc.unfreeze()  # counting froze all objects: this engine could never be freed
    dimension_of = dimension_of_collectives(engine)
    sent: Counter[TracedCollective] = Counter()
    calls: Counter[TracedCollective] = Counter()
    for call in collectives.sent:
        if len(call.ranks) > 1:
            dimension = dimension_of(call.label, call.ranks)
            line = TracedCollective(
                dimension, kind_of(call), call.label.title, len(call.ranks), call.peer, call.label.what
            )
            sent[line] += call.size_bytes
            calls[line] += 1
    return {
        "peak_bytes": memory.peak, "held": held, "sent": dict(sent), "calls": dict(calls), "flops": flops.flops,
        "loads": loads,
    }  # fmt: skip


def kind_of(call: Sent) -> str:
    """The engine's name for a collective: on gloo our reduce-scatter is an all-to-all."""
    exchanged = call.kind == CollectiveKind.ALL_TO_ALL and call.label.collective is not None
    return str(call.label.collective) if exchanged else call.kind


def _held(engine: Engine) -> dict[str, int]:
    """Bytes of this rank's states before the update, which ZeRO divides."""
    tensors: dict[str, list[Any]] = {
        "weights": [held.parameter for held in engine.parameters],
        "gradients": [held.gradient for held in engine.parameters if held.gradient is not None],
        "optimizer": [value for state in engine.optimizer.state.values() for value in state.values()],
    }
    return {name: sum(local(tensor).nbytes for tensor in several if tensor.dim()) for name, several in tensors.items()}


# -- ranges and paces ------------------------------------------------------------------------------------


@contextmanager
def _recorded(ranges: list[TimedRange], pace: Pace) -> Iterator[None]:
    """Records when each named range of the engine begins and ends; a pass lasts as long as ``pace`` says."""

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        label, start = label_of(name), time.monotonic()
        yield
        _sleep_until(start + pace.of_pass(label))
        ranges.append(TimedRange(label, start, time.monotonic()))

    with replaced((profiler_ranges, "marked", marked)):
        yield


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


@contextmanager
def _paced_layers(pace: Pace) -> Iterator[None]:
    """Makes every layer take at least as long as ``pace`` says, in both passes."""
    forward = Layer.forward

    def paced(self: Layer, hidden: Tensor, *arguments: Any) -> Tensor:
        began = time.monotonic()
        passes: list[float] = []
        entered: Tensor = _Paced.apply(hidden, passes, pace.layer_backward)  # type: ignore[no-untyped-call]
        output = forward(self, entered, *arguments)
        _sleep_until(began + pace.layer_forward)
        left: Tensor = _Paced.apply(output, passes, None)  # type: ignore[no-untyped-call]
        return left

    with replaced((Layer, "forward", paced)):
        yield


class _Paced(torch.autograd.Function):
    """After a layer it notes when the backward pass begins; before the layer it waits until the pass is long enough."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passes: list[float], lasts: float | None) -> Tensor:
        ctx.passes, ctx.lasts = passes, lasts
        return tensor.clone()  # FSDP warns of views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.lasts is None:
            ctx.passes.append(time.monotonic())
        elif ctx.passes:
            _sleep_until(ctx.passes.pop() + ctx.lasts)
        return gradient, None, None


# -- nodes with a slow link ----------------------------------------------------------------------------


@contextmanager
def slow_nodes(emulation: Emulation) -> Iterator[EmulatedPool | str]:
    """A pool on virtual nodes with a slow link between them; or, in words, why this machine has none."""
    reason = why_not()
    if reason is not None:
        yield reason
        return
    with EmulatedPool(emulation, PRELOAD) as pool:
        yield pool


def described(emulation: Emulation) -> Cluster:
    """The same nodes as a cluster, for the planner."""
    return cluster_of(emulation, cluster_from(f"laptop:{emulation.world}"))


# -- messages, counted as they leave a rank ------------------------------------------------------------


class CountingGroup:
    """Passes everything on to a process group, and counts what is sent."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.sent: list[tuple[int, int]] = []  # to which rank, how many bytes

    def send(self, tensors: list[Any], peer: int, tag: int) -> Any:
        self.sent.append((peer, sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
        return self.group.send(tensors, peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


class CountingCommunicator(Communicator):
    """A communicator of all ranks that counts what it has sent."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.counting = CountingGroup(world)
        super().__init__(world)

    def _step(self, *arguments: Any) -> None:
        """Sends gloo's messages through the counting group."""
        group, self.group = self.group, self.counting  # type: ignore[assignment]
        try:
            super()._step(*arguments)
        finally:
            self.group = group

    @property
    def messages(self) -> int:
        return len(self.counting.sent)

    @property
    def sent_bytes(self) -> int:
        return sum(size for _, size in self.counting.sent)

    def sent_to_other_nodes(self, ranks_per_node: int) -> int:
        """Bytes that left the node of this rank."""
        here = node_of(self.group.rank(), ranks_per_node)
        return sum(size for peer, size in self.counting.sent if node_of(peer, ranks_per_node) != here)
