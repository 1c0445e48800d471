"""Which rank failed first, and why: inferred from the ranks' records, their exit statuses and their progress.

When one rank ends, the others fail within milliseconds with messages about connections. These are victims, and are
named only if no cause is found. A stuck rank leaves all others waiting in their next collective until they give up; it
is recognised by missing heartbeats, by a stack outside any collective while the others are in one, or by being a step
or phase behind. If hosts cannot reach each other, no rank is to blame.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.launch.outcome import MISTAKE, STOPPED_WITHOUT_CHECKPOINT, Cause, Failure
from shardwise.launch.ranks import RankProcess
from shardwise.run.attempt import BEAT_SECONDS, PHASES, FailureRecord, Phase, RankProgress, rank_file, read_failure
from shardwise.run.records import names, out_of_step, read_flight
from shardwise.spec.errors import shown
from shardwise.spec.run import Timeouts
from shardwise.spec.units import readable_duration

SILENT_SECONDS = 4 * BEAT_SECONDS
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_INNERMOST = 8  # frames: a call of torch.distributed among them means that the rank waits in a collective
_MISMATCH = "mismatch between collectives"  # PyTorch's debug mode
# Each rank reports its own collective first, then that of another, by sequence numbers within their group.
_CALL = re.compile(
    r"is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<sequence>\d+))?.*?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=(?P<shape>\[[^\]]*\]))?(?:, TensorDtypes=(?P<dtype>\w+))?"
)
_RETRANSMISSIONS = 3  # of one packet: no answer for more than a second
_SOCKET = re.compile(r"socket:\[(\d+)\]")
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
_NATIVE_MESSAGE = re.compile(r"what\(\):\s*(?P<text>.+)")
_MOST_CHARACTERS = 300


def diagnose(ranks: Sequence[RankProcess], timeouts: Timeouts) -> tuple[Failure, bool] | None:
    """The first failure, and whether it is a cause rather than only a victim; None if no rank failed or is overdue."""
    records = {rank.number: record for rank in ranks if (record := read_failure(rank.folder, rank.number))}
    running = [rank for rank in ranks if rank.ended is None and rank.number not in records]
    failed = [rank for rank in ranks if rank.number in records or (rank.ended is not None and rank.status != 0)]
    first = sorted(failed, key=lambda rank: _when(rank, records.get(rank.number)))
    causes = [rank for rank in first if not _is_victim(rank, records.get(rank.number))]
    if causes:
        return _different_collectives(list(records.values())) or _own_failure(causes[0], records), True
    gave_up = [record for record in records.values() if _GAVE_UP.search(record.message)]
    late = bool(overdue(running, timeouts))
    if not first and not late:
        return None
    stuck = _silent_rank(running)
    if stuck is None and (gave_up or late):
        stuck = _unreachable_hosts(running) or _blocking_rank(running, gave_up, timeouts)
    if stuck is not None:
        return stuck, True
    if first:
        return _own_failure(first[0], records), False
    detail = f"{_stack_top(running[0])}; the stacks of all are in {running[0].folder}"
    return _no_progress(running, detail), False


def with_collectives(failure: Failure, ranks: Sequence[RankProcess]) -> Failure:
    """Adds what the flight records say: which rank was missing from a collective, or was in a different one."""
    if failure.mistake or failure.cause in ("killed", "exited"):
        return failure
    records = {rank.number: record for rank in ranks if (record := read_flight(rank.folder, rank.number)) is not None}
    finding = out_of_step(records)
    if finding is None:
        return failure
    who = finding.ranks[0] if failure.rank is None and len(finding.ranks) == 1 else failure.rank
    return replace(failure, rank=who, reason=f"{failure.reason}; {finding.text}")


def overdue(running: Sequence[RankProcess], timeouts: Timeouts) -> list[RankProcess]:
    """The ranks that have been too long in one phase, or too long without a heartbeat."""
    now = time.monotonic()
    silence = max(timeouts.step, SILENT_SECONDS)
    overdue_ranks = []
    for rank in running:
        progress = rank.progress()
        late = now - rank.since > _limit_seconds(progress, timeouts)
        silent = progress is not None and progress.phase != "start" and now - progress.beat > silence
        if late or silent:
            overdue_ranks.append(rank)
    return overdue_ranks


def _limit_seconds(progress: RankProgress | None, timeouts: Timeouts) -> float:
    usual: dict[Phase, float] = {"start": timeouts.start, "data": timeouts.step, "step": timeouts.step}
    if progress is None:
        return timeouts.start
    # Every other phase may take as long as a checkpoint: even a rank that is done waits while others still write.
    return max(usual.get(progress.phase, timeouts.checkpoint), progress.limit_seconds)


# -- ranks that make no progress -------------------------------------------------------------------


def _silent_rank(running: Sequence[RankProcess]) -> Failure | None:
    """The rank without a heartbeat for longest, if any: its process is stopped, which blocks all others."""
    now = time.monotonic()
    last = {rank.number: progress.beat for rank in running if (progress := rank.progress())}
    silent = [rank for rank in running if now - last.get(rank.number, now) > SILENT_SECONDS]
    if not silent:
        return None
    rank = min(silent, key=lambda rank: last[rank.number])
    silence = readable_duration(now - last[rank.number])
    return _failure(rank, "silent", f"no sign of life for {silence}: stopped, or in a call that holds the interpreter")


def _blocking_rank(
    running: Sequence[RankProcess], gave_up: Sequence[FailureRecord], timeouts: Timeouts
) -> Failure | None:
    """The one running rank that the others wait for (or did, until they ``gave_up``); None if no rank stands out."""
    now = time.monotonic()
    for rank in running:
        if rank.progress() is None:
            since = readable_duration(now - rank.started)
            return _failure(rank, "stuck", f"has not reported since it was started {since} ago")
    stuck = _not_in_a_collective(running, gave_up) or _behind(running, gave_up)
    if stuck is None:
        return None
    limit = readable_duration(_limit_seconds(stuck.progress(), timeouts))
    seconds = readable_duration(now - stuck.since)
    return _failure(stuck, "stuck", f"no progress for {seconds} (limit {limit}){_stack_top(stuck)}")


def _not_in_a_collective(running: Sequence[RankProcess], gave_up: Sequence[FailureRecord]) -> RankProcess | None:
    """The one rank outside any collective while others were in one, or had given one up."""
    frames = {rank.number: _innermost_frames(rank) for rank in running}
    inside = [rank for rank in running if any("torch/distributed/" in frame["file"] for frame in frames[rank.number])]
    outside = [rank for rank in running if rank not in inside and frames[rank.number]]
    return outside[0] if len(outside) == 1 and (inside or gave_up) else None


def _behind(running: Sequence[RankProcess], gave_up: Sequence[FailureRecord]) -> RankProcess | None:
    """The one rank that is behind all others."""
    far = [(progress.step, PHASES.index(progress.phase)) for rank in running if (progress := rank.progress())]
    least = min(far, default=(0, 0))
    left = [(record.step, PHASES.index(record.phase)) for record in gave_up]
    return running[far.index(least)] if far.count(least) == 1 and max(far + left) > least else None


def _innermost_frames(rank: RankProcess) -> list[re.Match[str]]:
    """The innermost frames of the rank's main thread, which faulthandler writes last."""
    main = rank.stacks().strip().rpartition("\n\n")[2]
    return list(_FRAME.finditer(main))[:_INNERMOST]


def _stack_top(rank: RankProcess) -> str:
    frames = _innermost_frames(rank)
    return f", at {frames[0]['file']}:{frames[0]['line']} in {frames[0]['function']}" if frames else ""


def _unreachable_hosts(running: Sequence[RankProcess]) -> Failure | None:
    """Names the pairs of hosts that do not answer each other's TCP packets; None if every host answers."""
    ranks_at: dict[str, set[int]] = {}
    silent = set()
    for rank in running:
        for here, there, retransmissions in _connections(rank.process.pid):
            ranks_at.setdefault(here, set()).add(rank.number)
            if retransmissions >= _RETRANSMISSIONS:
                silent.add(tuple(sorted((here, there), key=socket.inet_aton)))
    if not silent:
        return None
    pairs = ", ".join(
        " and ".join(f"{host} ({names(ranks_at[host]) if host in ranks_at else 'no rank'})" for host in pair)
        for pair in sorted(silent)
    )
    return _no_progress(running, f", no answer between {pairs}")


def _connections(process: int) -> Iterator[tuple[str, str, int]]:
    """The TCP connections of a process as (own host, other host, retransmissions); none if /proc does not show them."""
    folder = Path(f"/proc/{process}")
    with contextlib.suppress(OSError):
        own = set()
        for entry in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                if match := _SOCKET.fullmatch(str(entry.readlink())):
                    own.add(match[1])
        for line in (folder / "net" / "tcp").read_text(encoding="ascii").splitlines()[1:]:
            _, here, there, _, _, _, retransmissions, _, _, inode, *_ = line.split()
            if inode in own:
                yield _host(here), _host(there), int(retransmissions, 16)


def _host(text: str) -> str:
    """ "0100007F:1F90" as "127.0.0.1"."""
    return socket.inet_ntoa(bytes.fromhex(text.partition(":")[0])[::-1])


def _no_progress(running: Sequence[RankProcess], detail: str) -> Failure:
    seconds = readable_duration(time.monotonic() - running[0].since)
    return Failure(None, "stuck", f"no rank made progress for {seconds}{detail}", *running[0].where)


# -- ranks that failed -----------------------------------------------------------------------------


def _different_collectives(records: Sequence[FailureRecord]) -> Failure | None:
    """The failure that says which rank calls which collective, if the records show a mismatch."""
    ours = [record for record in records if _MISMATCH in record.message]
    callers: dict[str, set[int]] = {}
    for record in ours:
        for match, rank in zip(_CALL.finditer(record.message), ({record.rank}, set())):
            callers.setdefault(_call(match), set()).update(rank)
    if not callers:
        return None
    who = sorted((sorted(ranks), call) for call, ranks in callers.items())
    odd = [ranks[0] for ranks, _ in who if len(ranks) == 1]
    text = ", ".join(f"{_calling(ranks)} {call}" for ranks, call in who)
    number = next((f" (number {match[1]})" for match in _CALL.finditer(ours[0].message) if match[1]), "")
    only = odd[0] if len(odd) == 1 and len(who) > 1 and len(ours) > 2 else None
    return Failure(only, "raised", f"different collectives{number}: {text}", ours[0].phase, ours[0].step)


def _call(match: re.Match[str]) -> str:
    tensor = " ".join(part for part in (match["dtype"], match["shape"]) if part)
    return match["operation"].lower() + (f" of {tensor}" if tensor else "")


def _calling(ranks: Sequence[int]) -> str:
    return f"{names(ranks)} call{'s' * (len(ranks) == 1)}" if ranks else "another rank of the group calls"


def _when(rank: RankProcess, record: FailureRecord | None) -> float:
    """When it failed. A killed rank counts as first: it leaves no record, and is noticed only after its victims."""
    if record is not None:
        return record.at
    assert rank.ended is not None
    return 0.0 if rank.status is not None and rank.status < 0 else rank.ended


def _is_victim(rank: RankProcess, record: FailureRecord | None) -> bool:
    if record is not None:
        return record.kind in _RAISED_BY_TORCH and _blames_another(record.message)
    # An exception in a thread of gloo or NCCL ends in an abort; its text is in the log only.
    return rank.status == -signal.SIGABRT and _blames_another(rank.log_tail())


def _blames_another(text: str) -> bool:
    return bool(_GAVE_UP.search(text) or _OTHER_IS_GONE.search(text))


def _own_failure(rank: RankProcess, records: dict[int, FailureRecord]) -> Failure:
    """What happened to one failed rank: its own record, else its exit status."""
    record = records.get(rank.number)
    if record is not None:
        mistake = record.mistake or record.kind in _CANNOT_IMPORT
        log = rank_file(rank.folder, rank.number, "log")
        return Failure(rank.number, "raised", _message(record), record.phase, record.step, log, mistake)
    assert rank.status is not None
    text = rank.log_tail()
    if rank.status < 0:
        native = _NATIVE_MESSAGE.search(text)
        detail = f": {shown(native['text'], _MOST_CHARACTERS)}" if native else ""
        return _failure(rank, "killed", f"killed by {_signal_name(-rank.status)}{detail}")
    last_line = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
    if rank.status == MISTAKE or last_line.startswith(tuple(f"{kind}: " for kind in _CANNOT_IMPORT)):
        return _failure(rank, "exited", last_line[:_MOST_CHARACTERS], mistake=True)
    if rank.status == STOPPED_WITHOUT_CHECKPOINT:
        return _failure(rank, "exited", "stopped without a checkpoint in time")
    return _failure(rank, "exited", f"exit status {rank.status}: {shown(last_line, _MOST_CHARACTERS)}")


def _failure(rank: RankProcess, cause: Cause, reason: str, *, mistake: bool = False) -> Failure:
    return Failure(rank.number, cause, reason, *rank.where, rank_file(rank.folder, rank.number, "log"), mistake)


def _message(record: FailureRecord) -> str:
    if record.mistake:
        return record.message
    message = " ".join(record.message.split())
    return f"{record.kind}: {message[:_MOST_CHARACTERS]}" if message else record.kind


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
