"""Copies in the background: one thread for what leaves the device's memory, one for what comes back.

With a GPU each thread has a stream of its own, on which it waits for what was computed before it was asked. A copy is
over when its `wait` returns, or has raised what went wrong; whoever asked keeps its tensors until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.cost.payload import Payload


class Copy:
    """A copy that was asked for; ``tensors`` are kept until it is over."""

    def __init__(self, future: Future[None], *tensors: Tensor) -> None:
        self._future, self._tensors = future, tensors

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()
        self._tensors = ()


class Lanes:
    """The two threads of a rank, and a count of the bytes that each kind of transfer has moved."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved: Counter[Payload] = Counter()
        self._threads = {out: ThreadPoolExecutor(1, f"offload {'out' if out else 'in'}") for out in (True, False)}
        self._streams: dict[bool, Any] = {}
        if device.type == "cuda":
            self._streams = {out: torch.cuda.Stream(device) for out in (True, False)}  # type: ignore[no-untyped-call]

    def out(self, work: Callable[[], None], *tensors: Tensor) -> Copy:
        """Runs ``work`` after everything that the device was told so far, and after what went out before."""
        return self._run(True, work, tensors)

    def back(self, work: Callable[[], None], *tensors: Tensor) -> Copy:
        return self._run(False, work, tensors)

    def _run(self, out: bool, work: Callable[[], None], tensors: tuple[Tensor, ...]) -> Copy:
        before = torch.cuda.current_stream(self.device).record_event() if self._streams else None

        def run() -> None:
            with torch.no_grad(), self._on_stream(out, before):
                work()

        return Copy(self._threads[out].submit(run), *tensors)

    def _on_stream(self, out: bool, before: Any) -> AbstractContextManager[object]:
        return _Stream(self._streams[out], before) if self._streams else nullcontext()


class _Stream:
    """Makes a stream current for a while, and waits for all that was put on it."""

    def __init__(self, stream: Any, before: Any) -> None:
        self.stream, self.before = stream, before
        self.current: Any = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self.current.__enter__()
        self.stream.wait_event(self.before)

    def __exit__(self, *exception: Any) -> None:
        self.stream.synchronize()
        self.current.__exit__(*exception)
