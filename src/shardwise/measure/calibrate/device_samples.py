"""Measures one device: matmuls, attention, memory, and whole steps of small models."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.world import joined
from shardwise.layout.ranks import local_rank
from shardwise.measure.calibrate.ranks import Rank, StoreBarrier, seconds_of
from shardwise.models.dot_product import AttentionArguments, dot_product_attention
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

# -- what was measured of a device, each figure with all that its price depends on -------------------


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
    """``bytes`` read and as many written."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class StepShape:
    """A small decoder that is trained on a batch of its own."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequences: int
    seq: int


@dataclass(frozen=True)
class StepSample:
    """Passes and update of one step of a model on a device of its own."""

    shape: StepShape
    precision: str
    passes_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class DeviceSamples:
    """All figures of one device, while its neighbours on the node were measured too."""

    device_name: str
    threads: int
    memory_bytes: int
    matmuls: tuple[MatmulSample, ...]
    attentions: tuple[AttentionSample, ...]
    copies: tuple[CopySample, ...]
    steps: tuple[StepSample, ...]
    host_copies: tuple[CopySample, ...] = ()  # between a GPU and its host
    launch_seconds: float | None = None  # of a kernel on a GPU, which runs while the next ones are launched
    formats: tuple[MatmulSample, ...] = ()  # one small matmul in each, on a CPU: it may lack the instructions


# -- The job of one step of a small model on one device, as it is measured and as it is priced -------


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

_LAUNCHES = 500  # fewer than a GPU's queue holds
_SMALL = (128, 96, 96)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sizes:
    """What is measured: sizes usual on the device, each in a different ratio."""

    precisions: tuple[str, ...]
    matmuls: tuple[tuple[int, int, int], ...]  # rows, inner, columns
    attentions: tuple[tuple[int, int, int, int], ...]  # batch, seq, heads, features
    copies: tuple[int, ...]  # bytes
    steps: tuple[StepShape, ...]
    formats: tuple[str, ...] = ()  # compared by one small matmul: some formats take a thousand times as long


# Matmuls take around 1 ms on one core, and a step less than a second.
CPU = Sizes(
    ("fp32",),
    ((2048, 96, 96), (1024, 96, 256), (1024, 256, 96), (512, 512, 512), (256, 1024, 256), (2048, 32, 256),
     (4096, 128, 32), (256, 160, 2048)),
    ((8, 96, 8, 8), (4, 256, 4, 16), (2, 256, 4, 32), (1, 512, 4, 64), (16, 64, 8, 16), (2, 384, 2, 128)),
    (2**25, 2**26),
    (StepShape(2, 96, 6, 256, 1024, 4, 96), StepShape(2, 160, 5, 448, 768, 4, 192),
     StepShape(6, 48, 6, 128, 256, 8, 128), StepShape(3, 128, 4, 384, 384, 2, 256),
     StepShape(2, 64, 8, 128, 2048, 16, 64)),
    ("fp32", "bf16", "fp16"),
)  # fmt: skip
GPU = Sizes(
    ("bf16", "fp32"),
    ((8192, 2048, 2048), (8192, 2048, 8192), (8192, 8192, 2048), (4096, 4096, 4096), (8192, 1024, 4096),
     (2048, 4096, 14336), (16384, 512, 2048)),
    ((4, 4096, 16, 128), (8, 2048, 16, 64), (1, 16384, 8, 128), (16, 1024, 16, 128)),
    (2**28, 2**30),
    # Large enough that the host launches kernels faster than they run.
    (StepShape(4, 2048, 16, 8192, 32768, 8, 4096), StepShape(2, 4096, 32, 14336, 16384, 4, 4096),
     StepShape(6, 1536, 12, 6144, 49152, 16, 2048), StepShape(2, 5120, 40, 13824, 32768, 2, 4096)),
)  # fmt: skip


def measure_device(rank: Rank, device_type: str, threads: int) -> DeviceSamples:
    """Runs on every process of a node at once: a device is measured while its neighbours are busy."""
    torch.set_num_threads(threads)
    index = local_rank(rank.number, max(1, torch.cuda.device_count())) if device_type == "cuda" else 0
    device = torch.device(device_type, index) if device_type == "cuda" else torch.device("cpu")
    sizes, barrier = (GPU if device_type == "cuda" else CPU), StoreBarrier(rank.store, rank.world)
    matmuls = tuple(_matmul(name, *one, device, barrier) for name in sizes.precisions for one in sizes.matmuls)
    formats = tuple(_matmul(name, *_SMALL, device, barrier) for name in sizes.formats)
    attentions = tuple(_attentions(sizes.precisions[0], sizes, device, barrier))
    copies = tuple(_copies(sizes, device, barrier))
    steps = tuple(_steps(sizes, device, barrier))
    return DeviceSamples(
        _name(device), threads, _memory(device, rank.ranks_per_host), matmuls, attentions, copies, steps,
        tuple(_host_copies(device, barrier)), _launch(device), formats,
    )  # fmt: skip


def _matmul(
    name: str, rows: int, inner: int, columns: int, device: torch.device, barrier: StoreBarrier
) -> MatmulSample:
    left = torch.randn(rows, inner, device=device).to(TYPES[name])
    right = torch.randn(columns, inner, device=device).to(TYPES[name]).T  # as a linear layer holds its weight
    return MatmulSample(name, rows, inner, columns, seconds_of(partial(torch.mm, left, right), device, barrier))


def _attentions(name: str, sizes: Sizes, device: torch.device, barrier: StoreBarrier) -> Iterator[AttentionSample]:
    for batch, seq, heads, features in sizes.attentions:
        shape = (batch, seq, heads, features)
        query, key, value = (torch.randn(shape, device=device).to(TYPES[name]).requires_grad_() for _ in range(3))
        arguments = AttentionArguments(causal=True, window=None, scale=features**-0.5)
        forward = partial(dot_product_attention, query, key, value, arguments)
        output = forward()
        gradient = torch.randn_like(output)
        backward = partial(torch.autograd.grad, output, (query, key, value), gradient, retain_graph=True)
        yield AttentionSample(name, *shape, seconds_of(forward, device, barrier), seconds_of(backward, device, barrier))


def _copies(sizes: Sizes, device: torch.device, barrier: StoreBarrier) -> Iterator[CopySample]:
    for size in sizes.copies:
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        yield CopySample(size, seconds_of(partial(target.copy_, source), device, barrier))


def _host_copies(device: torch.device, barrier: StoreBarrier) -> Iterator[CopySample]:
    if device.type != "cuda":
        return
    for size in (2**24, 2**28):
        source = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        yield CopySample(size, seconds_of(partial(target.copy_, source, non_blocking=True), device, barrier))


def _launch(device: torch.device) -> float | None:
    """The host's time to launch a kernel asynchronously."""
    if device.type != "cuda":
        return None
    number = torch.zeros(1, device=device)
    for _ in range(_LAUNCHES):
        number.add_(1)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_LAUNCHES):
        number.add_(1)
    return (time.perf_counter() - began) / _LAUNCHES


def _steps(sizes: Sizes, device: torch.device, barrier: StoreBarrier) -> Iterator[StepSample]:
    """In a process group of one process."""
    with joined(0, 1, dist.HashStore()):  # type: ignore[attr-defined]
        for shape in sizes.steps:
            job = step_job(shape, sizes.precisions[0])
            engine = Engine(job, device=str(device))
            tokens = torch.randint(0, shape.vocab, (shape.sequences, shape.seq), device=device)
            batch = Batch.of(tokens, tokens)
            engine.step(batch)
            both = seconds_of(partial(engine.step, batch), device, barrier)
            engine.forward_backward(batch)
            update = seconds_of(partial(_update_again, engine), device, barrier)
            yield StepSample(shape, sizes.precisions[0], max(both - update, 1e-9), update)
            del engine


def _update_again(engine: Engine) -> None:
    """Repeats an update: the gradients that it frees are restored."""
    kept = [(one.parameter, one.parameter.grad) for one in engine.parameters]
    engine.update()
    for parameter, gradient in kept:
        parameter.grad = gradient


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
    """The memory of a device; of a CPU the process's part of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_host
