"""Connections whose other side does not answer: which hosts of a run cannot reach each other, as the kernel sees it."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.outcome import Failure
from shardwise.launch.ranks import Rank
from shardwise.spec.units import readable_duration

_REPEATED = 3  # times that a packet was sent again: for more than a second nothing came back
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class _Connection:
    here: str
    there: str
    repeated: int


def cut_off(running: Sequence[Rank]) -> Failure | None:
    """The two hosts between which nothing passes, where ranks wait for that; None where every host answers."""
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
    """The TCP connections of a process; none where the system does not tell."""
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
