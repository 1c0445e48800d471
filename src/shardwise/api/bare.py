"""Models and clusters from bare numbers: `--params 70e9 --layers 80 ... --topology ring --gpus 64`."""

from __future__ import annotations

import math
from typing import Any

from shardwise.api.given import JobArguments
from shardwise.api.quantities import exclusive, whole_number
from shardwise.spec.clusters import parse_shape, squarest
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.model import Model
from shardwise.spec.network import NetworkLevel
from shardwise.spec.units import parse

TOPOLOGIES = ("line", "ring", "tree", "hierarchical", "switch", "mesh", "torus", "fully-connected")
DEFAULT_VOCAB = 32_000
DEFAULT_DEVICE = "h100-sxm"
DEFAULT_LATENCY = "5us"


_MODEL = ("params", "layers", "hidden", "heads")


def gives_model(arguments: JobArguments) -> bool:
    return any(getattr(arguments, name) is not None for name in _MODEL)


def model_flags(arguments: JobArguments) -> str:
    """The flags of bare numbers that describe a model."""
    return ", ".join(f"⟨{name}⟩" for name in _MODEL if getattr(arguments, name) is not None)


def gives_cluster(arguments: JobArguments) -> bool:
    return arguments.topology is not None


def check_unused(arguments: JobArguments) -> None:
    """Raises SpecError for a bare number that would silently change nothing."""
    needs: dict[str, str] = {}
    if not gives_model(arguments):
        needs |= dict.fromkeys(("kv_heads", "ffn", "vocab"), "⟨layers⟩, ⟨hidden⟩ and ⟨heads⟩")
    if not gives_cluster(arguments):
        needs |= dict.fromkeys(("shape", "bandwidth", "latency", "device"), "⟨topology⟩")
    for name, needed in needs.items():
        value = getattr(arguments, name)
        if value is not None:
            remedy = f"add {needed}, or leave ⟨{name}⟩ out"
            raise SpecError(f"⟨{name}⟩", f"{shown(value)} is not used without {needed}", remedy)


def _whole(arguments: JobArguments, name: str, default: int | None = None) -> int:
    value, setting = getattr(arguments, name), f"⟨{name}⟩"
    if value is not None:
        return whole_number(value, setting, most=10**12)
    if default is None:
        raise SpecError(setting, "is missing", "bare numbers need ⟨layers⟩, ⟨hidden⟩ and ⟨heads⟩")
    return default


def model(arguments: JobArguments, tensor_parallel: object = 1) -> Model:
    """A plain decoder with the given numbers; ``--params`` determines the MLP width."""
    layers, hidden, heads = (_whole(arguments, name) for name in ("layers", "hidden", "heads"))
    kv_heads = _whole(arguments, "kv_heads", heads)
    vocab = _whole(arguments, "vocab", DEFAULT_VOCAB)
    if heads > hidden or hidden % heads:
        raise SpecError("⟨heads⟩", f"{heads} does not divide ⟨hidden={hidden}⟩", "use a divisor")
    if arguments.params is not None and arguments.ffn is not None:
        raise exclusive("⟨ffn⟩", arguments.ffn, "⟨params⟩")
    if arguments.params is None:
        ffn = _whole(arguments, "ffn", 4 * hidden)
    else:
        ffn = _width_for(_whole(arguments, "params"), layers, hidden, heads, kv_heads, vocab, tensor_parallel)
    return Model(
        name="bare numbers",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        norm="rmsnorm",
        activation="gelu",
    )


def _width_for(
    parameters: int, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, tensor_parallel: object
) -> int:
    """The MLP width (of two matrices), a multiple of tp, with which the model has ``parameters``."""
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * kv_heads
    left = (parameters - 2 * vocab * hidden - hidden) / layers - attention - 2 * hidden
    multiple = int(str(tensor_parallel)) if str(tensor_parallel).isdigit() and int(str(tensor_parallel)) > 0 else 1
    width = round(left / (2 * hidden) / multiple) * multiple
    if width < 1:
        least = layers * (attention + 2 * hidden) + 2 * vocab * hidden + hidden
        raise SpecError("⟨params⟩", f"{parameters:,} is too few for these layers", f"they need more than {least:,}")
    return width


def cluster(arguments: JobArguments) -> Cluster:
    """Devices joined by one bare topology, or by a hierarchy of switches."""
    topology = str(arguments.topology).lower().replace("_", "-")
    if topology not in TOPOLOGIES:
        remedy = nearest_name(topology, TOPOLOGIES) or "choose one of " + ", ".join(TOPOLOGIES)
        raise SpecError("⟨topology⟩", f"unknown topology {shown(arguments.topology)}", remedy)
    if arguments.bandwidth is None:
        raise SpecError("⟨bandwidth⟩", "is missing", "give it per level, innermost first: 450GB/s,50GB/s")
    bandwidths = _listed(arguments.bandwidth, "bytes/s", "⟨bandwidth⟩")
    latency = ",".join([DEFAULT_LATENCY] * len(bandwidths)) if arguments.latency is None else arguments.latency
    latencies = _listed(latency, "seconds", "⟨latency⟩")
    if len(latencies) != len(bandwidths):
        raise SpecError("⟨latency⟩", f"{len(latencies)} values for {len(bandwidths)} bandwidths", "give one per level")
    if topology == "hierarchical":
        levels = _hierarchy(arguments, bandwidths, latencies)
    else:
        levels = [_flat(arguments, topology, bandwidths, latencies)]
    device: Any = DEFAULT_DEVICE if arguments.device is None else arguments.device
    node = _whole(arguments, "gpus_per_node") if arguments.gpus_per_node is not None else None
    return Cluster(name=f"bare {topology}", device=device, levels=tuple(levels), devices_per_node=node)


def _listed(text: str, dimension: str, flag: str) -> list[float]:
    values = [float(parse(part, dimension, flag)) for part in str(text).split(",")]
    for value in values:
        if value < 0 or (value == 0 and dimension == "bytes/s"):
            raise SpecError(flag, f"{shown(text)} is not positive", "use a value above 0")
    return values


def _flat(arguments: JobArguments, topology: Any, bandwidths: list[float], latencies: list[float]) -> NetworkLevel:
    if len(bandwidths) != 1:
        problem = f"{len(bandwidths)} values for a {topology}"
        raise SpecError("⟨bandwidth⟩", problem, "give one, or use ⟨topology=hierarchical⟩")
    if topology in ("mesh", "torus"):
        devices = None if arguments.gpus is None else _whole(arguments, "gpus")
        extent: dict[str, Any] = {"shape": grid_shape(arguments.shape, devices, topology)}
    elif arguments.shape is not None:
        raise SpecError("⟨shape⟩", f"{shown(arguments.shape)} does not belong to a {topology}", "use ⟨gpus⟩")
    else:
        extent = {"size": _gpus(arguments)}
    return NetworkLevel(name=topology, topology=topology, **extent, bandwidth=bandwidths[0], latency=latencies[0])


def _gpus(arguments: JobArguments) -> int:
    if arguments.gpus is None:
        raise SpecError("⟨gpus⟩", "is missing", "give the number of devices")
    return _whole(arguments, "gpus")


def grid_shape(shape: str | None, devices: int | None, topology: str) -> tuple[int, ...]:
    """The axes of a mesh or torus: as given, or as square as ``devices`` allows."""
    if shape is not None:
        axes = _shape_of(shape, devices)
        if not 1 <= len(axes) <= 3:
            raise SpecError("⟨shape⟩", f"{shape} has {len(axes)} axes", "use 2 or 3")
        return axes
    if devices is None:
        raise SpecError("⟨shape⟩", f"is missing for a {topology}", "give ⟨shape=8x8⟩ or ⟨gpus=64⟩")
    return squarest(devices)


def _shape_of(shape: str, devices: int | None) -> tuple[int, ...]:
    """The axes of a shape; raises SpecError unless they multiply to ``devices``, if given."""
    axes = parse_shape(shape, "⟨shape⟩")
    total = math.prod(axes)
    if devices is not None and total != devices:
        problem = f"{shape} multiplies to {total}, not {devices} devices"
        raise SpecError("⟨shape⟩", problem, f"use ⟨gpus={total}⟩ or another shape")
    return axes


def _hierarchy(arguments: JobArguments, bandwidths: list[float], latencies: list[float]) -> list[NetworkLevel]:
    """Levels of switches: nodes of --gpus-per-node and a network between them, or the widths of --shape 8x4x2."""
    devices = _gpus(arguments) if arguments.gpus is not None or arguments.shape is None else None
    if arguments.shape is not None:
        widths = _shape_of(arguments.shape, devices)
    else:
        node = _whole(arguments, "gpus_per_node", 8)
        assert devices is not None
        if devices % node:
            low = devices // node * node
            remedy = f"use {low + node}" if low == 0 else f"use {low} or {low + node}"
            raise SpecError("⟨gpus⟩", f"{devices} is not a whole number of nodes of {node}", remedy)
        widths = (node, devices // node)
    if len(bandwidths) != len(widths):
        raise SpecError("⟨bandwidth⟩", f"{len(bandwidths)} values for {len(widths)} levels", "give one per level")
    names = ("node", "network", "pod", "region", "world")
    return [
        NetworkLevel(name=names[min(i, 4)], size=width, bandwidth=bandwidths[i], latency=latencies[i])
        for i, width in enumerate(widths)
    ]
