"""Ranks that do not move: which of them are overdue, and for which of them the others wait."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from shardwise.launch.outcome import Cause, Failure
from shardwise.launch.ranks import Rank
from shardwise.spec.timeouts import Timeouts
from shardwise.spec.units import readable_duration
from shardwise.train.records import BEAT_SECONDS, PHASES, FailureRecord, Phase, Progress, log_path

SILENT_SECONDS = 4 * BEAT_SECONDS
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_INNERMOST = 8  # frames in which a call of torch.distributed means that the rank waits in it


def limit_seconds(progress: Progress | None, timeouts: Timeouts) -> float:
    """How long a rank may stay where it is."""
    usual: dict[Phase, float] = {"start": timeouts.start, "data": timeouts.step, "step": timeouts.step}
    if progress is None:
        return timeouts.start
    # All else may take as long as a checkpoint; so may a rank that is done, while others still write.
    return max(usual.get(progress.phase, timeouts.checkpoint), progress.limit_seconds)


def overdue(running: Sequence[Rank], timeouts: Timeouts) -> list[Rank]:
    """The ranks that have been too long in one phase, or too long without a sign of life."""
    now = time.monotonic()
    silence = max(timeouts.step, SILENT_SECONDS)
    found = []
    for rank in running:
        progress = rank.progress()
        since = rank.started if progress is None else progress.since
        late = now - since > limit_seconds(progress, timeouts)
        silent = progress is not None and progress.phase != "start" and now - progress.beat > silence
        if late or silent:
            found.append(rank)
    return found


def silent_rank(running: Sequence[Rank]) -> Failure | None:
    """The rank that has been silent longest, where one has: it is stopped, and no other can go on."""
    now = time.monotonic()
    last = {rank.number: progress.beat for rank in running if (progress := rank.progress())}
    silent = [rank for rank in running if now - last.get(rank.number, now) > SILENT_SECONDS]
    if not silent:
        return None
    rank = min(silent, key=lambda one: last[one.number])
    silence = readable_duration(now - last[rank.number])
    reason = f"no sign of life for {silence}: stopped, or in a call that holds the interpreter"
    return _failure(rank, "silent", reason)


def waited_for(running: Sequence[Rank], gave_up: Sequence[FailureRecord], timeouts: Timeouts) -> Failure | None:
    """The one running rank for which the others wait, or waited until they ``gave_up``; None where none stands out."""
    now = time.monotonic()
    unheard = [rank for rank in running if rank.progress() is None]
    if unheard:
        seconds = now - unheard[0].started
        return _failure(unheard[0], "stuck", f"has not reported since it was started {readable_duration(seconds)} ago")
    rank = _not_in_a_collective(running, gave_up) or _behind(running, gave_up)
    progress = rank.progress() if rank else None
    if rank is None or progress is None:
        return None
    limit = limit_seconds(progress, timeouts)
    return _failure(
        rank,
        "stuck",
        f"no progress for {readable_duration(now - progress.since)} (limit {readable_duration(limit)}){_doing(rank)}",
    )


def nobody_moves(running: Sequence[Rank]) -> Failure:
    """Every rank is in the same place; what each was doing is in its file of stacks."""
    progress = running[0].progress()
    seconds = time.monotonic() - (progress.since if progress else running[0].started)
    silence, folder = readable_duration(seconds), running[0].folder
    reason = f"no rank made progress for {silence}{_doing(running[0])}; the stacks of all are in {folder}"
    return Failure(None, "stuck", reason, *running[0].where)


def _failure(rank: Rank, cause: Cause, reason: str) -> Failure:
    return Failure(rank.number, cause, reason, *rank.where, log_path(rank.folder, rank.number))


def _not_in_a_collective(running: Sequence[Rank], gave_up: Sequence[FailureRecord]) -> Rank | None:
    """The one rank that did something else when asked, while others were in a collective or gave one up."""
    frames = {rank.number: _innermost_frames(rank) for rank in running}
    inside = [rank for rank in running if any("torch/distributed/" in frame["file"] for frame in frames[rank.number])]
    outside = [rank for rank in running if rank not in inside and frames[rank.number]]
    return outside[0] if len(outside) == 1 and (inside or gave_up) else None


def _behind(running: Sequence[Rank], gave_up: Sequence[FailureRecord]) -> Rank | None:
    """The one rank that has come less far than all others."""
    far = [(one.step, PHASES.index(one.phase)) for rank in running if (one := rank.progress())]
    least = min(far, default=(0, 0))
    left = [(one.step, PHASES.index(one.phase)) for one in gave_up]
    return running[far.index(least)] if far.count(least) == 1 and max(far + left) > least else None


def _innermost_frames(rank: Rank) -> list[re.Match[str]]:
    """Where the rank's main thread was: the last thread of what faulthandler writes."""
    main = rank.stacks().strip().rpartition("\n\n")[2]
    return list(_FRAME.finditer(main))[:_INNERMOST]


def _doing(rank: Rank) -> str:
    frames = _innermost_frames(rank)
    return f", at {frames[0]['file']}:{frames[0]['line']} in {frames[0]['function']}" if frames else ""
