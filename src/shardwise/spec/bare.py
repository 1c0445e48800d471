"""Bare numbers that stand for a model and a cluster: `--params 70e9 --layers 80 ... --topology ring --gpus 64`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from shardwise.spec import presets
from shardwise.spec.codec import setting
from shardwise.spec.hardware import Device

StandIn = Literal["model", "cluster"]
Size = int | float | str
TopologyWord = Literal["line", "ring", "tree", "hierarchical", "switch", "mesh", "torus", "fully-connected"]
TOPOLOGIES: tuple[str, ...] = get_args(TopologyWord)
# Any of these stands for a model, or a cluster; the others need one of them.
_STANDS_FOR: dict[StandIn, tuple[str, ...]] = {
    "model": ("params", "layers", "hidden", "heads"),
    "cluster": ("topology",),
}


@dataclass(frozen=True, kw_only=True)
class BareNumbers:
    """Sizes as a caller gives them: numbers, or text with units. Those of `gpus` are also for a named cluster."""

    gpus: int | str | None = setting(None, flag="--gpus")
    """Number of devices."""
    gpus_per_node: int | str | None = setting(None, flag="--gpus-per-node")
    """Devices of a node in use."""
    params: Size | None = setting(None, flag="--params")
    """Parameters, such as 70e9 or 70B."""
    layers: int | str | None = setting(None, flag="--layers")
    """Transformer layers."""
    hidden: int | str | None = setting(None, flag="--hidden")
    """Features of the hidden states."""
    heads: int | str | None = setting(None, flag="--heads")
    """Query heads; by default of 128 features, or of fewer that divide `hidden`."""
    kv_heads: int | str | None = setting(None, flag="--kv-heads")
    """Key-value heads; by default as many as query heads."""
    ffn: int | str | None = setting(None, flag="--ffn")
    """Inner features of the MLP; by default 4 times `hidden`, or what gives the model `params`."""
    vocab: int | str | None = setting(None, flag="--vocab")
    """Tokens of the vocabulary; by default 32,000."""
    topology: TopologyWord | None = setting(None, flag="--topology")
    """Network that joins the devices."""
    shape: str | None = setting(None, flag="--shape")
    """Axes of a mesh or torus: 8x8, 4x4x8."""
    bandwidth: Size | None = setting(None, flag="--bandwidth")
    """Bandwidth in one direction, per level, innermost first: 450GB/s,50GB/s."""
    latency: Size | None = setting(None, flag="--latency")
    """Latency of a message, per level, innermost first: 2us,5us."""
    device: str | Device | None = setting(None, choices=partial(presets.names, "device"), flag="--device")
    """Device preset or file, by default h100-sxm."""

    def given(self, kind: StandIn) -> tuple[str, ...]:
        """The numbers that are given in place of a model or a cluster."""
        return tuple(name for name in _STANDS_FOR[kind] if getattr(self, name) is not None)
