"""Which virtual nodes reach each other, tried with datagrams between all of them: a lost one answers nobody."""

from __future__ import annotations

import secrets
import select
import socket
import time
from contextlib import suppress

from shardwise.launch.emulate import namespace
from shardwise.launch.emulate.network import Network

TRY_SECONDS = 1.0
_AGAIN_SECONDS = 0.1  # a datagram may be lost
_TOKEN_BYTES = 8


class Reach:
    """A socket on every node of a network, until `close`."""

    def __init__(self, network: Network) -> None:
        self._sockets: list[socket.socket] = []
        with namespace.returning():
            for node in range(network.emulation.nodes):
                namespace.enter(network.namespace(node))
                own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # stays on the node it was made on
                own.bind((namespace.address(node), 0))
                own.setblocking(False)
                self._sockets.append(own)

    def nodes(self, seconds: float = TRY_SECONDS) -> tuple[int, ...]:
        """The most nodes that all reach each other within so many seconds."""
        token, deadline = secrets.token_bytes(_TOKEN_BYTES), time.monotonic() + seconds
        count = len(self._sockets)
        missing = {(sender, other) for sender in range(count) for other in range(count) if sender != other}
        while missing and time.monotonic() < deadline:
            for sender, other in missing:
                with suppress(OSError):  # no way there: as if it were lost
                    there = self._sockets[other].getsockname()
                    self._sockets[sender].sendto(token + bytes([sender]), there)
            until = min(deadline, time.monotonic() + _AGAIN_SECONDS)
            while missing and (left := until - time.monotonic()) > 0:
                missing -= self._received(token, left)
        return most_together(count, missing)

    def _received(self, token: bytes, seconds: float) -> set[tuple[int, int]]:
        arrived = set()
        for ready in select.select(self._sockets, [], [], seconds)[0]:
            with suppress(OSError):
                content = ready.recv(64)
                if content[:_TOKEN_BYTES] == token:
                    arrived.add((content[_TOKEN_BYTES], self._sockets.index(ready)))
        return arrived

    def close(self) -> None:
        for own in self._sockets:
            own.close()


def most_together(nodes: int, apart: set[tuple[int, int]]) -> tuple[int, ...]:
    """A large set of nodes of which no two are ``apart``, the first of equals: from each node on, whoever fits."""
    best: tuple[int, ...] = ()
    for begin in range(nodes):
        together: list[int] = []
        for node in [*range(begin, nodes), *range(begin)]:
            if all((node, member) not in apart and (member, node) not in apart for member in together):
                together.append(node)
        if len(together) > len(best):
            best = tuple(sorted(together))
    return best
