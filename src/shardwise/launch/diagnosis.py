"""Who failed first, and why: inferred from the ranks' records, their exit statuses and their progress."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.outcome import MISTAKE, STOPPED_WITHOUT_CHECKPOINT, Cause, Failure
from shardwise.launch.ranks import RankProcess
from shardwise.spec.errors import shown
from shardwise.spec.run import Timeouts
from shardwise.spec.units import readable_duration
from shardwise.training.attempt import BEAT_SECONDS, PHASES, FailureRecord, Phase, RankProgress, log_path

SILENT_SECONDS = 4 * BEAT_SECONDS
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_INNERMOST = 8  # frames in which a call of torch.distributed means that the rank waits in it


def limit_seconds(progress: RankProgress | None, timeouts: Timeouts) -> float:
    """How long a rank may stay where it is."""
    usual: dict[Phase, float] = {"start": timeouts.start, "data": timeouts.step, "step": timeouts.step}
    if progress is None:
        return timeouts.start
    # All else may take as long as a checkpoint; so may a rank that is done, while others still write.
    return max(usual.get(progress.phase, timeouts.checkpoint), progress.limit_seconds)


def overdue(running: Sequence[RankProcess], timeouts: Timeouts) -> list[RankProcess]:
    """The ranks that have been too long in one phase, or too long without a heartbeat."""
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


def silent_rank(running: Sequence[RankProcess]) -> Failure | None:
    """The rank that has been silent longest, if any: it is stopped, and no other can make progress."""
    now = time.monotonic()
    last = {rank.number: progress.beat for rank in running if (progress := rank.progress())}
    silent = [rank for rank in running if now - last.get(rank.number, now) > SILENT_SECONDS]
    if not silent:
        return None
    rank = min(silent, key=lambda one: last[one.number])
    silence = readable_duration(now - last[rank.number])
    reason = f"no sign of life for {silence}: stopped, or in a call that holds the interpreter"
    return _failure(rank, "silent", reason)


def waited_for(running: Sequence[RankProcess], gave_up: Sequence[FailureRecord], timeouts: Timeouts) -> Failure | None:
    """The one running rank for which the others wait, or waited until they ``gave_up``; None if none stands out."""
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


def nobody_moves(running: Sequence[RankProcess]) -> Failure:
    """Every rank is in the same place; what each was doing is in its file of stacks."""
    progress = running[0].progress()
    seconds = time.monotonic() - (progress.since if progress else running[0].started)
    silence, folder = readable_duration(seconds), running[0].folder
    reason = f"no rank made progress for {silence}{_doing(running[0])}; the stacks of all are in {folder}"
    return Failure(None, "stuck", reason, *running[0].where)


def _failure(rank: RankProcess, cause: Cause, reason: str) -> Failure:
    return Failure(rank.number, cause, reason, *rank.where, log_path(rank.folder, rank.number))


def _not_in_a_collective(running: Sequence[RankProcess], gave_up: Sequence[FailureRecord]) -> RankProcess | None:
    """The one rank that was doing something else when asked, while others were in a collective or had given one up."""
    frames = {rank.number: _innermost_frames(rank) for rank in running}
    inside = [rank for rank in running if any("torch/distributed/" in frame["file"] for frame in frames[rank.number])]
    outside = [rank for rank in running if rank not in inside and frames[rank.number]]
    return outside[0] if len(outside) == 1 and (inside or gave_up) else None


def _behind(running: Sequence[RankProcess], gave_up: Sequence[FailureRecord]) -> RankProcess | None:
    """The one rank that is behind all others."""
    far = [(one.step, PHASES.index(one.phase)) for rank in running if (one := rank.progress())]
    least = min(far, default=(0, 0))
    left = [(one.step, PHASES.index(one.phase)) for one in gave_up]
    return running[far.index(least)] if far.count(least) == 1 and max(far + left) > least else None


def _innermost_frames(rank: RankProcess) -> list[re.Match[str]]:
    """Where the rank's main thread was: the last thread of what faulthandler writes."""
    main = rank.stacks().strip().rpartition("\n\n")[2]
    return list(_FRAME.finditer(main))[:_INNERMOST]


def _doing(rank: RankProcess) -> str:
    frames = _innermost_frames(rank)
    return f", at {frames[0]['file']}:{frames[0]['line']} in {frames[0]['function']}" if frames else ""


# -- desynchronised --------------------------------------------------------------------------------
#
# Mismatched collectives between ranks: what PyTorch's debug mode reports about them, in one line.


_MISMATCH = "mismatch between collectives"
# Each rank reports its own collective first, then that of another, by sequence numbers within their group.
_CALL = re.compile(
    r"is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<sequence>\d+))?.*?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=(?P<shape>\[[^\]]*\]))?(?:, TensorDtypes=(?P<dtype>\w+))?"
)


def different_collectives(records: Sequence[FailureRecord]) -> Failure | None:
    """Which ranks call what, if the ranks' records show a mismatch."""
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


# -- unanswered ------------------------------------------------------------------------------------
#
# Connections whose peer does not answer: which hosts of a run cannot reach each other, according to the kernel.


_REPEATED = 3  # retransmissions of a packet: for more than a second nothing came back
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class _Connection:
    here: str
    there: str
    repeated: int


def cut_off(running: Sequence[RankProcess]) -> Failure | None:
    """The two hosts that cannot reach each other, if ranks are waiting for that; None if every host answers."""
    found = {rank.number: list(_connections(rank.process.pid)) for rank in running}
    ranks_at: dict[str, set[int]] = {}
    for number, connections in found.items():
        for one in connections:
            ranks_at.setdefault(one.here, set()).add(number)
    silent = {
        tuple(sorted((one.here, one.there), key=socket.inet_aton))
        for connections in found.values()
        for one in connections
        if one.repeated >= _REPEATED
    }
    if not silent:
        return None
    progress = running[0].progress()
    seconds = time.monotonic() - (progress.since if progress else running[0].started)
    pairs = ", ".join(
        " and ".join(f"{host} ({_ranks(ranks_at.get(host, set()))})" for host in pair) for pair in sorted(silent)
    )
    return Failure(
        None,
        "stuck",
        f"no rank made progress for {readable_duration(seconds)}, no answer between {pairs}",
        *running[0].where,
    )


def _connections(process: int) -> Iterator[_Connection]:
    """The TCP connections of a process; none if the system does not expose them."""
    folder = Path(f"/proc/{process}")
    with contextlib.suppress(OSError):
        own = set()
        for entry in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                match = _SOCKET.fullmatch(str(entry.readlink()))
                if match:
                    own.add(match[1])
        for line in (folder / "net" / "tcp").read_text(encoding="ascii").splitlines()[1:]:
            _, here, there, _, _, _, repeated, _, _, inode, *_ = line.split()
            if inode in own:
                yield _Connection(_host(here), _host(there), int(repeated, 16))


def _host(text: str) -> str:
    """ "0100007F:1F90" as "127.0.0.1"."""
    return socket.inet_ntoa(bytes.fromhex(text.partition(":")[0])[::-1])


def _ranks(numbers: set[int]) -> str:
    if not numbers:
        return "no rank"
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


# -- diagnosis -------------------------------------------------------------------------------------
#
# Who failed first, and why: told from what the ranks wrote, how they ended and how far they are.
#
# One rank's end makes others fail within milliseconds, with messages about connections. These are victims: they are
# named only where nothing else is found. A rank that does not move makes all others wait in their next collective,
# and give up at last; it is told from them by its silence, by what it was doing when all were asked, or by being
# behind. Where hosts do not answer each other no rank is to blame.


# What gloo, NCCL and their stores report when another process does not answer, or is gone.
_GAVE_UP = re.compile(r"timed? ?out|failed to pass monitoredBarrier", re.IGNORECASE)
_OTHER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|closed by peer|by remote peer|pair closure"
    r"|remote process exited|ncclRemoteError|communicator was aborted|failed to (recv|send)|connectFullMesh"
    r"|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
_RAISED_BY_TORCH = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_CANNOT_IMPORT = ("ImportError", "ModuleNotFoundError")  # a restart would fail the same way
_NATIVE_WORDS = re.compile(r"what\(\):\s*(?P<words>.+)")
_MOST_WORDS = 300


@dataclass(frozen=True)
class Diagnosis:
    failure: Failure
    certain: bool  # a cause was found, not only victims


def diagnose(ranks: Sequence[RankProcess], timeouts: Timeouts) -> Diagnosis | None:
    """The first failure; None if no rank has failed and none is overdue."""
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


def _when(rank: RankProcess, record: FailureRecord | None) -> float:
    """When it failed. A killed rank leaves no record and is only noticed later than the ranks it brought down."""
    if record is not None:
        return record.at
    assert rank.ended is not None
    return 0.0 if rank.status is not None and rank.status < 0 else rank.ended


def _is_victim(rank: RankProcess, record: FailureRecord | None) -> bool:
    if record is not None:
        return record.kind in _RAISED_BY_TORCH and _is_others_fault(record.message)
    # An exception in a thread of gloo or NCCL ends in an abort; its text is in the log only.
    return rank.status == -signal.SIGABRT and _is_others_fault(rank.last_words())


def _is_others_fault(words: str) -> bool:
    return bool(_GAVE_UP.search(words) or _OTHER_IS_GONE.search(words))


def _own_failure(rank: RankProcess, records: dict[int, FailureRecord]) -> Failure:
    """What happened to one failed rank: its own record, else its exit status."""
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
