"""Collectives that differ between ranks: what PyTorch's debug mode says about them, in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwise.launch.outcome import Failure
from shardwise.train.records import FailureRecord

_MISMATCH = "mismatch between collectives"
# Each rank tells its own collective first, then that of another, by numbers that count within their group.
_CALL = re.compile(
    r"is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<sequence>\d+))?.*?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=(?P<shape>\[[^\]]*\]))?(?:, TensorDtypes=(?P<dtype>\w+))?"
)


def different_collectives(records: Sequence[FailureRecord]) -> Failure | None:
    """Which ranks call what, where the ranks' records say that these differ."""
    ours = [record for record in records if _MISMATCH in record.message]
    calls: dict[str, list[int]] = {}
    for record in ours:
        told = [_call(match) for match in _CALL.finditer(record.message)]
        for call, rank in zip(told, (record.rank, -1)):
            calls.setdefault(call, []).append(rank)
    if not calls:
        return None
    who = {call: sorted({rank for rank in ranks if rank >= 0}) for call, ranks in calls.items()}
    odd = [ranks[0] for ranks in who.values() if len(ranks) == 1]
    text = ", ".join(f"{_names(ranks)} {call}" for call, ranks in sorted(who.items(), key=lambda one: one[1]))
    number = next((f" (number {match[1]})" for match in _CALL.finditer(ours[0].message) if match[1]), "")
    only = odd[0] if len(odd) == 1 and len(who) > 1 and len(ours) > 2 else None
    return Failure(only, "raised", f"different collectives{number}: {text}", ours[0].phase, ours[0].step)


def _call(match: re.Match[str]) -> str:
    tensor = " ".join(part for part in (match["dtype"], match["shape"]) if part)
    return match["operation"].lower() + (f" of {tensor}" if tensor else "")


def _names(ranks: Sequence[int]) -> str:
    if not ranks:
        return "another rank of the group calls"
    return f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"
