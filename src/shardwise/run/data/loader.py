"""A rank's batches, prefetched by threads: in every layout step s trains on samples s·B to (s+1)·B of the mixture."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardwise.run.data.order import Mixture, positions_in
from shardwise.run.data.token_files import Tokens

MOST_WORKERS, MOST_AHEAD = 4, 16  # of an `auto` loader: threads, and batches ahead


@dataclass(frozen=True)
class Rows:
    """A rank's sequences of one step, [sequences, seq] each."""

    step: int
    tokens: Tokens
    labels: Tokens
    positions: Tokens
    documents: Tokens


def rows_of(mixture: Mixture, step: int, batch: int, rows: range | None = None) -> Rows:
    """The ``rows`` of a step's global batch that a data-parallel rank trains on; all by default."""
    rows = range(batch) if rows is None else rows
    samples = mixture.samples(step * batch + np.arange(rows.start, rows.stop, dtype=np.int64))
    documents = np.stack([sample.documents for sample in samples])
    tokens, labels = np.stack([sample.tokens for sample in samples]), np.stack([sample.labels for sample in samples])
    return Rows(step, tokens, labels, positions_in(documents), documents)


class Loader:
    """Gives the rows of a step, while ``workers`` threads prepare the next ``prefetch`` steps.

    Reading a mapped file and copying arrays release the GIL, so threads suffice. ``waited_seconds`` is how long the
    loop was blocked on data; an ``auto`` loader then prefetches more.
    """

    def __init__(
        self,
        mixture: Mixture,
        batch: int,
        rows: range | None = None,
        *,
        workers: Literal["auto"] | int = "auto",
        prefetch: Literal["auto"] | int = "auto",
    ) -> None:
        self.mixture, self.batch, self.rows = mixture, batch, rows
        self.grows = prefetch == "auto"
        self.prefetch, self.waited_seconds = 2 if prefetch == "auto" else prefetch, 0.0
        self._threads = ThreadPoolExecutor(MOST_WORKERS if workers == "auto" else workers, thread_name_prefix="data")
        self._made: dict[int, Future[Rows]] = {}
        self._lock = threading.Lock()

    def take(self, step: int) -> Rows:
        with self._lock:
            wanted = range(step, step + self.prefetch + 1)
            ahead = step in self._made
            for number in wanted:
                if number not in self._made:
                    share = (self.batch, self.rows)
                    self._made[number] = self._threads.submit(rows_of, self.mixture, number, *share)
            for number in [made for made in self._made if made not in wanted]:
                self._made.pop(number).cancel()
            future = self._made.pop(step)
        began = time.perf_counter()
        late = not future.done()
        rows = future.result()
        self.waited_seconds += time.perf_counter() - began
        if late and ahead and self.grows:
            self.prefetch = min(MOST_AHEAD, self.prefetch + 1)
        return rows

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
