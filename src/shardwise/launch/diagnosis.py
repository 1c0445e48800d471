"""Who failed first, and why: told from what the ranks wrote, how they ended and how far they are.

One rank's end makes others fail within milliseconds, with messages about connections. These are victims: they are
named only where nothing else is found. A rank that does not move makes all others wait in their next collective, and
give up at last; it is told from them by its silence, by what it was doing when all were asked, or by being behind.
Where hosts do not answer each other no rank is to blame.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.launch.desynchronised import different_collectives
from shardwise.launch.outcome import MISTAKE, STOPPED_WITHOUT_CHECKPOINT, Failure
from shardwise.launch.ranks import Rank
from shardwise.launch.stalled import nobody_moves, overdue, silent_rank, waited_for
from shardwise.launch.unanswered import cut_off
from shardwise.spec.errors import shown
from shardwise.spec.timeouts import Timeouts
from shardwise.train.records import FailureRecord, log_path

# What gloo, NCCL and their stores say when another process does not answer, or is gone.
_GAVE_UP = re.compile(r"timed? ?out|failed to pass monitoredBarrier", re.IGNORECASE)
_OTHER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|closed by peer|by remote peer|pair closure"
    r"|remote process exited|ncclRemoteError|communicator was aborted|failed to (recv|send)|connectFullMesh"
    r"|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
_RAISED_BY_TORCH = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_CANNOT_IMPORT = ("ImportError", "ModuleNotFoundError")  # no other try would end better
_NATIVE_WORDS = re.compile(r"what\(\):\s*(?P<words>.+)")
_MOST_WORDS = 300


@dataclass(frozen=True)
class Diagnosis:
    failure: Failure
    certain: bool  # a cause was found, not only victims


def diagnose(ranks: Sequence[Rank], timeouts: Timeouts) -> Diagnosis | None:
    """The first failure; None where no rank has failed and none is overdue."""
    records = {rank.number: record for rank in ranks if (record := rank.failure())}
    running = [rank for rank in ranks if rank.ended is None and rank.number not in records]
    failed = [rank for rank in ranks if rank.number in records or (rank.ended is not None and rank.status != 0)]
    first = sorted(failed, key=lambda rank: _when(rank, records.get(rank.number)))
    causes = [rank for rank in first if not _is_victim(rank, records.get(rank.number))]
    gave_up = [record for record in records.values() if _GAVE_UP.search(record.message)]
    if causes:
        found = different_collectives(list(records.values())) or _own_failure(causes[0], records)
        return Diagnosis(found, certain=True)
    late = bool(overdue(running, timeouts))
    if not first and not late:
        return None
    still = silent_rank(running)
    if still is None and (gave_up or late):
        still = cut_off(running) or waited_for(running, gave_up, timeouts)
    if still is not None:
        return Diagnosis(still, certain=True)
    return Diagnosis(_own_failure(first[0], records) if first else nobody_moves(running), certain=False)


def _when(rank: Rank, record: FailureRecord | None) -> float:
    """When it failed. One that was killed could not say so and is only seen later than those it brought down."""
    if record is not None:
        return record.at
    assert rank.ended is not None
    return 0.0 if rank.status is not None and rank.status < 0 else rank.ended


def _is_victim(rank: Rank, record: FailureRecord | None) -> bool:
    if record is not None:
        return record.kind in _RAISED_BY_TORCH and _is_others_fault(record.message)
    # An exception in a thread of gloo or NCCL ends in an abort; its text is in the log only.
    return rank.status == -signal.SIGABRT and _is_others_fault(rank.last_words())


def _is_others_fault(words: str) -> bool:
    return bool(_GAVE_UP.search(words) or _OTHER_IS_GONE.search(words))


def _own_failure(rank: Rank, records: dict[int, FailureRecord]) -> Failure:
    """What happened to one rank that has failed: in its own words, else by how it ended."""
    record, log = records.get(rank.number), log_path(rank.folder, rank.number)
    if record is not None:
        mistake = record.mistake or record.kind in _CANNOT_IMPORT
        return Failure(rank.number, "raised", _told(record), record.phase, record.step, log, mistake)
    assert rank.status is not None
    words, where = rank.last_words(), (*rank.where, log)
    if rank.status < 0:
        native = _NATIVE_WORDS.search(words)
        said = f": {shown(native['words'], _MOST_WORDS)}" if native else ""
        return Failure(rank.number, "killed", f"killed by {_signal_name(-rank.status)}{said}", *where)
    last_line = next((line for line in reversed(words.splitlines()) if line.strip()), "it printed nothing")
    if rank.status == MISTAKE or last_line.startswith(tuple(f"{kind}: " for kind in _CANNOT_IMPORT)):
        return Failure(rank.number, "exited", last_line[:_MOST_WORDS], *where, mistake=True)
    if rank.status == STOPPED_WITHOUT_CHECKPOINT:
        return Failure(rank.number, "exited", "stopped without a checkpoint in time", *where)
    return Failure(rank.number, "exited", f"exit status {rank.status}: {shown(last_line, _MOST_WORDS)}", *where)


def _told(record: FailureRecord) -> str:
    if record.mistake:
        return record.message
    message = " ".join(record.message.split())
    return f"{record.kind}: {message[:_MOST_WORDS]}" if message else record.kind


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
