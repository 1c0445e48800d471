"""Proof by symbolic execution that a schedule does what its collective promises.

Every rank's copy of a chunk is the set of ranks whose contributions have been summed into it, as the bits
of an integer.
"""

from __future__ import annotations

from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Round, Schedule

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
