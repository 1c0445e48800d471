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
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.engine import cut_stages
from shardwise.engine.mesh import build_mesh, process_group, store_of
from shardwise.engine.parameters import held, materialise
from shardwise.generation.decoding import Collected, NextToken, generated_tokens
from shardwise.generation.request import Generated, GenerationRequest, GenerationTimes, layout_of
from shardwise.launch.owned import OwnedFolder, is_owned
from shardwise.launch.pool import Pool, WorkerError, WorkerPlace
from shardwise.models import Decoder
from shardwise.run.environment import Started
from shardwise.training.convert.sources import open_weights
from shardwise.training.convert.weights import DTYPES, Weights

# -- a model's weights, saved under any layout, on this rank -----------------------------------------


def opened_weights(request: GenerationRequest) -> Weights:
    """The weights in a single type: the requested one, or that of the embedding."""
    weights = open_weights(Path(request.source), request.model, [Path(folder) for folder in request.adapters])
    return weights.as_type(request.dtype or stored_dtype(weights))


def stored_dtype(weights: Weights) -> str:
    stored = weights.tensors["embedding.weight"].dtype
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "fp32")


@torch.no_grad()
def loaded(weights: Weights, tp: int, device: str) -> NextToken:
    """This rank's part of the model; all ``tp`` ranks of the default process group call this.

    Tensors are read one at a time, in full; only the rank's part is kept.
    """
    name = stored_dtype(weights)
    if tp == 1:
        with torch.device("meta"):
            decoder = Decoder(weights.model)
    else:
        job = layout_of(weights.model, tp, name)
        (part,) = cut_stages(job, build_mesh(job.strategy, device, job.model.key_value_heads)).values()
        assert isinstance(part, Decoder)
        decoder = part
    decoder.to(DTYPES[name]).eval().requires_grad_(False)
    materialise(decoder, torch.device(device))
    for held_parameter in held([decoder]):
        held_parameter.parameter.copy_(held_parameter.part.of(weights.tensors[held_parameter.name].read()))
    for key, buffer in decoder.named_buffers():
        if key in weights.tensors:
            buffer.copy_(weights.tensors[key].read())
        else:
            buffer.zero_()
    return NextToken(decoder) if tp == 1 else NextToken(decoder, _as_the_first)


def _as_the_first(chosen: Tensor) -> Tensor:
    """The first rank's choice; on some backends the ranks' logits differ in the last bit."""
    agreed = chosen.cpu()
    dist.broadcast(agreed, 0)
    return agreed.to(chosen.device)


# -- the ranks ---------------------------------------------------------------------------------------

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
        with process_group(here.rank, here.world, store_of(here), device=request.device, seconds=EXCHANGE_SECONDS):
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
    with process_group(
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
