"""Ranges around the forward passes of layers, while some steps of a run are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from shardwise.engine.labels import layer_name
from shardwise.engine.profiler_ranges import named
from shardwise.engine.torch_private import inside_every_call


@contextmanager
def layers_named(stages: Iterable[nn.Module]) -> Iterator[None]:
    """The forward pass of every layer carries its number while the block runs.

    Data parallelism gathers before a layer begins and frees after it has ended; of a compiled one both are inside.
    """
    undo = []
    for stage in stages:
        layers: Any = getattr(stage, "layers", None)
        for index, layer in layers.items() if isinstance(layers, nn.ModuleDict) else ():
            undo.append(inside_every_call(layer, partial(named, layer_name(index))))
    try:
        yield
    finally:
        for end in undo:
            end()
