"""Measures the levels of a network: collectives by the backend and by our schedules, among the ranks of each level."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal

import torch
import torch.distributed as dist

from shardwise.collectives import CollectiveKind, Topology, build_schedule
from shardwise.engine.collectives import Communicator
from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.mesh import process_group
from shardwise.layout.groups import Division, RankRun, division_of
from shardwise.measure.calibrate.ranks import Rank, undisturbed
from shardwise.measure.collectives.run import Operation

Runner = Literal["backend", "schedules"]
SIZES = (2**10, 2**15, 2**18, 2**20, 2**22)
ROUNDS = 4


@dataclass(frozen=True)
class LinkSample:
    """A collective that all ``groups`` of ranks ran at the same time."""

    level: int
    runner: Runner
    kind: str
    algorithm: str
    groups: tuple[tuple[int, ...], ...]
    size_bytes: int
    seconds: float
    delay: float = 0.0  # of the wire; 0 if unknown


# Runner, collective and algorithm.
CASES: tuple[tuple[Runner, CollectiveKind, str], ...] = (
    ("backend", CollectiveKind.ALL_REDUCE, "ring"),
    ("backend", CollectiveKind.ALL_GATHER, "ring"),
    ("backend", CollectiveKind.REDUCE_SCATTER, "direct"),
    ("schedules", CollectiveKind.ALL_REDUCE, "ring"),
    ("schedules", CollectiveKind.ALL_GATHER, "direct"),
    ("schedules", CollectiveKind.REDUCE_SCATTER, "direct"),
)


def level_groups(widths: Sequence[int], level: int) -> Division:
    """The groups of ranks that one level connects; rank numbers vary fastest along the innermost level."""
    return division_of(prod(widths), [RankRun(prod(widths[:level]), widths[level])])


def measure_links(
    rank: Rank, widths: tuple[int, ...], device: str, threads: int, sizes: tuple[int, ...] = SIZES
) -> list[LinkSample]:
    """Called on every rank of a cluster with levels of ``widths``; what this rank measured."""
    torch.set_num_threads(threads)
    with process_group(rank.number, rank.world, rank.store, device=device):
        samples = []
        for level, width in enumerate(widths):
            if width == 1:
                continue
            groups = level_groups(widths, level)
            made = [dist.new_group(list(ranks)) for ranks in groups]
            mine = next(index for index, ranks in enumerate(groups) if rank.number in ranks)
            for active in dict.fromkeys(((0,), tuple(range(len(groups))))):
                taking_part = mine in active
                chosen = tuple(groups[index] for index in active)
                for case, size in product(CASES, sizes):
                    call = _call(*case, size, made[mine], torch.device(device)) if taking_part else lambda: None
                    repeats = 24 if size <= 2**16 else 6 if size <= 2**18 else 2
                    call()
                    samples.append(LinkSample(level, *case, chosen, size, _timed(call, ROUNDS, repeats)))
        return samples


def slowest(of_ranks: Sequence[Sequence[LinkSample]], delay: float = 0.0) -> list[LinkSample]:
    """One sample for all ranks that took part: a collective ends when its last rank does."""
    return [replace(same[0], seconds=max(sample.seconds for sample in same), delay=delay) for same in zip(*of_ranks)]


def _call(
    runner: Runner, kind: CollectiveKind, algorithm: str, size: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    operation = Operation(kind, group, size, device)
    if runner == "backend":
        return operation.by_backend()
    schedule = build_schedule(kind, Topology.switch(group.size(), 1.0), algorithm)
    return operation.by_schedule(Communicator(group), schedule)


def _timed(call: Callable[[], object], rounds: int, repeats: int = 1) -> float:
    """The seconds of a call, of several back to back: it then hardly matters which rank left the barrier first."""
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / repeats)
    return undisturbed(seconds)


# -- how much communication slows concurrent computation: on a CPU both run on the same cores --------

OVERLAP_ROUNDS, OVERLAP_ELEMENTS = 7, 2**20


def measure_overlap(rank: Rank, device: str, threads: int) -> float:
    """The share of an overlapped all-reduce that is not hidden behind concurrent matmuls; 1 if nothing is."""
    torch.set_num_threads(threads)
    with process_group(rank.number, rank.world, rank.store, device=device):
        world = dist.group.WORLD
        assert world is not None
        gradient = torch.ones(OVERLAP_ELEMENTS, device=device)
        width = 256 if device == "cpu" else 4096
        side = torch.randn(width, width, device=device)

        def send() -> None:
            all_reduce_sum(gradient, world)

        sending = _timed(send, OVERLAP_ROUNDS)
        repeats = max(1, round(sending / _timed(lambda: side @ side, OVERLAP_ROUNDS)))

        def compute() -> None:
            for _ in range(repeats):
                side @ side

        def both() -> None:
            pending = all_reduce_sum(gradient, world, async_op=True)
            compute()
            if pending is not None:
                pending.wait()

        sending, computing, together = (_timed(call, OVERLAP_ROUNDS) for call in (send, compute, both))
        hidden = min(sending, computing)
        return min(1.0, max(0.0, (together - max(sending, computing)) / hidden))
