"""Collectives, and an algorithm of one as plain data: rounds of transfers, and a proof that they do as they should."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shardwise.spec.errors import SpecError, nearest_name, shown

# -- The collective operations and the names people write for them


class CollectiveKind(StrEnum):
    """What the ranks want to end up with. The root of a rooted collective is rank 0.

    The size of a collective is that of its whole buffer: what every rank holds (all-reduce, broadcast,
    reduce, send_recv), the concatenation over the ranks (all-gather, reduce-scatter, gather, scatter),
    or what one rank sends in all, its own block included (all-to-all).
    """

    SEND_RECV = "send_recv"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    GATHER = "gather"
    ALL_GATHER = "all_gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"

    @classmethod
    def parse(cls, text: str | CollectiveKind) -> CollectiveKind:
        """The kind behind "allreduce", "all-reduce", "AllReduce", "a2a", "p2p", ..."""
        if isinstance(text, CollectiveKind):
            return text
        if isinstance(text, str):
            squeezed = re.sub(r"[^a-z0-9]", "", text.lower())
            squeezed = _ALIASES.get(squeezed, squeezed)
            for kind in cls:
                if kind.value.replace("_", "") == squeezed:
                    return kind
        names = [kind.value for kind in cls]
        remedy = nearest_name(str(text), names) or "choose one of " + ", ".join(names)
        raise SpecError("collective", f"{shown(text)} is not a collective", remedy)


_ALIASES = {
    "p2p": "sendrecv",
    "pointtopoint": "sendrecv",
    "sendreceive": "sendrecv",
    "send": "sendrecv",
    "recv": "sendrecv",
    "bcast": "broadcast",
    "ar": "allreduce",
    "ag": "allgather",
    "allgatherintotensor": "allgather",
    "rs": "reducescatter",
    "reducescattertensor": "reducescatter",
    "a2a": "alltoall",
    "alltoallv": "alltoall",
    "alltoallsingle": "alltoall",
}

# -- A collective algorithm as plain data: rounds of transfers of equal chunks


@dataclass(frozen=True, slots=True)
class Transfer:
    """``src`` sends chunks to ``dst``, which keeps them, or with ``reduce`` adds them to its own."""

    src: int
    dst: int
    chunks: tuple[int, ...]
    reduce: bool = False


Round = tuple[Transfer, ...]


@dataclass(frozen=True)
class Schedule:
    """Rounds of transfers of equal chunks.

    Gather, scatter, all-gather and reduce-scatter number chunks block by block (rank r owns r*c to r*c+c-1 with
    c = chunk_count/n), all-to-all by (src*n + dst)*c, send_recv by source rank.
    """

    kind: CollectiveKind
    n: int  # ranks
    chunk_count: int
    chunk_fraction: float  # the size of a chunk as a share of the collective's size
    rounds: tuple[Round, ...]  # all transfers of a round read the state from the beginning of the round
    algorithm: str

    def __str__(self) -> str:
        head = f"{self.algorithm} {self.kind}, n={self.n}, {len(self.rounds)} rounds, {self.chunk_count} chunks"
        return "\n".join([head, *(f"{i}: {_round_text(transfers)}" for i, transfers in enumerate(self.rounds))])


def _round_text(transfers: Round) -> str:
    parts = []
    for t in transfers:
        arrow = "+>" if t.reduce else "->"
        parts.append(f"{t.src}{arrow}{t.dst}[{','.join(map(str, t.chunks))}]")
    return " ".join(parts)


def schedule_of(
    kind: CollectiveKind, n: int, chunk_count: int, rounds: Iterable[Iterable[Transfer]], algorithm: str
) -> Schedule:
    """A schedule whose chunks cut the whole buffer evenly; empty rounds are dropped."""
    whole = {CollectiveKind.ALL_TO_ALL: n, CollectiveKind.SEND_RECV: n}.get(kind, 1)
    kept = tuple(transfers for transfers in map(tuple, rounds) if transfers)
    return Schedule(kind, n, chunk_count, whole / chunk_count, kept, algorithm)


_REVERSED = {
    CollectiveKind.ALL_GATHER: CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.BROADCAST: CollectiveKind.REDUCE,
    CollectiveKind.SCATTER: CollectiveKind.GATHER,
    CollectiveKind.GATHER: CollectiveKind.SCATTER,
}


def reverse(schedule: Schedule) -> Schedule:
    """The same rounds backwards: all-gather becomes reduce-scatter, broadcast becomes reduce, scatter becomes gather.

    Where a chunk fanned out, contributions now meet (Chan et al. 2007).
    """
    kind = _REVERSED[schedule.kind]
    adds = kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE)
    rounds = tuple(
        tuple(Transfer(t.dst, t.src, t.chunks, adds) for t in transfers) for transfers in reversed(schedule.rounds)
    )
    return replace(schedule, kind=kind, rounds=rounds)


def compose(kind: CollectiveKind, first: Schedule, second: Schedule) -> Schedule:
    assert (first.n, first.chunk_count) == (second.n, second.chunk_count)
    return replace(second, kind=kind, rounds=first.rounds + second.rounds)


def from_all_gather(kind: CollectiveKind, all_gather: Schedule) -> Schedule:
    """The all-gather, reduce-scatter or all-reduce that runs over the same routes."""
    if kind is CollectiveKind.ALL_GATHER:
        return all_gather
    reduce_scatter = reverse(all_gather)
    if kind is CollectiveKind.REDUCE_SCATTER:
        return reduce_scatter
    return compose(CollectiveKind.ALL_REDUCE, reduce_scatter, all_gather)


def from_root(kind: CollectiveKind, outward: Schedule) -> Schedule:
    """``outward`` (a broadcast or scatter) itself, or its reversal towards the root."""
    return outward if outward.kind is kind else reverse(outward)


def embed(rounds: Sequence[Round], ranks: Sequence[int], chunks: Mapping[int, tuple[int, ...]]) -> list[list[Transfer]]:
    """``rounds`` run by ``ranks``, with each small chunk standing for ``chunks[small]``."""
    return [
        [
            Transfer(ranks[t.src], ranks[t.dst], tuple(c for small in t.chunks for c in chunks[small]), t.reduce)
            for t in transfers
        ]
        for transfers in rounds
    ]


def side_by_side(parts: Iterable[Sequence[Sequence[Transfer]]]) -> list[list[Transfer]]:
    """Round i of every part at once."""
    merged: list[list[Transfer]] = []
    for part in parts:
        for index, transfers in enumerate(part):
            if index == len(merged):
                merged.append([])
            merged[index].extend(transfers)
    return merged


# -- Proof by symbolic execution that a schedule does what its collective promises
# Every rank's copy of a chunk is the set of ranks whose contributions have been summed into it, as the bits of an
# integer.

State = list[dict[int, int]]


class InvalidSchedule(ValueError):
    """The first way in which a schedule fails, in words."""


def verify(schedule: Schedule) -> None:
    """Raise InvalidSchedule unless every rank ends with the right chunks, each contribution in exactly once."""
    if schedule.chunk_count < 1 or schedule.chunk_count % _blocks(schedule):
        raise InvalidSchedule(f"{schedule.chunk_count} chunks do not cut the buffer into even blocks")
    state = starts(schedule)
    for index, transfers in enumerate(schedule.rounds):
        _run(transfers, state, f"round {index}")
    for rank, wanted in enumerate(goals(schedule)):
        for chunk, mask in wanted.items():
            held = state[rank].get(chunk)
            if held != mask:
                raise InvalidSchedule(
                    f"at the end rank {rank} holds {_contributions(held)} of chunk {chunk}, not {_contributions(mask)}"
                )


def _run(transfers: Round, state: State, where: str) -> None:
    copied: dict[tuple[int, int], int] = {}
    added: dict[tuple[int, int], int] = {}
    for t in transfers:
        what = f"{where}, {t.src} -> {t.dst}"
        if not (0 <= t.src < len(state) and 0 <= t.dst < len(state)) or t.src == t.dst:
            raise InvalidSchedule(f"{what}: not a pair of different ranks")
        source, target = state[t.src], state[t.dst]
        for chunk in t.chunks:
            mask = source.get(chunk)
            if mask is None:
                raise InvalidSchedule(f"{what}: rank {t.src} does not hold chunk {chunk}")
            key = (t.dst, chunk)
            if key in copied or (key in added and not t.reduce):
                raise InvalidSchedule(f"{what}: chunk {chunk} arrives twice")
            if not t.reduce:
                copied[key] = mask
                continue
            own = added.get(key, target.get(chunk, 0))
            if own & mask:
                twice = _contributions(own & mask)
                raise InvalidSchedule(f"{what}: {twice} of chunk {chunk} would be reduced twice")
            added[key] = own | mask
    for (rank, chunk), mask in (copied | added).items():
        state[rank][chunk] = mask


def _contributions(mask: int | None) -> str:
    if not mask:
        return "nothing"
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    shown = ",".join(ranks[:8]) + (f",... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"the contribution of rank {shown}" if len(ranks) == 1 else f"the contributions of ranks {shown}"


def _blocks(schedule: Schedule) -> int:
    return {
        CollectiveKind.BROADCAST: 1,
        CollectiveKind.REDUCE: 1,
        CollectiveKind.ALL_REDUCE: 1,
        CollectiveKind.ALL_TO_ALL: schedule.n**2,
    }.get(schedule.kind, schedule.n)


def starts(schedule: Schedule) -> State:
    """What each rank holds before the first round."""
    n, chunks = schedule.n, range(schedule.chunk_count)
    match schedule.kind:
        case CollectiveKind.BROADCAST | CollectiveKind.SCATTER:
            return [dict.fromkeys(chunks, 1) if rank == 0 else {} for rank in range(n)]
        case CollectiveKind.REDUCE | CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE_SCATTER:
            return [dict.fromkeys(chunks, 1 << rank) for rank in range(n)]
        case _:
            return [dict.fromkeys(_block(schedule, rank), 1 << rank) for rank in range(n)]


def goals(schedule: Schedule) -> State:
    """What each rank must hold after the last round; only the first entry where only the root gets anything."""
    n, chunks = schedule.n, range(schedule.chunk_count)
    everyone = (1 << n) - 1
    per_rank = schedule.chunk_count // n
    match schedule.kind:
        case CollectiveKind.BROADCAST:
            return [dict.fromkeys(chunks, 1)] * n
        case CollectiveKind.SCATTER:
            return [dict.fromkeys(_block(schedule, rank), 1) for rank in range(n)]
        case CollectiveKind.REDUCE:
            return [dict.fromkeys(chunks, everyone)]
        case CollectiveKind.ALL_REDUCE:
            return [dict.fromkeys(chunks, everyone)] * n
        case CollectiveKind.REDUCE_SCATTER:
            return [dict.fromkeys(_block(schedule, rank), everyone) for rank in range(n)]
        case CollectiveKind.GATHER:
            return [{chunk: 1 << chunk // per_rank for chunk in chunks}]
        case CollectiveKind.ALL_GATHER:
            return [{chunk: 1 << chunk // per_rank for chunk in chunks}] * n
        case CollectiveKind.SEND_RECV:
            return [{}] + [dict.fromkeys(_block(schedule, rank - 1), 1 << (rank - 1)) for rank in range(1, n)]
        case CollectiveKind.ALL_TO_ALL:
            split = schedule.chunk_count // n**2
            return [
                {(src * n + dst) * split + part: 1 << src for src in range(n) for part in range(split)}
                for dst in range(n)
            ]


def _block(schedule: Schedule, rank: int) -> range:
    """The chunks that belong to ``rank``: for all-to-all, those it sends."""
    per_rank = schedule.chunk_count // schedule.n
    return range(rank * per_rank, (rank + 1) * per_rank)
