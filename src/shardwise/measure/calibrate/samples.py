"""What was measured of a device, each figure with all that its price depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProductSample:
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
class Shape:
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

    shape: Shape
    precision: str
    passes_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class DeviceSamples:
    """All figures of one device, while its neighbours on the node were measured too."""

    device_name: str
    threads: int
    memory_bytes: int
    products: tuple[ProductSample, ...]
    attentions: tuple[AttentionSample, ...]
    copies: tuple[CopySample, ...]
    steps: tuple[StepSample, ...]
    host_copies: tuple[CopySample, ...] = ()  # between a GPU and its host
    launch_seconds: float | None = None  # of a kernel on a GPU, which runs while the next ones are launched
    formats: tuple[ProductSample, ...] = ()  # one small matmul in each, on a CPU: some have no instructions for it
