"""A collective algorithm as plain data: rounds of transfers of equal chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.collectives.kinds import CollectiveKind


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
    n: int
    """Ranks."""
    chunk_count: int
    chunk_fraction: float
    """The size of a chunk as a share of the collective's size."""
    rounds: tuple[Round, ...]
    """All transfers of a round read the state from the beginning of the round."""
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
