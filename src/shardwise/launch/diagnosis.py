"""Who failed first, and why: told from what the ranks wrote, how they ended and how far they are.

One rank's end makes others fail within milliseconds, with messages about connections. These are victims: they are
named only where nothing else is found. A rank that does not move makes all others wait in their next collective; it is
told from them by its silence, by being behind, or by what it was doing when all were asked.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.launch.desynchronised import explain_mismatch
from shardwise.launch.outcome import MISTAKE, STOPPED_WITHOUT_CHECKPOINT, Cause, Failure
from shardwise.launch.ranks import Rank
from shardwise.spec.errors import shown
from shardwise.spec.timeouts import Timeouts
from shardwise.train.records import BEAT_SECONDS, PHASES, FailureRecord, Phase, Progress, log_path

SILENT_SECONDS = 4 * BEAT_SECONDS
# What gloo, NCCL and their stores say when another process is gone or does not answer.
_OTHERS_FAULT = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|closed by peer|by remote peer|pair closure"
    r"|timed? ?out|remote process exited|ncclRemoteError|communicator was aborted|failed to (recv|send)"
    r"|connectFullMesh|recvValue failed|sendBytes failed|waitWork.*error",
    re.IGNORECASE,
)
_RAISED_BY_TORCH = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_COLLECTIVE = re.compile(r"torch/distributed/")
_INNERMOST = 8  # frames in which a call of torch.distributed means that the rank waits in it


@dataclass(frozen=True)
class Diagnosis:
    failure: Failure
    certain: bool  # a cause was found, not only victims


def limit_seconds(progress: Progress | None, timeouts: Timeouts) -> float:
    """How long a rank may stay where it is."""
    usual: dict[Phase, float] = {
        "start": timeouts.start,
        "data": timeouts.step,
        "step": timeouts.step,
        "evaluation": timeouts.checkpoint,
        "checkpoint": timeouts.checkpoint,
    }
    if progress is None:
        return timeouts.start
    # Done is no end yet: others may still write. A failed one is dealt with by its record.
    return max(usual.get(progress.phase, timeouts.checkpoint), progress.limit_seconds)


def overdue(running: Sequence[Rank], timeouts: Timeouts) -> list[Rank]:
    """The ranks that have been too long in one phase, or too long without a sign of life."""
    now = time.monotonic()
    found = []
    for rank in running:
        progress = rank.progress()
        since = rank.started if progress is None else progress.since
        late = now - since > limit_seconds(progress, timeouts)
        silent = progress is not None and progress.phase != "start" and now - progress.beat > timeouts.step
        if late or silent:
            found.append(rank)
    return found


def diagnose(ranks: Sequence[Rank], timeouts: Timeouts) -> Diagnosis:
    """The first failure among ranks of which at least one has failed or is overdue."""
    records = {rank.number: record for rank in ranks if (record := rank.failure())}
    causes: list[tuple[float, int, Rank]] = []
    victims: list[tuple[float, int, Rank]] = []
    for rank in ranks:
        record = records.get(rank.number)
        if record is None and (rank.ended is None or rank.status == 0):
            continue
        (victims if _is_victim(rank, record) else causes).append((_when(rank, record), rank.number, rank))
    if causes:
        _, number, rank = min(causes)
        return Diagnosis(_own_failure(rank, records.get(number)), certain=True)
    stalled = _stalled([rank for rank in ranks if rank.ended is None and rank.number not in records], timeouts)
    if stalled is not None:
        return Diagnosis(stalled, certain=True)
    if victims:
        _, number, rank = min(victims)
        return Diagnosis(_own_failure(rank, records.get(number)), certain=False)
    return Diagnosis(_nobody_moves(ranks), certain=True)


def _when(rank: Rank, record: FailureRecord | None) -> float:
    """When it failed. One that was killed could not say so and is only seen later than those it brought down."""
    if record is not None:
        return record.at
    assert rank.ended is not None
    return 0.0 if rank.status is not None and rank.status < 0 else rank.ended


def _is_victim(rank: Rank, record: FailureRecord | None) -> bool:
    if record is not None:
        return record.kind in _RAISED_BY_TORCH and bool(_OTHERS_FAULT.search(record.message))
    # An exception in a thread of gloo or NCCL ends in an abort; its text is in the log only.
    return rank.status == -signal.SIGABRT and bool(_OTHERS_FAULT.search(rank.last_words()))


def _own_failure(rank: Rank, record: FailureRecord | None) -> Failure:
    log = log_path(rank.folder, rank.number)
    if record is not None:
        reason = explain_mismatch(record.message) or _told(record)
        return Failure(rank.number, "raised", reason, record.phase, record.step, log, record.mistake)
    assert rank.status is not None
    progress = rank.progress()
    phase, step = (progress.phase, progress.step) if progress else (None, None)
    if rank.status < 0:
        return Failure(rank.number, "killed", f"killed by {_signal_name(-rank.status)}", phase, step, log)
    last_line = next((line for line in reversed(rank.last_words().splitlines()) if line.strip()), "it printed nothing")
    if rank.status == MISTAKE:
        return Failure(rank.number, "exited", last_line, phase, step, log, mistake=True)
    if rank.status == STOPPED_WITHOUT_CHECKPOINT:
        return Failure(rank.number, "exited", "stopped without a checkpoint in time", phase, step, log)
    return Failure(rank.number, "exited", f"exit status {rank.status}: {shown(last_line, 200)}", phase, step, log)


def _told(record: FailureRecord) -> str:
    if record.mistake:
        return record.message
    message = " ".join(record.message.split())
    return f"{record.kind}: {message[:300]}" if message else record.kind


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stalled(ranks: Sequence[Rank], timeouts: Timeouts) -> Failure | None:
    """The rank for which the others wait, where one stands out."""
    now = time.monotonic()
    known = {rank.number: progress for rank in ranks if (progress := rank.progress())}
    unheard = [rank for rank in ranks if rank.number not in known and now - rank.started > timeouts.start]
    if unheard:
        return _still(
            unheard[0], None, "stuck", f"has not reported since it was started {now - unheard[0].started:.1f} s ago"
        )
    silent = [rank for rank in ranks if rank.number in known and now - known[rank.number].beat > SILENT_SECONDS]
    if silent:
        rank = min(silent, key=lambda one: known[one.number].beat)
        seconds = now - known[rank.number].beat
        reason = f"no sign of life for {seconds:.1f} s: stopped, or in a call that holds the interpreter"
        return _still(rank, known[rank.number], "silent", reason)
    late = [rank for rank in overdue(ranks, timeouts) if rank.number in known]
    if not late:
        return None
    behind = _behind(late, known) or _not_waiting(late)
    if behind is None:
        return None
    progress = known[behind.number]
    reason = f"no progress for {now - progress.since:.1f} s (limit {limit_seconds(progress, timeouts):g} s)"
    return _still(behind, progress, "stuck", f"{reason}{_doing(behind)}")


def _still(rank: Rank, progress: Progress | None, cause: Cause, reason: str) -> Failure:
    phase, step = (progress.phase, progress.step) if progress else (None, None)
    return Failure(rank.number, cause, reason, phase, step, log_path(rank.folder, rank.number))


def _behind(late: Sequence[Rank], known: dict[int, Progress]) -> Rank | None:
    """The one rank that has come less far than some other."""
    far = {rank.number: (known[rank.number].step, PHASES.index(known[rank.number].phase)) for rank in late}
    least = min(far.values())
    last = [rank for rank in late if far[rank.number] == least]
    return last[0] if len(last) == 1 and any(one > least for one in [*far.values()]) else None


def _not_waiting(late: Sequence[Rank]) -> Rank | None:
    """The one rank that was in no collective while others were."""
    stacks = {rank.number: _innermost_frames(rank) for rank in late}
    waiting = [rank for rank in late if any(_COLLECTIVE.search(frame["file"]) for frame in stacks[rank.number])]
    others = [rank for rank in late if rank not in waiting and stacks[rank.number]]
    return others[0] if waiting and len(others) == 1 else None


def _innermost_frames(rank: Rank) -> list[re.Match[str]]:
    """Where the rank's main thread was: the last thread of a dump by faulthandler."""
    main = rank.stacks().strip().rpartition("\n\n")[2]
    return list(_LINE.finditer(main))[:_INNERMOST]


def _doing(rank: Rank) -> str:
    frames = _innermost_frames(rank)
    return f", at {frames[0]['file']}:{frames[0]['line']} in {frames[0]['function']}" if frames else ""


def _nobody_moves(ranks: Sequence[Rank]) -> Failure:
    """Every rank is in the same place; what each was doing is in its file of stacks."""
    rank = next(rank for rank in ranks if rank.ended is None)
    progress = rank.progress()
    assert progress is not None
    reason = f"none moved for {time.monotonic() - progress.since:.1f} s{_doing(rank)}; see the stacks in {rank.folder}"
    return Failure(None, "stuck", reason, progress.phase, progress.step)
