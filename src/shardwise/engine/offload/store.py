"""Where offloaded tensors are: host memory, pinned where there is a GPU, or a file; and copies in the background.

With a GPU each direction has a stream of its own, on which a copy waits for what was computed before it was requested.
Between a GPU and pinned memory the copy engines do everything: the host neither copies nor waits (`StreamCopy`). What
the host takes part in (a file, sums of gradients) runs on one thread per direction; it is over when its `wait` returns
or raises what went wrong. Until then the caller keeps its tensors.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shardwise.engine.refuse import OFFLOAD_FOLDER, folder_of, nameless_file
from shardwise.layout.payloads import Payload
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Offload

MASTER, GRADIENT = "master", "gradient"  # what a region holds beside the moments, by name


class BackgroundCopy:
    """A copy in flight; ``tensors`` are kept until it is over."""

    def __init__(self, future: Future[None], *tensors: Tensor) -> None:
        self._future, self._tensors = future, tensors

    def wait(self, reader: Any = None) -> None:
        """The copy is over when this returns, also for a ``reader`` on another stream."""
        self._future.result()
        self._tensors = ()


class StreamCopy:
    """A copy by a GPU's copy engine; ``tensors`` are kept until a stream waits for it."""

    def __init__(self, done: Any, *tensors: Tensor) -> None:
        self._done, self._tensors = done, tensors

    def wait(self, reader: Any = None) -> None:
        """What is enqueued on the ``reader``'s stream (by default the current one) from now on runs after the copy."""
        (torch.cuda.current_stream() if reader is None else reader).wait_event(self._done)
        self._tensors = ()


class Incoming(Protocol):
    """What a reader waits for: one of the copies above, or an update of what is read."""

    def wait(self, reader: Any = None) -> None: ...


class Lanes:
    """One thread per direction, and the bytes that each kind of transfer has moved."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved: Counter[Payload] = Counter()
        self._threads = {out: ThreadPoolExecutor(1, f"offload {'out' if out else 'in'}") for out in (True, False)}
        self._streams: dict[bool, Any] = {}
        if device.type == "cuda":
            self._streams = {out: copy_stream(device) for out in (True, False)}

    def out(self, work: Callable[[], None], *tensors: Tensor) -> BackgroundCopy:
        """Runs ``work`` after everything enqueued on the device so far, and after earlier transfers out."""
        return self._run(True, work, tensors)

    def back(self, work: Callable[[], None], *tensors: Tensor) -> BackgroundCopy:
        return self._run(False, work, tensors)

    def stream(self, *, out: bool) -> Any:
        """The stream of one direction; None without a GPU."""
        return self._streams.get(out)

    def enqueue(self, work: Callable[[], None], out: bool, *tensors: Tensor) -> StreamCopy:
        """Has the copy engine run ``work`` after everything enqueued on the device so far; the host goes on."""
        stream = self._streams[out]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            work()
        return StreamCopy(stream.record_event(), *tensors)

    def _run(self, out: bool, work: Callable[[], None], tensors: tuple[Tensor, ...]) -> BackgroundCopy:
        before = torch.cuda.current_stream(self.device).record_event() if self._streams else None

        def run() -> None:
            with torch.no_grad(), _on_stream(self._streams.get(out), before):
                work()

        return BackgroundCopy(self._threads[out].submit(run), *tensors)


@contextmanager
def _on_stream(stream: Any, before: Any) -> Iterator[None]:
    """Makes a stream current that waits for the event ``before``; at the end the host waits for the stream."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.wait_event(before)
        try:
            yield
        finally:
            stream.synchronize()


def copy_stream(device: torch.device) -> Any:
    """A stream of high priority: others wait for the little that runs on it. Besides, streams of the same priority
    share a few hardware queues, in which a copy would hold up kernels that do not depend on it."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class StoredRegion(ABC):
    """A run of bytes in host memory or in a file; `write` and `read` copy contiguous tensors in the background."""

    def __init__(self, lanes: Lanes, size: int) -> None:
        self.lanes, self.size = lanes, size

    def write(self, at: int, tensor: Tensor) -> BackgroundCopy:
        source = as_bytes(tensor)
        return self.lanes.out(lambda: self.put(at, source), source)

    def read(self, at: int, into: Tensor) -> BackgroundCopy:
        target = as_bytes(into)
        return self.lanes.back(lambda: self.get(at, target), target)

    def keep(self, at: int, tensor: Tensor) -> BackgroundCopy | StreamCopy:
        """`write` of what only the device will read again, so that no host has to wait for it."""
        source = as_bytes(tensor)
        if not (source.is_cuda and self.is_pinned):
            return self.write(at, tensor)
        return self.lanes.enqueue(lambda: self.put(at, source), True, source)

    def bring(self, at: int, into: Tensor) -> BackgroundCopy | StreamCopy:
        """`read` of what the host or `keep` has written."""
        target = as_bytes(into)
        if not (target.is_cuda and self.is_pinned):
            return self.read(at, into)
        return self.lanes.enqueue(lambda: self.get(at, target), False, target)

    def add(self, at: int, tensor: Tensor, norm: Tensor, *, is_first: bool) -> BackgroundCopy:
        """Adds an fp32 tensor to the stored sum (replaces it if ``is_first``), and sets ``norm`` to the sum's norm."""
        source = tensor.detach().view(-1)

        def add() -> None:
            norm.copy_(torch.linalg.vector_norm(self.summed(at, source, is_first)))

        return self.lanes.out(add, source)

    @abstractmethod
    def put(self, at: int, source: Tensor) -> None:
        """Writes bytes, on a thread of its own."""

    @abstractmethod
    def get(self, at: int, target: Tensor) -> None: ...

    @abstractmethod
    def summed(self, at: int, source: Tensor, is_first: bool) -> Tensor:
        """The new sum, computed on the host, which waits for what comes from a GPU."""

    def in_memory(self, at: int, size: int) -> Tensor | None:
        """The bytes themselves, where the host can compute with them."""
        return None

    @property
    def is_pinned(self) -> bool:
        """Whether a copy engine reads and writes it by itself."""
        return False


class Store:
    """Makes regions for one rank, and reuses freed ones: every microbatch needs the same sizes."""

    def __init__(self, offload: Offload, device: torch.device, *, updates_on_device: bool = False) -> None:
        """``updates_on_device``: GPUs, not the host's processors, update states in host memory."""
        self.target: Literal["cpu", "nvme"] = offload.target
        self.updates_on_device = updates_on_device and self.target == "cpu"
        self.lanes = Lanes(device)
        self._file = _File(offload.folder) if self.target == "nvme" else None
        self._free: dict[int, list[StoredRegion]] = {}

    def region(self, size: int) -> StoredRegion:
        free = self._free.get(size)
        if free:
            return free.pop()
        if self._file is not None:
            return _FileRegion(self.lanes, size, self._file)
        return _HostRegion(self.lanes, size)

    def take_back(self, region: StoredRegion) -> None:
        """Nothing may be under way in it."""
        self._free.setdefault(region.size, []).append(region)


def host_tensor(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor in host memory from which ``device`` copies at full speed."""
    return torch.empty(elements, dtype=dtype, pin_memory=device.type == "cuda")


EXACT_FROM = 2**26  # bytes; smaller regions stay with PyTorch, which gets them faster


class _HostRegion(StoredRegion):
    """PyTorch rounds pinned memory up to a power of two (c10/core/CachingHostAllocator.h), so that long sequences would
    take up to twice what they need. What is large is allocated as it is, and pinned by CUDA."""

    def __init__(self, lanes: Lanes, size: int) -> None:
        super().__init__(lanes, size)
        if lanes.device.type == "cuda" and size >= EXACT_FROM:
            self.bytes = torch.empty(size, dtype=torch.uint8)
            address: int = self.bytes.data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
            weakref.finalize(self, _unpin, lanes.device, address).atexit = False
        else:
            self.bytes = host_tensor(size, torch.uint8, lanes.device)

    def put(self, at: int, source: Tensor) -> None:
        _copy(self.in_memory(at, source.numel()), source)

    def get(self, at: int, target: Tensor) -> None:
        _copy(target, self.in_memory(at, target.numel()))

    def summed(self, at: int, source: Tensor, is_first: bool) -> Tensor:
        total = self.in_memory(at, source.nbytes).view(torch.float32)
        return total.copy_(source) if is_first else total.add_(source.cpu())

    def in_memory(self, at: int, size: int) -> Tensor:
        return self.bytes[at : at + size]

    @property
    def is_pinned(self) -> bool:
        return self.lanes.device.type == "cuda"


def _unpin(device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


class _FileRegion(StoredRegion):
    def __init__(self, lanes: Lanes, size: int, file: _File) -> None:
        super().__init__(lanes, size)
        self.file, self.start = file, file.grow(size)

    def put(self, at: int, source: Tensor) -> None:
        self.file.write(source.cpu(), self.start + at)

    def get(self, at: int, target: Tensor) -> None:
        through = target if target.device.type == "cpu" else host_tensor(target.numel(), torch.uint8, target.device)
        self.file.read(through, self.start + at)
        if through is not target:
            _copy(target, through)

    def summed(self, at: int, source: Tensor, is_first: bool) -> Tensor:
        total = source.cpu()
        if not is_first:
            before = torch.empty_like(total)
            self.get(at, as_bytes(before))
            total = before.add_(total)
        self.put(at, as_bytes(total))
        return total


class _File:
    """One file without a name; regions of it are read and written at their places by several threads."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder_of(folder)
        self.size = 0
        self._file = nameless_file(self.folder)

    def grow(self, size: int) -> int:
        start, self.size = self.size, self.size + size
        return start

    def write(self, source: Tensor, start: int) -> None:
        self._move(os.pwritev, source, start)

    def read(self, target: Tensor, start: int) -> None:
        self._move(os.preadv, target, start)

    def _move(self, move: Callable[[int, list[Any], int], int], tensor: Tensor, start: int) -> None:
        """A disk may transfer less than was requested."""
        # Not `tensor.numpy()`, after which a storage can never be freed by resizing it.
        left = memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
        try:
            while left:
                done = move(self._file.fileno(), [left], start)
                if done == 0:
                    raise OSError("the file ends early")
                left, start = left[done:], start + done
        except OSError as error:
            problem = f"{self.folder}: {error.strerror or error}"
            raise SpecError(OFFLOAD_FOLDER, problem, "free some of it, or name another folder") from None


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as a row of bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
