"""The server of /metrics under connections that are slow, endless, many, or meant for another host."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from launch.observe.exposition import parse
from launch.running import wait_until
from shardwise.launch.observe.prometheus import MetricsServer
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.errors import SpecError
from shardwise.spec.run import Logging
from training.faults import small_job

SLOW = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsServer]:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    named = {"logging": {"metrics_hosts": ["Metrics.Lab.example", "10.0.0.7"]}}
    folder.job.write_text(small_job("none", run=named).to_yaml())
    with MetricsServer(0, "port") as server, server.serving(folder):
        yield server


@pytest.fixture(scope="module")
def port(server: MetricsServer) -> int:
    return int(server.server_address[1])


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def answer(one: socket.socket) -> str:
    """All that is sent until the connection ends."""
    pieces = []
    while piece := one.recv(2**16):
        pieces.append(piece)
    return b"".join(pieces).decode()


def asked(port: int, *headers: str, path: str = "/metrics") -> str:
    with connected(port) as one:
        one.sendall("\r\n".join([f"GET {path} HTTP/1.1", *headers, "", ""]).encode())
        return answer(one)


def scraped(port: int) -> None:
    head, _, body = asked(port, f"Host: 127.0.0.1:{port}").partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200 "), head
    assert parse(body)["shardwise_run_info"].samples


def is_cut(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(2**16) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def drip(all_of_them: list[socket.socket], ended: threading.Event) -> None:
    """A byte of a request to each, again and again: no connection is ever silent for long."""
    while not ended.wait(0.1):
        for one in all_of_them:
            try:
                one.send(b"G")
            except OSError:  # it was cut
                continue


def test_slow_connections_hold_few_threads_and_no_scrape(
    server: MetricsServer, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "most_seconds", 2.0)
    before, ended = threading.active_count(), threading.Event()
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(port)) for _ in range(SLOW)]
        dripping = threading.Thread(target=drip, args=(slow, ended))
        dripping.start()
        stack.callback(dripping.join)
        stack.callback(ended.set)
        scraped(port)  # while they are there
        assert threading.active_count() - before < SLOW / 4
        wait_until(lambda: all(map(is_cut, slow)), seconds=60)  # each of them, though it is never silent
        scraped(port)
    wait_until(lambda: threading.active_count() <= before, seconds=60)


@pytest.mark.parametrize(
    "begins", [b"GET /", b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"GET / HTTP/1.1\r\n"]
)
def test_a_request_without_end_is_cut(port: int, begins: bytes) -> None:
    more = b"a" * 2**16 if begins[-1:] != b"\n" else b"a: b\r\n" * 2**12
    with connected(port) as one, pytest.raises(ConnectionError):
        one.sendall(begins)
        for _ in range(1000):
            one.sendall(more)
    scraped(port)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, ["Host: 127.0.0.1:1"]),  # forwarded from another port
        (200, ["Host: LOCALHOST"]),
        (200, ["Host: [::1]:9400"]),
        (200, ["Host: metrics.lab.example:9400"]),
        (200, ["Host: 10.0.0.7"]),
        (200, ["Host: localhost:9", "Origin: http://localhost:9"]),
        (403, ["Host: localhost:9", "Origin: http://evil.example"]),
        (421, []),
        (421, ["Host: "]),
        (421, ["Host: evil.example"]),
        (421, ["Host: 10x0.0.7"]),
        (421, ["Host: metrics.lab.example.evil.example"]),
        (421, ["Host: 127.0.0.1.evil.example:9400"]),
        (421, ["Host: localhost", "Host: evil.example"]),
    ],
)
def test_only_loopback_and_the_named_hosts_are_answered(port: int, status: int, headers: list[str]) -> None:
    reply = asked(port, *headers)
    assert reply.startswith(f"HTTP/1.0 {status} ")
    assert ("shardwise_run_info" in reply) == (status == 200)


def test_who_leaves_before_the_answer_leaves_no_word(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    for _ in range(8):
        with connected(port) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    scraped(port)
    wait_until(lambda: threading.active_count() <= before, seconds=60)
    sys.stderr.flush()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("wrong", ["", "http://lab", "lab:9400", "a b", "*"])
def test_a_host_is_named_without_a_port(wrong: str) -> None:
    with pytest.raises(SpecError, match=r"metrics_hosts\[0\]"):
        Logging(metrics_hosts=(wrong,))
