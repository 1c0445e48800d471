"""Memory of this rank: from the allocator on a GPU, the bytes in tensors on a CPU; never the size of the process.

Every storage is counted once, from its creating operator until it is freed, on any device but meta, real or fake.
Kernel workspaces, and what an allocator rounds up or caches, are not counted.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage

from shardwise.engine.torch_private import TorchDispatchMode, storage_id, tree_iter

Observer = Callable[[Any, Any, Any, Any], None]  # operator, arguments by place and by name, result


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a type wrap others: their operators are counted when they reach the inner tensors."""
    return kind.__name__ in ("DTensor", "AsyncCollectiveTensor")


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; ``watch`` adds tensors that existed before.

    ``observers`` are called with every operator that runs, its arguments and its result.

    >>> with TensorBytes() as memory:
    ...     kept = torch.zeros(256) + torch.ones(256)  # two terms and their sum
    >>> memory.peak, memory.live
    (3072, 1024)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.observers: list[Observer] = []
        self._known: dict[int, _KnownStorage] = {}
        self._resize: Callable[..., Any] | None = None

    def watch(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.see(tensor)

    def reset_peak(self) -> None:
        self.peak = self.live

    # -- hooks for subclasses -------------------------------------------------------------------------

    def changed(self, key: int, difference: int, operator: str) -> None:
        """The storage ``key`` has grown (a new one from 0) or shrunk (a freed one to 0)."""
        self.live += difference
        self.peak = max(self.peak, self.live)

    def gone(self, key: int) -> None:
        """The storage ``key`` is freed; another one may get its key."""

    # -- watching -------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # queries before every operator on a fake tensor
            return result
        name = func.name()
        for output in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(output, Tensor) and output.device.type != "meta":
                self.see(output, name)
        for observer in self.observers:
            observer(func, args, kwargs or {}, result)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and telling the compiler so costs more than the counting."""
        return False

    def see(self, tensor: Tensor, operator: str = "") -> int:
        """Counts the tensor's storage if it is new or has changed its size; returns its key."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        size = storage.nbytes()
        known = self._known.get(key)
        if known is None:
            self._known[key] = known = _KnownStorage(weakref.ref(storage, lambda _: self._freed(key)))
        self._resized(key, known, size, operator)
        return key

    def _resized(self, key: int, known: _KnownStorage, size: int, operator: str) -> None:
        if known.size != size:
            difference, known.size = size - known.size, size
            self.changed(key, difference, operator)

    def _freed(self, key: int) -> None:
        size = self._known.pop(key).size
        if size:
            self.changed(key, -size, "")
        self.gone(key)

    def __enter__(self) -> TensorBytes:
        # FSDP frees and reallocates gathered parameters by resizing their storages, which is not an operator.
        original = self._resize = UntypedStorage.resize_
        watching = self

        def resize(storage: UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            known = watching._known.get(storage_id(storage))
            if known is not None:
                watching._resized(storage_id(storage), known, size, "resize")
            return result

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]


class _KnownStorage:
    """A counted storage: its bytes, and the reference whose callback reports that it is freed."""

    __slots__ = ("reference", "size")

    def __init__(self, reference: weakref.ref[UntypedStorage]) -> None:
        self.reference, self.size = reference, 0


Result = TypeVar("Result")


@contextmanager
def tensors_counted() -> Iterator[TensorBytes]:
    """Counts the bytes in all tensors of this process, existing ones included; slows every operator.

    Compiled functions run eagerly meanwhile: the compiler cannot trace the counting.
    """
    memory = TensorBytes()
    gc.unfreeze()  # frozen objects are not listed
    memory.watch([tensor for tensor in gc.get_objects() if issubclass(type(tensor), Tensor) and _holds_memory(tensor)])
    gc.freeze()
    memory.reset_peak()
    with torch.compiler.set_stance("force_eager"), memory:
        yield memory


def _holds_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own; wrappers and the fake tensors that the compiler keeps do not."""
    return not is_wrapper(type(tensor)) and type(tensor).__name__ != "FakeTensor" and not tensor.is_meta


def peak_during(device: torch.device, work: Callable[[], Result]) -> tuple[Result, int]:
    """The result of ``work`` and its peak bytes; on a GPU the peak since the start or the last reset."""
    if device.type == "cuda":
        return work(), torch.cuda.max_memory_allocated(device)
    with tensors_counted() as memory:
        result = work()
    return result, memory.peak


def device_memory(device: torch.device) -> dict[str, int]:
    """Peaks of the allocator since the start; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "memory_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def resident_bytes() -> int:
    """The process's resident set size with shared pages; only logged, never compared."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
