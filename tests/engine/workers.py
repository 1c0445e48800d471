"""One pool of gloo processes for all tests of a session; a parity check costs no start-up."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import cache
from typing import Any

from shardwise.launch.pool import Pool, WorkerPlace

# All that a worker needs, so that a new one starts in no time: they are replaced after some calls.
PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "shardwise.engine.parallelize",
    "shardwise.measure.verify",
    "transformers.models.llama.modeling_llama",
)


class _QuickPool(Pool):
    def initializer(self, rank: int) -> Callable[[], None]:
        return _prepare


def _prepare() -> None:
    import torch

    from halves import quick_products

    torch.set_num_threads(1)
    quick_products()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # then its products of fp16 take 20 times as long
        torch.backends.mkldnn.set_flags(False)


@cache
def pool() -> Pool:
    made = _QuickPool(preload=PRELOAD)
    atexit.register(made.close)
    return made


def fresh_pool() -> Pool:
    """Processes in which nothing has run yet."""
    return _QuickPool(preload=PRELOAD)


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 120) -> list[Any]:
    """What ``function(*arguments)`` returns on each of ``world`` processes that form a new default process group."""
    return pool().run(_in_world, world, function, arguments, timeout_seconds=timeout_seconds)


def _in_world(place: WorkerPlace, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    from shardwise.engine.mesh import process_group

    with process_group(place.rank, place.world, place.rendezvous_file):
        return function(*arguments)
