"""A model and a cluster made of bare numbers: `--params 70e9 --layers 80 ... --topology ring --gpus 64`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from shardwise.api.quantities import exclusive, whole_number
from shardwise.spec.bare import TOPOLOGIES, BareNumbers, Size, StandIn
from shardwise.spec.bare_model import VOCAB, assumed_notes, bare_decoder, usual_heads, width_for
from shardwise.spec.clusters import parse_shape, squarest
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.model import Model
from shardwise.spec.network import NetworkLevel
from shardwise.spec.units import parse

DEFAULT_DEVICE = "h100-sxm"
DEFAULT_LATENCY = "5us"


def check_bare_numbers(numbers: BareNumbers, overrides: Mapping[str, Any]) -> None:
    """Raises SpecError for bare numbers beside a named model or cluster, and for one that would change nothing."""
    for kind in get_args(StandIn):
        given = numbers.given(kind)
        if given and kind in overrides:
            raise exclusive(f"⟨{kind}⟩", overrides[kind], ", ".join(f"⟨{name}⟩" for name in given))
    needs: dict[str, str] = {}
    if not numbers.given("model"):
        needs |= dict.fromkeys(("kv_heads", "ffn", "vocab"), "⟨layers⟩ and ⟨hidden⟩")
    if not numbers.given("cluster"):
        needs |= dict.fromkeys(("shape", "bandwidth", "latency", "device"), "⟨topology⟩")
    for name, needed in needs.items():
        value = getattr(numbers, name)
        if value is not None:
            remedy = f"add {needed}, or leave ⟨{name}⟩ out"
            raise SpecError(f"⟨{name}⟩", f"{shown(value)} is not used without {needed}", remedy)


def _whole(numbers: BareNumbers, name: str, default: int | None = None) -> int:
    value, setting = getattr(numbers, name), f"⟨{name}⟩"
    if value is not None:
        return whole_number(value, setting, most=10**12)
    if default is None:
        raise SpecError(setting, "is missing", "bare numbers need ⟨layers⟩ and ⟨hidden⟩")
    return default


def bare_model(numbers: BareNumbers, tensor_parallel: object = 1) -> Model:
    """A plain decoder with the given numbers; ``--params`` determines the MLP width."""
    layers, hidden = (_whole(numbers, name) for name in ("layers", "hidden"))
    heads = _whole(numbers, "heads", usual_heads(hidden))
    kv_heads = _whole(numbers, "kv_heads", heads)
    vocab = _whole(numbers, "vocab", VOCAB)
    if heads > hidden or hidden % heads:
        raise SpecError("⟨heads⟩", f"{heads} does not divide ⟨hidden={hidden}⟩", "use a divisor")
    if numbers.params is not None and numbers.ffn is not None:
        raise exclusive("⟨ffn⟩", numbers.ffn, "⟨params⟩")
    if numbers.params is None:
        ffn = _whole(numbers, "ffn", 4 * hidden)
    else:
        outline = bare_decoder(layers, hidden, heads, kv_heads, 1, vocab)
        ffn = width_for(_whole(numbers, "params"), outline, _degree(tensor_parallel), "⟨params⟩")
    return bare_decoder(layers, hidden, heads, kv_heads, ffn, vocab)


def bare_model_notes(numbers: BareNumbers, model: Model) -> list[str]:
    """What the numbers of a model leave out."""
    if not numbers.given("model"):
        return []
    return assumed_notes(model, heads=numbers.heads, vocab=numbers.vocab, ffn=numbers.ffn)


def _degree(tensor_parallel: object) -> int:
    text = str(tensor_parallel)
    return max(1, int(text)) if text.isdigit() else 1


def bare_cluster(numbers: BareNumbers) -> Cluster:
    """Devices joined by one bare topology, or by a hierarchy of switches."""
    topology = str(numbers.topology).lower().replace("_", "-")
    if topology not in TOPOLOGIES:
        remedy = nearest_name(topology, TOPOLOGIES) or "choose one of " + ", ".join(TOPOLOGIES)
        raise SpecError("⟨topology⟩", f"unknown topology {shown(numbers.topology)}", remedy)
    if numbers.bandwidth is None:
        raise SpecError("⟨bandwidth⟩", "is missing", "give it per level, innermost first: 450GB/s,50GB/s")
    bandwidths = _listed(numbers.bandwidth, "bytes/s", "⟨bandwidth⟩")
    latency = ",".join([DEFAULT_LATENCY] * len(bandwidths)) if numbers.latency is None else numbers.latency
    latencies = _listed(latency, "seconds", "⟨latency⟩")
    if len(latencies) != len(bandwidths):
        raise SpecError("⟨latency⟩", f"{len(latencies)} values for {len(bandwidths)} bandwidths", "give one per level")
    if topology == "hierarchical":
        levels = _hierarchy(numbers, bandwidths, latencies)
    else:
        levels = [_flat(numbers, topology, bandwidths, latencies)]
    device: Any = DEFAULT_DEVICE if numbers.device is None else numbers.device
    node = _whole(numbers, "gpus_per_node") if numbers.gpus_per_node is not None else None
    return Cluster(name=f"bare {topology}", device=device, levels=tuple(levels), devices_per_node=node)


def _listed(text: Size, dimension: str, flag: str) -> list[float]:
    values = [float(parse(part, dimension, flag)) for part in str(text).split(",")]
    for value in values:
        if value < 0 or (value == 0 and dimension == "bytes/s"):
            raise SpecError(flag, f"{shown(text)} is not positive", "use a value above 0")
    return values


def _flat(numbers: BareNumbers, topology: Any, bandwidths: list[float], latencies: list[float]) -> NetworkLevel:
    if len(bandwidths) != 1:
        problem = f"{len(bandwidths)} values for a {topology}"
        raise SpecError("⟨bandwidth⟩", problem, "give one, or use ⟨topology=hierarchical⟩")
    if topology in ("mesh", "torus"):
        devices = None if numbers.gpus is None else _whole(numbers, "gpus")
        extent: dict[str, Any] = {"shape": grid_shape(numbers.shape, devices, topology)}
    elif numbers.shape is not None:
        raise SpecError("⟨shape⟩", f"{shown(numbers.shape)} does not belong to a {topology}", "use ⟨gpus⟩")
    else:
        extent = {"size": _gpus(numbers)}
    return NetworkLevel(name=topology, topology=topology, **extent, bandwidth=bandwidths[0], latency=latencies[0])


def _gpus(numbers: BareNumbers) -> int:
    if numbers.gpus is None:
        raise SpecError("⟨gpus⟩", "is missing", "give the number of devices")
    return _whole(numbers, "gpus")


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


def _hierarchy(numbers: BareNumbers, bandwidths: list[float], latencies: list[float]) -> list[NetworkLevel]:
    """Levels of switches: nodes of --gpus-per-node and a network between them, or the widths of --shape 8x4x2."""
    devices = _gpus(numbers) if numbers.gpus is not None or numbers.shape is None else None
    if numbers.shape is not None:
        widths = _shape_of(numbers.shape, devices)
    else:
        node = _whole(numbers, "gpus_per_node", 8)
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
