"""A schedule as a small table: a row per rank, a column per round."""

from __future__ import annotations

from collections import defaultdict

from shardwise.collectives.schedule import Schedule, Transfer


def draw_rounds(schedule: Schedule, max_rounds: int = 8, max_ranks: int = 16) -> str:
    """What every rank sends in every round: ``2>3`` is chunk 2 to rank 3, ``2+3`` adds it there."""
    shown = schedule.rounds[:max_rounds]
    ranks = range(min(schedule.n, max_ranks))
    columns = []
    for number, one in enumerate(shown, start=1):
        cells: dict[int, list[str]] = defaultdict(list)
        for transfer in one:
            cells[transfer.src].append(_cell(transfer))
        texts = [f"round {number}", *(_short(cells[rank]) for rank in ranks)]
        width = max(map(len, texts))
        columns.append([text.ljust(width) for text in texts])
    labels = ["rank", *(str(rank).rjust(4) for rank in ranks)]
    lines = [
        f"{schedule.algorithm} {schedule.kind}: {schedule.n} ranks, {len(schedule.rounds)} rounds, "
        f"chunk = size x {schedule.chunk_fraction:.4g}"
    ]
    for index, label in enumerate(labels):
        lines.append(" | ".join([label, *(column[index] for column in columns)]).rstrip())
    hidden_ranks, hidden_rounds = schedule.n - len(ranks), len(schedule.rounds) - len(shown)
    if hidden_ranks or hidden_rounds:
        lines.append(f"... and {hidden_rounds} more rounds, {hidden_ranks} more ranks")
    return "\n".join(lines)


def _cell(transfer: Transfer) -> str:
    chunks = transfer.chunks
    if len(chunks) > 2 and chunks == tuple(range(chunks[0], chunks[-1] + 1)):
        name = f"{chunks[0]}-{chunks[-1]}"
    elif len(chunks) > 3:
        name = f"{chunks[0]},{chunks[1]}..({len(chunks)})"
    else:
        name = ",".join(map(str, chunks))
    return f"{name}{'+' if transfer.reduce else '>'}{transfer.dst}"


def _short(parts: list[str]) -> str:
    if len(parts) > 3:
        return f"{parts[0]} {parts[1]} ..({len(parts)})"
    return " ".join(parts) or "."
