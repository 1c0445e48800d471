"""A pool whose workers live on virtual nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from shardwise.launch.emulate.namespace import enter
from shardwise.launch.emulate.network import emulated
from shardwise.launch.pool import Pool
from shardwise.spec.emulation import Emulation


class EmulatedPool(Pool):
    """`Pool` on an emulated cluster: rank r lives on node r // ranks_per_node; ``network`` is what joins the nodes."""

    def __init__(self, emulation: Emulation, preload: Sequence[str] = ()) -> None:
        super().__init__(preload)
        self._network = ExitStack()
        try:
            self.network = self._network.enter_context(emulated(emulation))
        except BaseException:
            super().close()
            raise

    def run(self, function: Callable[..., Any], world: int, *arguments: Any, timeout_seconds: float = 300) -> list[Any]:
        there = self.network.emulation.world
        assert world <= there, f"{world} ranks on an emulated cluster of {there}"
        return super().run(function, world, *arguments, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        super().close()
        self._network.close()

    def first(self, rank: int) -> Callable[[], None]:
        node = self.network.emulation.node_of(rank)
        return partial(_move, self.network.namespace(node), self.network.environment_of_rank(rank))


def _move(namespace: str, environment: Mapping[str, str]) -> None:
    """Before anything of gloo exists in this process: its threads and sockets belong where they are made."""
    enter(namespace)
    os.environ.update(environment)
