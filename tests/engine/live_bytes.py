"""What a forward pass leaves in memory for its backward pass: every tensor made in it that is still alive.

Hooks on saved tensors would not do: those of recompute stand in their place. So storages are watched instead.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(frozen=True)
class Kept:
    """A tensor that is still alive: who made it, and its bytes."""

    made_by: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class _Watch(TorchDispatchMode):
    """Notes every storage that an operator makes, by a weak reference: a freed one is never mistaken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, Kept] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(one.untyped_storage()) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        results = func(*args, **(kwargs or {}))
        for one in tree_iter(results):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in given and func is not torch.ops.aten.set_.source_Storage:  # lasting scratch memory
                    self.made[reference] = Kept(str(func), tuple(one.shape), one.dtype, storage.nbytes())
        return results


def kept_by(forward: Callable[[Tensor], Tensor], inputs: Tensor, besides: Iterable[Tensor] = ()) -> list[Kept]:
    """Tensors that ``forward(inputs)`` keeps for its backward pass, its input among them if it is kept.

    ``inputs`` is copied first, so that nobody outside keeps it; ``besides`` are tensors that do not count.
    """
    leaf = inputs.detach().clone().requires_grad_()
    with _Watch() as watch:
        result = forward(leaf * 1)
    if dist.is_initialized():
        time.sleep(0.1)  # gloo's threads let go of a tensor a moment after the wait for it
    gc.collect(1)
    apart = {StorageWeakRef(one.untyped_storage()) for one in (result, *besides)}
    return [kept for reference, kept in watch.made.items() if not reference.expired() and reference not in apart]
