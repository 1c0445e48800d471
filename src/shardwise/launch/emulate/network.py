"""Virtual nodes for the duration of a `with` statement, a pool of workers on them, and which nodes still answer."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import combinations
from multiprocessing.connection import wait
from typing import Any, Literal

from shardwise.launch.emulate import namespace, switch
from shardwise.launch.pool import Pool
from shardwise.layout.groups import local_rank, node_of
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError
from shardwise.spec.wiring import Wiring

Shaping = Literal["auto", "kernel", "switch"]
_ANSWER_SECONDS = 20.0


class Network:
    """Virtual nodes that reach each other; made by `emulated`."""

    def __init__(self, emulation: Emulation, holder: subprocess.Popen[bytes]) -> None:
        self.emulation = emulation
        self.switch_pid = holder.pid
        self._process = holder
        self._namespaces = [f"/proc/{holder.pid}/fd/{handle}" for handle in self._answer()["namespaces"]]

    def namespace(self, node: int) -> str:
        """A path to the node's namespace, for `namespace.enter` and `nsenter --net=`; valid while the network is up."""
        return self._namespaces[node]

    def environment_of_rank(self, rank: int) -> dict[str, str]:
        each = self.emulation.ranks_per_node
        return self.environment_on(node_of(rank, each), local_rank(rank, each), each)

    def environment_on(self, node: int, local: int, ranks_here: int) -> dict[str, str]:
        # Otherwise NCCL notices that all nodes are one machine, and bypasses the links between them.
        apart = {"NCCL_HOSTID": f"node-{node}", "NCCL_IB_DISABLE": "1"}
        interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), namespace.INTERFACE)
        return {**interfaces, **apart, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks_here)}

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """``command`` wrapped so that, started outside, it runs inside the node in the same process."""
        return [sys.executable, "-I", "-S", namespace.__file__, self.namespace(node), *command]

    def reshape(
        self,
        *,
        rate: float | None = None,
        delay: float | None = None,
        loss: float | None = None,
        pair: tuple[int, int] | None = None,
    ) -> None:
        """Changes bytes/s, one-way seconds or the share lost: of all links, or between one ``pair`` of nodes."""
        self._request({"reshape": {"rate": rate, "delay": delay, "loss": loss, "pair": pair}})

    def partition(self, node: int, other: int) -> None:
        self._request({"partition": (node, other)})

    def heal(self) -> None:
        self._request({"heal": True})

    def _request(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: `_answer` finds that
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._answer()

    def _answer(self) -> Any:
        """The next reply of the process that holds the nodes."""
        assert self._process.stdout is not None
        ready = wait([self._process.stdout], _ANSWER_SECONDS)  # type: ignore[list-item]
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError("the process that holds the emulated network has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise SpecError("emulate", answer["error"], answer["remedy"])
        return answer


@contextmanager
def emulated(emulation: Emulation, shaping: Shaping = "auto") -> Iterator[Network]:
    """A network of virtual nodes; it is removed afterwards, even if this process is killed.

    Links are shaped by the ``kernel``, or by our own ``switch``; ``auto`` uses the kernel if it can do everything.
    """
    require_emulation()
    holder = subprocess.Popen(
        [sys.executable, "-m", switch.__name__, str(emulation), shaping],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
    )  # fmt: skip
    with holder:
        try:
            yield Network(emulation, holder)
        finally:
            assert holder.stdin is not None
            holder.stdin.close()
            try:
                holder.wait(_ANSWER_SECONDS)
            except subprocess.TimeoutExpired:
                holder.kill()


@contextmanager
def wired(emulation: Emulation, wiring: Wiring | None) -> Iterator[Network]:
    """As `emulated`, with the links of a wiring: virtual node i stands for its i-th host."""
    links = {} if wiring is None else {
        pair: link for pair in combinations(range(emulation.nodes), 2) if (link := wiring.link(*pair))
    }  # fmt: skip
    with emulated(emulation, "switch" if links else "auto") as network:
        for pair, link in links.items():
            rate = min(emulation.rate, link.bandwidth * emulation.ranks_per_node)  # all ranks of a node at once
            network.reshape(rate=rate, delay=link.latency, pair=pair)
        yield network


def require_emulation() -> None:
    """Raises SpecError if this machine cannot create virtual nodes."""
    if not sys.platform.startswith("linux"):
        raise SpecError("emulate", f"needs Linux, this is {sys.platform}", "emulate in a virtual machine")
    if os.geteuid() != 0:
        raise SpecError("emulate", "needs root to create network namespaces", "run the command with sudo")
    if not os.access(switch.DEVICE, os.R_OK | os.W_OK):
        raise SpecError("emulate", f"there is no {switch.DEVICE}", "modprobe tun, or give the container that device")


def why_not() -> str | None:
    """Why this machine cannot create virtual nodes; None if it can."""
    try:
        with emulated(Emulation(nodes=2, ranks_per_node=1, rate=1e9)):
            return None
    except SpecError as error:
        return str(error)


class EmulatedPool(Pool):
    """`Pool` on an emulated cluster: rank r is on node r // ranks_per_node; ``network`` joins the nodes.

    Its links are those of a ``wiring``, as in `wired`.
    """

    def __init__(self, emulation: Emulation, preload: Sequence[str] = (), wiring: Wiring | None = None) -> None:
        super().__init__(preload)
        self._network = ExitStack()
        try:
            self.network = self._network.enter_context(wired(emulation, wiring))
        except BaseException:
            super().close()
            raise

    def run(self, function: Callable[..., Any], world: int, *arguments: Any, timeout_seconds: float = 300) -> list[Any]:
        ranks = self.network.emulation.world
        assert world <= ranks, f"{world} ranks on an emulated cluster of {ranks}"
        return super().run(function, world, *arguments, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        super().close()
        self._network.close()

    def initializer(self, rank: int) -> Callable[[], None]:
        node = node_of(rank, self.network.emulation.ranks_per_node)
        return partial(_enter_node, self.network.namespace(node), self.network.environment_of_rank(rank))


def _enter_node(path: str, environment: Mapping[str, str]) -> None:
    """Runs before gloo creates anything: threads and sockets stay in the namespace they were created in."""
    namespace.enter(path)
    os.environ.update(environment)


# -- which nodes reach each other: datagrams between all of them, of which a lost node answers none --


TRY_SECONDS = 1.0
_AGAIN_SECONDS = 0.1  # a datagram may be lost
_TOKEN_BYTES = 8


class Reach:
    """Finds out which nodes answer, through a socket on every node; `close` closes them."""

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
        """The largest set of nodes that all reach each other within ``seconds``."""
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
    """A large set of nodes of which no two are ``apart``: the largest of those built greedily from each node on."""
    best: tuple[int, ...] = ()
    for begin in range(nodes):
        together: list[int] = []
        for node in [*range(begin, nodes), *range(begin)]:
            if all((node, member) not in apart and (member, node) not in apart for member in together):
                together.append(node)
        if len(together) > len(best):
            best = tuple(sorted(together))
    return best
