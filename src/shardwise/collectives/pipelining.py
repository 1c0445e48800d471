"""Any schedule in pieces that follow one another: while one piece crosses the slow level, the next is inside."""

from __future__ import annotations

from dataclasses import replace

from shardwise.collectives.schedule import Schedule, Transfer, side_by_side


def pipelined(schedule: Schedule, pieces: int, algorithm: str | None = None) -> Schedule:
    """Every chunk cut into ``pieces``; piece p runs through the rounds of ``schedule`` p rounds later than piece 0."""
    if pieces == 1:
        return schedule if algorithm is None else replace(schedule, algorithm=algorithm)

    def of_piece(piece: int) -> list[list[Transfer]]:
        later: list[list[Transfer]] = [[] for _ in range(piece)]
        return later + [
            [replace(t, chunks=tuple(chunk * pieces + piece for chunk in t.chunks)) for t in one]
            for one in schedule.rounds
        ]

    rounds = side_by_side([of_piece(piece) for piece in range(pieces)])
    return replace(
        schedule,
        chunk_count=schedule.chunk_count * pieces,
        chunk_fraction=schedule.chunk_fraction / pieces,
        rounds=tuple(map(tuple, rounds)),
        algorithm=algorithm or schedule.algorithm,
    )
