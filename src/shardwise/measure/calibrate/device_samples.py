"""Measures one device: matmuls, attention, memory, and whole steps of small models."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.offload.store import copy_stream
from shardwise.layout.groups import local_rank
from shardwise.measure.calibrate.gpu_samples import CopyFigure, GpuSamples, ProductFigure, measure_gpu
from shardwise.measure.calibrate.ranks import ROUNDS, Rank, StoreBarrier, seconds_of, undisturbed
from shardwise.measure.calibrate.steps import update_again
from shardwise.models.dot_product import AttentionArguments, dot_product_attention
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

# -- the figures of a device, each with everything that its price depends on -------------------------


@dataclass(frozen=True)
class MatmulSample:
    """A (rows × inner) matrix times an (inner × columns) one."""

    data_type: str
    rows: int
    inner: int
    columns: int
    seconds: float


@dataclass(frozen=True)
class AttentionSample:
    """Causal attention, forward and backward."""

    data_type: str
    batch: int
    seq: int
    heads: int
    features: int  # of one head
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class CopySample:
    """A copy that reads ``bytes`` and writes as many."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class HostLinkSample:
    """The link between a GPU and its host's pinned memory."""

    into: float  # bytes/s to the device
    out: float  # bytes/s from the device
    both: float  # bytes/s in the slower direction while both are busy
    latency: float  # seconds of a tiny copy among others


@dataclass(frozen=True)
class StepShape:
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequences: int
    seq: int


@dataclass(frozen=True)
class StepSample:
    """Seconds of the passes and of the update of one step on one device."""

    shape: StepShape
    precision: str
    passes_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class DeviceSamples:
    """All figures of one device, taken while its neighbours on the node were busy with the same."""

    device_name: str
    threads: int
    memory_bytes: int
    matmuls: tuple[MatmulSample, ...]
    attentions: tuple[AttentionSample, ...]
    copies: tuple[CopySample, ...]
    steps: tuple[StepSample, ...]
    host_link: HostLinkSample | None = None  # of a GPU
    formats: tuple[MatmulSample, ...] = ()  # one small matmul in each, on a CPU: it may lack the instructions
    gpu: GpuSamples | None = None


# -- the job of one step of a small model on one device, as it is measured and as it is priced -------


def step_job(shape: StepShape, precision: str, device: Device | None = None) -> Job:
    model = Model(
        name="calibration", layers=shape.layers, hidden=shape.hidden, heads=shape.heads, ffn=shape.ffn,
        vocab=shape.vocab, max_seq=shape.seq,
    )  # fmt: skip
    cluster: Cluster = cluster_from("laptop:1")
    if device is not None:
        cluster = replace(cluster, device=device)
    training = Training(global_batch=shape.sequences, seq=shape.seq, precision=precision, graphs=False)  # type: ignore[arg-type]
    return Job(
        model=model, cluster=cluster, strategy=Strategy(dp=1, microbatch=shape.sequences), training=training
    )  # fmt: skip


# -- measuring ---------------------------------------------------------------------------------------

_CPU = torch.device("cpu")
# Of a CPU, in fp32: sizes that are usual there. Matmuls take around 1 ms on one core, and a step less than a second.
_MATMULS = ((2048, 96, 96), (1024, 96, 256), (1024, 256, 96), (512, 512, 512), (256, 1024, 256), (2048, 32, 256),
            (4096, 128, 32), (256, 160, 2048))  # fmt: skip  # rows, inner, columns
# Compared by one small matmul: some formats take a thousand times as long.
_FORMATS, _SMALL = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}, (128, 96, 96)
_ATTENTIONS = ((8, 96, 8, 8), (4, 256, 4, 16), (2, 256, 4, 32), (1, 512, 4, 64), (16, 64, 8, 16),
               (2, 384, 2, 128))  # fmt: skip  # batch, seq, heads, features
_COPIES = (2**25, 2**26)  # bytes
_STEPS = (StepShape(2, 96, 6, 256, 1024, 4, 96), StepShape(2, 160, 5, 448, 768, 4, 192),
          StepShape(6, 48, 6, 128, 256, 8, 128), StepShape(3, 128, 4, 384, 384, 2, 256),
          StepShape(2, 64, 8, 128, 2048, 16, 64))  # fmt: skip


def measure_device(rank: Rank, device_type: str, threads: int, base: Device) -> DeviceSamples:
    """Runs on every process of a node at once, so that a device is measured while its neighbours are busy."""
    torch.set_num_threads(threads)
    if device_type == "cuda":
        return _measure_gpu(rank, threads, base)
    barrier = StoreBarrier(rank.store, rank.world)
    matmuls = tuple(_matmul("fp32", *shape, barrier) for shape in _MATMULS)
    formats = tuple(_matmul(name, *_SMALL, barrier) for name in _FORMATS)
    attentions, copies, steps = tuple(_attentions(barrier)), tuple(_copies(barrier)), tuple(_steps(barrier))
    memory = _memory(_CPU, rank.ranks_per_host)
    return DeviceSamples(_name(_CPU), threads, memory, matmuls, attentions, copies, steps, formats=formats)


def _measure_gpu(rank: Rank, threads: int, base: Device) -> DeviceSamples:
    """The figures as `GpuSamples`; those by which ranks are compared also in the form that every device has."""
    device = torch.device("cuda", local_rank(rank.number, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    barrier = StoreBarrier(rank.store, rank.world)
    samples = measure_gpu(base, device, compiles=rank.first_of_host, meet=barrier.wait)
    matmuls = [
        figure for figure in samples.figures if isinstance(figure, ProductFigure) and figure.product == "forward"
    ]
    copies = [figure for figure in samples.figures if isinstance(figure, CopyFigure)]
    return DeviceSamples(
        _name(device), threads, _memory(device, rank.ranks_per_host),
        tuple(MatmulSample("bf16", own.rows, own.inner, own.columns, own.seconds) for own in matmuls), (),
        tuple(CopySample(own.bytes, own.seconds) for own in copies), (),
        _host_link(device, barrier), gpu=samples,
    )  # fmt: skip


def _matmul(name: str, rows: int, inner: int, columns: int, barrier: StoreBarrier) -> MatmulSample:
    left = torch.randn(rows, inner).to(_FORMATS[name])
    right = torch.randn(columns, inner).to(_FORMATS[name]).T  # as a linear layer holds its weight
    return MatmulSample(name, rows, inner, columns, seconds_of(partial(torch.mm, left, right), _CPU, barrier))


def _attentions(barrier: StoreBarrier) -> Iterator[AttentionSample]:
    for shape in _ATTENTIONS:
        query, key, value = (torch.randn(shape).requires_grad_() for _ in range(3))
        arguments = AttentionArguments(causal=True, window=None, scale=shape[-1] ** -0.5)
        forward = partial(dot_product_attention, query, key, value, arguments)
        output = forward()
        gradient = torch.randn_like(output)
        backward = partial(torch.autograd.grad, output, (query, key, value), gradient, retain_graph=True)
        yield AttentionSample("fp32", *shape, seconds_of(forward, _CPU, barrier), seconds_of(backward, _CPU, barrier))


def _copies(barrier: StoreBarrier) -> Iterator[CopySample]:
    for size in _COPIES:
        source = torch.ones(size // 4)
        yield CopySample(size, seconds_of(partial(torch.empty_like(source).copy_, source), _CPU, barrier))


_COPIED, _LITTLE = 2**26, 2**10  # bytes of a copy
_MULTIPLIED = 8192  # rows and columns of a product
_IN_A_ROW = 32  # copies, as in offload: the start of the first hardly counts


def _host_link(device: torch.device, barrier: StoreBarrier) -> HostLinkSample:
    """Measures the link as offload uses it: many copies on a stream per direction, while the device multiplies."""
    streams = {out: copy_stream(device) for out in (False, True)}
    hosts, there = (
        {out: torch.ones(_COPIED, dtype=torch.uint8, **where) for out in streams}
        for where in ({"pin_memory": True}, {"device": device})
    )

    def copy(size: int, *directions: bool) -> None:
        for out in directions:
            source, target = (there, hosts) if out else (hosts, there)
            streams[out].wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(streams[out]):
                for _ in range(_IN_A_ROW):
                    target[out][:size].copy_(source[out][:size], non_blocking=True)
        for out in directions:
            torch.cuda.current_stream(device).wait_stream(streams[out])

    busy = _Busy(device, barrier)
    alone, away, both = (
        _COPIED * _IN_A_ROW / busy.seconds_beside(partial(copy, _COPIED, *directions))
        for directions in ((False,), (True,), (False, True))
    )
    latency = seconds_of(partial(copy, _LITTLE, False), device, barrier) / _IN_A_ROW
    return HostLinkSample(alone, away, both, latency)


class _Busy:
    """A device that multiplies while something else is timed on it."""

    def __init__(self, device: torch.device, barrier: StoreBarrier) -> None:
        self.device, self.barrier = device, barrier
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        left, right = (torch.randn(_MULTIPLIED, _MULTIPLIED, device=device, dtype=torch.bfloat16) for _ in range(2))
        self._product = partial(torch.mm, left, right, out=torch.empty_like(left))
        self._seconds = seconds_of(self._product, device, barrier)

    def seconds_beside(self, call: Callable[[], None]) -> float:
        """Seconds of one call in an undisturbed round, beside enough products to outlast it."""
        products = math.ceil(2 * seconds_of(call, self.device, self.barrier) / self._seconds)
        seconds = []
        for _ in range(ROUNDS):
            self.barrier.wait()
            torch.cuda.synchronize(self.device)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            with torch.cuda.stream(self._stream):
                for _ in range(products):
                    self._product()
            call()
            end.record()
            torch.cuda.synchronize(self.device)
            seconds.append(begin.elapsed_time(end) / 1e3)
        return undisturbed(seconds)


def _steps(barrier: StoreBarrier) -> Iterator[StepSample]:
    """In a process group of one process."""
    with process_group(0, 1, dist.HashStore()):  # type: ignore[attr-defined]
        for shape in _STEPS:
            engine = Engine(step_job(shape, "fp32"), device="cpu")
            tokens = torch.randint(0, shape.vocab, (shape.sequences, shape.seq))
            batch = Batch.of(tokens, tokens)
            engine.step(batch)
            both = seconds_of(partial(engine.step, batch), _CPU, barrier)
            engine.forward_backward(batch)
            update = seconds_of(partial(update_again, engine), _CPU, barrier)
            yield StepSample(shape, "fp32", max(both - update, 1e-9), update)
            del engine


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        models = [line.split(":", 1)[1].strip() for line in lines if line.lower().startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else os.uname().machine


def _memory(device: torch.device, ranks_per_host: int) -> int:
    """The memory of a device; for a CPU, the process's share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_host
