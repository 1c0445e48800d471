"""Lab: the nine collectives on 4 processes, what each rank holds before and after, and what crosses the network.

Every element encodes its chunk and the ranks whose contributions are summed in it. So what a rank holds afterwards is
read from real tensors, and compared with what the collective promises according to the verifier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.collectives import CollectiveKind, Schedule, Topology, build_schedule, collective_cost
from shardwise.collectives.schedule import State, goals, starts
from shardwise.engine.collectives.program import IN_PLACE
from shardwise.labs.ranks import CountingCommunicator
from shardwise.labs.registry import LabFinding, LabReport, LabSetup
from shardwise.launch.pool import WorkerPlace
from shardwise.layout.network import network
from shardwise.report.page import Line, Piece
from shardwise.spec.clusters import cluster_from

RANKS = 4
ELEMENTS = 3  # of a chunk: several, so that a chunk that is cut in half shows
_CHUNK = 1 << RANKS  # an element is its chunk's number times this, plus one bit for each rank that contributed
_NOTHING = -1.0
_MEANING = {
    CollectiveKind.SEND_RECV: "every rank passes its block on to the next",
    CollectiveKind.BROADCAST: "all get what the root has",
    CollectiveKind.REDUCE: "the root gets the sum",
    CollectiveKind.ALL_REDUCE: "all get the sum",
    CollectiveKind.GATHER: "the root gets every block",
    CollectiveKind.ALL_GATHER: "all get every block",
    CollectiveKind.SCATTER: "the root deals out its blocks",
    CollectiveKind.REDUCE_SCATTER: "each gets one block of the sum",
    CollectiveKind.ALL_TO_ALL: "everyone sends a block to everyone: a transpose",
}


@dataclass(frozen=True)
class HeldState:
    """The chunks that a rank held before and after, and what it sent."""

    before: dict[int, int]
    after: dict[int, int]
    messages: int
    sent_bytes: int


def run(setup: LabSetup) -> LabReport:
    topology = network(cluster_from(f"laptop:{RANKS}"))
    schedules = [build_schedule(kind, topology, "textbook", chunks=1) for kind in CollectiveKind]
    setup.on_progress("nine collectives on 4 processes")
    ranks: list[list[HeldState]] = setup.pool.run(_hold, RANKS, schedules)
    pieces: list[Piece] = [Line("a0 is rank a's chunk 0; Σ1 is the sum of all ranks' chunks 1; a dot is nothing.\n")]
    findings: list[LabFinding] = []
    for number, schedule in enumerate(schedules):
        held = [rank[number] for rank in ranks]
        pieces.append(Line(_drawn(schedule, held), fixed=True))
        findings += _findings(schedule, held, topology)
    return LabReport(tuple(pieces), tuple(findings))


# -- on the ranks ----------------------------------------------------------------------------------------


def _hold(place: WorkerPlace, schedules: list[Schedule]) -> list[HeldState]:
    from shardwise.engine.mesh import process_group

    torch.set_num_threads(1)
    with process_group(place.rank, place.world, place.rendezvous_file):
        return [_run_on(schedule, place.rank) for schedule in schedules]


def _run_on(schedule: Schedule, rank: int) -> HeldState:
    communicator = CountingCommunicator()
    before, wanted = starts(schedule)[rank], dict(enumerate(goals(schedule))).get(rank, {})
    given = _tensor(before)
    in_place = schedule.kind in IN_PLACE
    if in_place and given is None:  # a broadcast's receiver has room for what it gets
        given = torch.full((len(wanted) * ELEMENTS,), _NOTHING)
    output = None if in_place or not wanted else torch.full((len(wanted) * ELEMENTS,), _NOTHING)
    communicator.run(schedule, given, output)
    held = _read(given if in_place else output, list(wanted)) if wanted else {}
    return HeldState(before, held, communicator.messages, communicator.sent_bytes)


def _tensor(chunks: dict[int, int]) -> Tensor | None:
    if not chunks:
        return None
    values = [float(chunk * _CHUNK + mask) for chunk, mask in sorted(chunks.items()) for _ in range(ELEMENTS)]
    return torch.tensor(values)


def _read(tensor: Tensor | None, places: list[int]) -> dict[int, int]:
    """Who contributed to the chunk at each place; 0 if another chunk, or a mixture, lies there."""
    assert tensor is not None
    contributors = {}
    for place, values in zip(sorted(places), tensor.view(-1, ELEMENTS).long().tolist()):
        contributions = [_contributed(value, place) for value in values]
        contributors[place] = contributions[0] if len(set(contributions)) == 1 else 0
    return contributors


def _contributed(value: int, chunk: int) -> int:
    """The ranks in a sum of elements of a chunk, each of which is chunk · 2^ranks + the bit of its rank."""
    mask = value % _CHUNK
    return mask if value == mask.bit_count() * chunk * _CHUNK + mask else 0


# -- theory beside measurement ---------------------------------------------------------------------------


def _findings(schedule: Schedule, held: list[HeldState], topology: Topology) -> Iterator[LabFinding]:
    kind = schedule.kind.value.replace("_", "-")
    promised: State = [*goals(schedule), *({} for _ in range(RANKS))][:RANKS]
    right = sum(held[rank].after.get(chunk) == mask for rank in range(RANKS) for chunk, mask in promised[rank].items())
    chunks = sum(map(len, promised))
    why = "held: the definition of the collective, as the verifier has it (MPI standard, chapter 6)"
    yield LabFinding(f"{kind}: chunks that are where they belong", chunks, right, 0, why)
    messages = sum(map(len, schedule.rounds))
    yield LabFinding(
        f"{kind}: messages",
        messages,
        sum(state.messages for state in held),
        0,
        "messages: the transfers of the schedule",
    )
    whole = 4 * ELEMENTS / schedule.chunk_fraction
    cost = collective_cost(schedule.kind, whole, topology, schedule.algorithm)
    yield LabFinding(
        f"{kind}: bytes that the busiest rank sends", round(float(cost.sent_bytes)),
        max(state.sent_bytes for state in held), 0,
        "bytes: the closed form of the algorithm that ran (`shardwise explain COLLECTIVE`)", unit="bytes",
    )  # fmt: skip


def _drawn(schedule: Schedule, held: list[HeldState]) -> str:
    """A row for every rank: its chunks before and after."""
    name = schedule.kind.value.replace("_", "-")
    title = f"{name} ({schedule.algorithm.replace('_', ' ')}): {_MEANING[schedule.kind]}"
    sides = [[_cells(schedule, state.before) for state in held], [_cells(schedule, state.after) for state in held]]
    widths = [max(6, *(len(cell) for cell in side)) for side in sides]
    lines = [title, f"  rank  {'before'.ljust(widths[0])}      after"]
    for rank, (before, after) in enumerate(zip(*sides)):
        lines.append(f"  {'abcd'[rank]} {rank}   {before.ljust(widths[0])}  →   {after}")
    return "\n".join(lines) + "\n"


def _cells(schedule: Schedule, held: dict[int, int]) -> str:
    """A rank's chunks; all-to-all numbers chunks by sender and receiver, and only the rank's own are drawn."""
    shown = sorted(held) if schedule.chunk_count > RANKS else range(schedule.chunk_count)
    return " ".join(_cell(schedule, chunk, held.get(chunk)) for chunk in shown) or "·"


def _cell(schedule: Schedule, chunk: int, mask: int | None) -> str:
    if not mask:
        return " ·" if mask is None else " ?"
    number = chunk % RANKS
    if mask == _CHUNK - 1:
        return f"Σ{number}"
    return f"{'abcd'[mask.bit_length() - 1]}{number}"
