"""Collectives that differ between ranks: what PyTorch's debug mode says about them, in one line."""

from __future__ import annotations

import re

_RUNNING = re.compile(
    r"Rank (?P<rank>\d+) is running (?:collective|operation): CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<sequence>\d+))?.*?OpType=(?P<operation>\w+)"
    r"(?:.*?TensorShape=(?P<shape>\[[^\]]*\]))?(?:.*?TensorDtypes=(?P<dtype>[^,)]*))?",
    re.DOTALL,
)


def explain_mismatch(message: str) -> str:
    """The ranks and their collectives, where ``message`` says that these differ; else ""."""
    if "mismatch between collectives" not in message:
        return ""
    calls = [match for part in message.split(", but ") if (match := _RUNNING.search(part))]
    if len(calls) < 2:
        return " ".join(message.split())[:300]
    where = f" (number {calls[0]['sequence']})" if calls[0]["sequence"] else ""
    return f"the ranks call different collectives{where}: " + ", ".join(_call(one) for one in calls)


def _call(match: re.Match[str]) -> str:
    tensor = " ".join(part for part in (match["dtype"], match["shape"]) if part)
    return f"rank {match['rank']} calls {match['operation'].lower()}" + (f" of {tensor}" if tensor else "")
