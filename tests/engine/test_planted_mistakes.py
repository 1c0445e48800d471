"""Mistakes that training would survive unnoticed: `verify` sees each of them, where it says they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from engine.layouts import Layout
from engine.parity import references
from engine.workers import pool
from shardwise.launch.pool import WorkerPlace
from shardwise.measure.verify import KINDS, verify


def nothing(*given: Any) -> None:
    """Instead of what should be done."""


def unchanged(self: Any, number: Any) -> Any:
    return number


def one(*given: Any) -> float:
    return 1.0


@dataclass(frozen=True)
class Mistaken:
    """The session's workers, with one function of the engine replaced."""

    function: str
    instead: Callable[..., Any]

    def run(self, function: Callable[..., Any], world: int, *arguments: Any, timeout_seconds: float) -> list[Any]:
        given = (self.function, self.instead, function, arguments)
        return pool().run(run_mistaken, world, *given, timeout_seconds=timeout_seconds)


def run_mistaken(
    place: WorkerPlace,
    mistaken: str,
    instead: Callable[..., Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    with mock.patch(mistaken, instead):
        return function(place, *arguments)


TRAINER, STEP = "shardwise.engine.trainer", "shardwise.engine.trainer.Trainer"
# What is left out → layout, function, instead of it, kinds of deviation that show it at least.
MISTAKES: dict[str, tuple[Layout, str, Callable[..., Any], set[str]]] = {
    "sums over tensor-parallel ranks": (
        Layout.of(tensor="sp"), f"{TRAINER}.sum_partial", nothing, {"gradient", "weight", "gradient_norm"}
    ),
    "clipping": (Layout.of(data="zero-1"), f"{TRAINER}.clip_divisor", nothing, {"weight"}),
    "tokens of other ranks": (
        Layout.of(data="zero-0"), f"{STEP}.over_data", unchanged, {"loss", "gradient", "gradient_norm", "weight"}
    ),
    "copies that count once in the norm": (
        Layout.of(tensor="sp"), f"{TRAINER}.ranks_with_copy", one, {"gradient_norm"}
    ),
    "gradients of the other end": (
        Layout.of("tied-gpt", pipeline="1f1b"), "shardwise.engine.pipeline.tied.TiedEnds.add_gradients", nothing,
        {"gradient", "gradient_norm", "weight"},
    ),
    "balancing of experts": (
        Layout.of("tiny-mla", data="zero-0", experts="ep"), "shardwise.engine.engine.update_balance", nothing,
        {"loss", "gradient", "gradient_norm", "weight"},
    ),
}  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    layout, function, instead, kinds = MISTAKES[mistake]
    job = layout.job()
    assert job is not None
    made: Any = Mistaken(function, instead)
    found = verify(job, pool=made, references=references())
    assert not found.ok
    assert {kind for kind in KINDS if found.worst[kind].value > found.tolerance} >= kinds
