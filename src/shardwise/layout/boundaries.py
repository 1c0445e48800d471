"""Between two stages of unlike degrees: which part of a microbatch's hidden states goes from which rank to which.

A microbatch is a table of sequences by tokens. The data-parallel ranks of a stage cut its sequences, context
parallelism cuts its tokens the same way in all stages, and tensor parallelism cuts them once more under sequence
parallelism; without it every tensor-parallel rank holds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout.ranks import coordinates, first_rank, stage_of
from shardwise.spec.job import Job

Span = tuple[int, int]  # from the first to behind the last


@dataclass(frozen=True)
class SharedPiece:
    """A rectangle of this rank's hidden states that ``rank`` holds too: ``rows`` and ``tokens`` of the tensor here."""

    rank: int
    rows: Span
    tokens: Span


def pieces_sent(job: Job, rank: int, stage: int) -> tuple[SharedPiece, ...]:
    """What a rank sends of a tensor to the ranks of a neighbouring pipeline rank ``stage``."""
    return _pieces(job, rank, stage, sends=True)


def pieces_received(job: Job, rank: int, stage: int) -> tuple[SharedPiece, ...]:
    """What a rank receives of a tensor from the ranks of a neighbouring pipeline rank ``stage``."""
    return _pieces(job, rank, stage, sends=False)


@dataclass(frozen=True)
class _Held:
    """What a rank holds of a microbatch of all replicas."""

    rows: Span
    tokens: Span
    place: dict[str, int]
    tensor_parallel: int


def _pieces(job: Job, rank: int, stage: int, *, sends: bool) -> tuple[SharedPiece, ...]:
    own, own_first = stage_of(job.strategy, rank)
    here = _held(job, own, rank - own_first)
    there = job.strategy.of_stage(stage)
    first, ranks = first_rank(job.strategy, stage), there.tp * there.cp * there.data_parallel
    pieces = []
    for number in range(ranks):
        other = _held(job, stage, number)
        sender, receiver = (here, other) if sends else (other, here)
        rows, tokens = _common(here.rows, other.rows), _common(here.tokens, other.tokens)
        if rows and tokens and here.place["cp"] == other.place["cp"] and _is_sent(job, sender, receiver):
            pieces.append(SharedPiece(first + number, _from(here.rows, rows), _from(here.tokens, tokens)))
    return tuple(pieces)


def _is_sent(job: Job, sender: _Held, receiver: _Held) -> bool:
    """Of ranks that hold the same, one sends to each receiver."""
    if job.strategy.sequence_parallel:
        return True
    return receiver.place["tp"] % sender.tensor_parallel == sender.place["tp"]


def _held(job: Job, stage: int, number: int) -> _Held:
    """What the rank with this number inside its stage holds."""
    strategy = job.strategy.of_stage(stage)
    place, tokens = coordinates(strategy, number), job.training.seq // strategy.cp
    parts = strategy.tp if strategy.sequence_parallel else 1
    part = place["tp"] if strategy.sequence_parallel else 0
    return _Held(
        _part(strategy.microbatch * strategy.data_parallel, strategy.data_parallel, place["dp"]),
        _part(tokens, parts, part),
        place,
        strategy.tp,
    )


def _part(whole: int, parts: int, number: int) -> Span:
    each = whole // parts
    return number * each, (number + 1) * each


def _common(first_span: Span, second_span: Span) -> Span | None:
    first, end = max(first_span[0], second_span[0]), min(first_span[1], second_span[1])
    return (first, end) if first < end else None


def _from(origin: Span, span: Span) -> Span:
    return span[0] - origin[0], span[1] - origin[0]
