"""Where in a step a rank is: which pass, which stage, which layer.

Tracked by hooks on the modules for the forward pass and on the tensors between them for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.models.decoder import Decoder, Layer


class LayerKind(NamedTuple):
    """Layers of one kind do the same."""

    experts: bool = False
    window: bool = False
    recomputed: bool = False

    @property
    def words(self) -> str:
        said = ("experts" if self.experts else "dense", self.window and "window", self.recomputed and "recomputed")
        return " ".join(word for word in said if word)


@dataclass(frozen=True)
class Place:
    """``phase``: build, forward, backward, recompute, update or between. ``part`` of the stage: embedding, layer, head.

    A layer is the ``number``-th of its ``kind`` in its stage, counted from the front, of ``of``. ``visit`` counts the
    passes of its stage in this direction: microbatches.
    """

    phase: str
    stage: int = 0
    part: str = ""
    kind: LayerKind | None = None
    number: int = 0
    of: int = 0
    visit: int = 0

    @property
    def words(self) -> str:
        which = (
            "" if self.part != "layer" else f" {self.number}" if self.number >= 0 else f" {-self.number} from the end"
        )
        kind = "" if self.kind is None else f" {self.kind.words}"
        return f"{self.phase}{kind} {self.part}{which}".strip()


class Places:
    """``now`` is the place of what runs at the moment, ``passes`` how many passes there have been."""

    def __init__(self) -> None:
        self.now = Place("build")
        self.passes = 0
        self._visits: dict[tuple[int, bool], int] = {}  # by stage, and whether forward

    def start_step(self) -> None:
        self.now = Place("between")
        self._visits.clear()

    def follow(self, stages: Mapping[int, nn.Module], kind_of_layer: Mapping[int, LayerKind]) -> None:
        """Hooks into the decoders of a rank's stages, when all techniques have been applied to them."""
        for stage, module in stages.items():
            decoder = next(one for one in module.modules() if isinstance(one, Decoder))
            self._watch_decoder(decoder, stage)
            kinds = {name: kind_of_layer[int(name)] for name in decoder.layers}
            for name, layer in decoder.layers.items():
                alike = [other for other in kinds if kinds[other] == kinds[name]]
                place = Place("forward", stage, "layer", kinds[name], alike.index(name), len(alike))
                inner = next(one for one in layer.modules() if isinstance(one, Layer))
                self._watch_layer(inner, place, Place("forward", stage, "head"))

    def _watch_decoder(self, decoder: nn.Module, stage: int) -> None:
        def enter(*_: Any) -> None:
            self._begin_pass(stage, forward=True)
            self._enter(Place("forward", stage, "embedding"))

        def leave(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.now = Place("between")
            self._on_gradient(output, Place("backward", stage, "head"))

        decoder.register_forward_pre_hook(enter, prepend=True)
        decoder.register_forward_hook(leave)

    def _watch_layer(self, layer: nn.Module, place: Place, after: Place) -> None:
        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if _in_backward():
                self._enter(replace(place, phase="recompute"))
                return
            self._enter(place)
            if place.number == 0:
                self._on_gradient(inputs[0], Place("backward", place.stage, "embedding"))

        def leave(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if _in_backward():
                self._enter(replace(place, phase="backward"))
                return
            self._enter(after)
            self._on_gradient(output, replace(place, phase="backward"))

        layer.register_forward_pre_hook(enter, prepend=True)
        layer.register_forward_hook(leave)

    def _on_gradient(self, tensor: Tensor, place: Place) -> None:
        """``place`` is where one is when the gradient of ``tensor`` is there."""

        def arrived(_: Tensor) -> None:
            if place.part == "head":
                self._begin_pass(place.stage, forward=False)
            self._enter(place)

        if tensor.requires_grad:
            tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _begin_pass(self, stage: int, *, forward: bool) -> None:
        self.passes += 1
        self._visits[stage, forward] = self._visits.get((stage, forward), -1) + 1

    def _enter(self, place: Place) -> None:
        self.now = replace(place, visit=self._visits.get((place.stage, place.phase == "forward"), 0))


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None
