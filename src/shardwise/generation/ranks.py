"""The ranks that generate: this process, local processes, or those that a launcher started."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.engine.world import joined
from shardwise.generation.decoding import Collected, NextToken, generated_tokens
from shardwise.generation.load import loaded, opened_weights
from shardwise.generation.request import Generated, GenerationRequest, GenerationTimes
from shardwise.launch.owned import OwnedFolder, is_owned
from shardwise.launch.pool import Pool, WorkerError, WorkerPlace
from shardwise.run.environment.reader import Started
from shardwise.training.meeting import store_of

PRELOAD = ("torch", "shardwise.generation.ranks", "shardwise.generation.files")
LONGEST_SECONDS = 10.0**6  # for a whole file; a lost rank ends the others at once
EXCHANGE_SECONDS = 600.0  # in which loading ranks must meet
_LOOK_SECONDS = 0.03

Emit = Callable[[Any], None]  # plain data


class Clock:
    """Counts tokens and time from the moment that the first prompt is read."""

    def __init__(self, load_seconds: float) -> None:
        self._load_seconds, self._began = load_seconds, time.perf_counter()
        self._first: float | None = None
        self._tokens = 0

    def count(self, tokens: int) -> None:
        if self._first is None:
            self._first = time.perf_counter() - self._began
        self._tokens += tokens

    def times(self) -> GenerationTimes:
        seconds = time.perf_counter() - self._began
        return GenerationTimes(self._load_seconds, self._first or 0.0, seconds, self._tokens)


class RankWork(Protocol):
    """What every rank does with the model; the rank that ``leads`` emits events and writes."""

    def run(
        self, model: NextToken, request: GenerationRequest, clock: Clock, emit: Emit, leads: bool
    ) -> list[Generated]: ...


@dataclass(frozen=True)
class PromptList:
    """Prompts as tokens; emits every step as [[number of the prompt, token], ...]."""

    prompts: tuple[tuple[int, ...], ...]

    def run(
        self, model: NextToken, request: GenerationRequest, clock: Clock, emit: Emit, leads: bool
    ) -> list[Generated]:
        generated: list[Generated] = []
        for first in range(0, len(self.prompts), request.batch):
            batch = self.prompts[first : first + request.batch]
            generated += run_batch(
                model, batch, request, first, clock,
                lambda step, first=first: emit([[first + number, token] for number, token in step.items()]),  # type: ignore[misc]
            )  # fmt: skip
        return generated


def run_batch(
    model: NextToken, batch: Sequence[Sequence[int]], request: GenerationRequest, first: int, clock: Clock,
    on_step: Callable[[dict[int, int]], None],
) -> list[Generated]:  # fmt: skip
    collected = Collected(batch)
    for step in generated_tokens(model, batch, request, first):
        clock.count(len(step))
        collected.add(step)
        on_step(step)
    return collected.results(request.stop)


Done = tuple[list[Generated], GenerationTimes]


def run_ranks(request: GenerationRequest, work: RankWork, here: Started | None, on_event: Emit) -> Done:
    """Does the work on ``tp`` ranks, of which ``here`` may be this process; raises WorkerError if one is lost."""
    if here is not None:
        with joined(here.rank, here.world, store_of(here), device=request.device, seconds=EXCHANGE_SECONDS):
            return on_rank(request, work, on_event if here.rank == 0 else _to_nobody, leads=here.rank == 0)
    if request.tp == 1:
        return on_rank(request, work, on_event, leads=True)
    with OwnedFolder("generate") as folder, Pool(PRELOAD) as pool:
        events = str(folder / "events")
        with _followed(Path(events), on_event):
            results: list[Done] = pool.run(_worker, request.tp, request, work, events, timeout_seconds=LONGEST_SECONDS)
    return results[0]


def _worker(place: WorkerPlace, request: GenerationRequest, work: RankWork, events: str) -> Done | None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.world))
    with joined(
        place.rank, place.world, place.rendezvous_file, device=request.device, seconds=EXCHANGE_SECONDS
    ), Path(events).open("a", encoding="utf-8") as file:  # fmt: skip

        def emit(event: Any) -> None:
            if not is_owned(Path(events).parent):
                os._exit(1)  # nobody waits any more; the other ranks fail with this one
            file.write(json.dumps(event) + "\n")
            file.flush()

        leads = place.rank == 0
        result = on_rank(request, work, emit if leads else _to_nobody, leads=leads)
    return result if leads else None


def on_rank(request: GenerationRequest, work: RankWork, emit: Emit, *, leads: bool) -> Done:
    began = time.perf_counter()
    model = loaded(opened_weights(request), request.tp, request.device)
    clock = Clock(time.perf_counter() - began)
    return work.run(model, request, clock, emit, leads), clock.times()


def _to_nobody(event: Any) -> None:
    return


@contextmanager
def _followed(path: Path, on_event: Emit) -> Iterator[None]:
    """Calls ``on_event`` in a thread with the events that another process appends to a file during the block."""
    path.touch()
    over = threading.Event()

    def follow() -> None:
        with path.open(encoding="utf-8") as file:
            waiting = ""
            while True:
                last = over.is_set()
                waiting += file.read()
                *lines, waiting = waiting.split("\n")
                for line in lines:
                    on_event(json.loads(line))
                if last:
                    return
                over.wait(_LOOK_SECONDS)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


__all__ = ["Clock", "Done", "PromptList", "RankWork", "WorkerError", "run_batch", "run_ranks"]
