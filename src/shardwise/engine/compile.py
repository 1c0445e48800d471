"""`torch.compile` of every layer by itself: equal layers share one graph, and parameters keep their names.

A layer without communication is compiled whole, recompute included. One that does is not cut by the compiler at its
collectives, which would leave it no recompute and no overlap: its parts between them are compiled, each as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.engine.patterns import Patterns, matching
from shardwise.spec.strategy import Strategy

# Functions of the models' modules that compute between their matmuls.
_BETWEEN_PRODUCTS = ("activation", "positioned", "expand")


def apply_compile(
    stages: nn.Module | Sequence[nn.Module], strategy: Strategy, patterns: Patterns, backend: str = "inductor"
) -> None:
    """Compiles the layers of a rank in place, at their first call. Recompute is applied before, data parallelism after.

    A layer that is compiled whole recomputes all that is cheap wherever selective recompute names any of it.
    """
    if torch.cuda.is_available():
        # The compiler would do so in the middle of a pass, which checkpointing refuses.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    settings: dict[str, Any] = {"backend": backend, "fullgraph": True}
    for part in [stages] if isinstance(stages, nn.Module) else stages:
        for _, layer in matching(part, patterns.layers):
            if any(_communicates(module, strategy) for module in layer.modules()):
                _compile_parts(layer, partial(torch.compile, **settings), strategy)
            else:
                layer.compile(**settings)


def _communicates(module: nn.Module, strategy: Strategy) -> bool:
    """Whether the module's own forward pass talks to other ranks. (Attention over ranks is an operator of its own.)"""
    over_tensor = strategy.tp > 1 and (
        hasattr(module, "project") or hasattr(module, "join") or bool(module._forward_pre_hooks)
    )
    over_experts = hasattr(module, "exchange") and max(strategy.tp, strategy.cp, strategy.ep) > 1
    return over_tensor or over_experts


def _compile_parts(module: nn.Module, compiled: Any, strategy: Strategy) -> None:
    """What of the module neither communicates nor has to be called by recompute, as large as it can be."""
    if not any(_communicates(one, strategy) or _recomputed(one) for one in module.modules()):
        module.forward = compiled(module.forward)
        return
    for name in _BETWEEN_PRODUCTS:
        function: Any = getattr(module, name, None)
        if hasattr(function, "again"):
            function.again = compiled(function.again)
        elif callable(function):
            setattr(module, name, compiled(function))
    for child in module.children():
        if not type(child).__module__.startswith("torch.nn") and "norm" not in type(child).__name__.lower():
            _compile_parts(child, compiled, strategy)


def _recomputed(module: nn.Module) -> bool:
    return any(hasattr(getattr(module, name, None), "again") for name in _BETWEEN_PRODUCTS)
