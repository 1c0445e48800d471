"""Virtual nodes for real: what a link lets through and when, what a cut does, and that nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from required import require
from shardwise.launch.emulate.namespace import address
from shardwise.launch.emulate.network import Network, Shaping, emulated, why_not
from shardwise.launch.emulate.switch import QUEUE_BYTES, Wires
from shardwise.launch.pool import WorkerPlace
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError

SERVE = """
import socket
with socket.create_server(("", 7777)) as listening:
    print("ready", flush=True)
    connection, _ = listening.accept()
left = int.from_bytes(connection.recv(8), "big")
while left:
    left -= len(connection.recv(min(left, 2**20)))
connection.sendall(b"!")
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7777)) as connection:
    size = int(sys.argv[2])
    began = time.monotonic()
    connection.sendall(size.to_bytes(8, "big") + bytes(size))
    connection.recv(1)
    print(time.monotonic() - began)
"""


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> None:
    if "anywhere" in request.fixturenames:
        return
    require("emulate", why_not())


@pytest.fixture
def anywhere() -> None:
    """For a test that needs no namespaces."""


def seconds_to_send(network: Network, size: int) -> float:
    """From node 0 to node 1 and one byte back."""
    return float(sending(network, size).communicate(timeout=60)[0])


def sending(network: Network, size: int) -> subprocess.Popen[str]:
    server = run_on(network, 1, SERVE)
    assert server.stdout is not None
    server.stdout.readline()
    return run_on(network, 0, SEND, address(1), str(size))


def run_on(network: Network, node: int, code: str, *arguments: str) -> subprocess.Popen[str]:
    command = network.command(node, [sys.executable, "-I", "-S", "-c", code, *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


# -- the wires ---------------------------------------------------------------------------------------


def test_packets_of_a_node_leave_one_after_the_other(anywhere: None) -> None:
    wires = Wires(3, rate=1000, delay=0.5, loss=0)
    assert [wires.arrival(0, 1, 100, 10.0), wires.arrival(0, 2, 100, 10.0)] == [10.6, 10.7]
    assert wires.arrival(1, 0, 100, 10.0) == 10.6  # the other direction is free


def test_a_node_receives_one_packet_after_the_other(anywhere: None) -> None:
    wires = Wires(3, rate=1000, delay=0.5, loss=0)
    assert [wires.arrival(0, 2, 100, 10.0), wires.arrival(1, 2, 100, 10.0)] == [10.6, 10.7]


def test_one_pair_can_be_slower(anywhere: None) -> None:
    wires = Wires(3, rate=1000, delay=0.5, loss=0)
    wires.reshape(rate=100, delay=None, loss=None, pair=(0, 1))
    assert [wires.arrival(0, 1, 100, 10.0), wires.arrival(0, 2, 100, 10.0)] == [11.5, 10.7]


def test_a_full_port_drops(anywhere: None) -> None:
    wires = Wires(2, rate=1000, delay=0.5, loss=0)
    assert wires.arrival(0, 1, QUEUE_BYTES + 1, 10.0) is not None
    assert wires.arrival(0, 1, 100, 10.0) is None
    wires.arrived(0, QUEUE_BYTES + 1)
    assert wires.arrival(0, 1, 100, 10.0) is not None


def test_a_share_is_lost(anywhere: None) -> None:
    wires = Wires(2, rate=1e9, delay=0, loss=0.1)
    lost = sum(wires.arrival(0, 1, 1, 0.0) is None for _ in range(10_000))
    assert 800 < lost < 1200


# -- links between namespaces ------------------------------------------------------------------------


def test_rate_and_delay_take_effect_and_can_be_changed() -> None:
    with emulated(Emulation.parse("2x1,20Mbit,0.1ms")) as network:
        slow = seconds_to_send(network, 4 * 2**20)
        assert slow > 1.5
        network.reshape(rate=1e9, delay=0.1)
        assert seconds_to_send(network, 1000) > 0.2
        network.reshape(delay=0)
        assert seconds_to_send(network, 2**20) < slow


@pytest.mark.slow
def test_all_arrives_over_a_link_that_loses_packets() -> None:
    with emulated(Emulation.parse("2x1,1Gbit,0.1ms,loss=1%")) as network:
        assert seconds_to_send(network, 2**22) > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("shaping", ["switch", "kernel"])
def test_a_partition_stalls_and_healing_resumes(shaping: Shaping) -> None:
    require("emulate", lacks_commands() if shaping == "kernel" else None)
    with emulated(Emulation.parse("3x1,20Mbit"), shaping) as network:
        transfer = sending(network, 4 * 2**20)
        network.partition(1, 0)
        with pytest.raises(subprocess.TimeoutExpired):
            transfer.wait(1.5)
        network.heal()
        assert transfer.wait(30) == 0


def lacks_commands() -> str | None:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"there is no command {missing[0]}" if missing else None


@pytest.mark.slow
def test_the_kernel_keeps_a_rate() -> None:
    require("emulate", lacks_commands())
    with emulated(Emulation.parse("2x1,20Mbit"), "kernel") as network:
        inodes = {Path(network.namespace(node)).stat().st_ino for node in range(2)}
        slow = seconds_to_send(network, 4 * 2**20)
        assert slow > 1.5
        network.reshape(rate=1e9)
        assert seconds_to_send(network, 2**20) < slow
        with pytest.raises(SpecError, match="all links alike"):
            network.reshape(rate=1e6, pair=(0, 1))
    assert list(holders(inodes)) == []


def test_two_networks_do_not_meet() -> None:
    emulation = Emulation.parse("2x1,1Gbit,1ms")
    with emulated(emulation) as one, emulated(emulation) as other:
        server = run_on(one, 1, SERVE)
        assert server.stdout is not None
        server.stdout.readline()
        refused = subprocess.run(
            other.command(0, [sys.executable, "-I", "-S", "-c", SEND, address(1), "1"]), capture_output=True
        )
        assert b"ConnectionRefusedError" in refused.stderr
        server.kill()
        server.wait()


# -- what is left ------------------------------------------------------------------------------------


def holders(inodes: set[int]) -> Iterator[str]:
    """Processes that are in one of these namespaces or hold it open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(path.stat().st_ino in inodes for path in (process / "ns" / "net", *(process / "fd").iterdir())):
                yield process.name


def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(KeyError), emulated(Emulation.parse("2x1,1Gbit,1ms")) as network:
        inodes = {Path(network.namespace(node)).stat().st_ino for node in range(2)}
        assert list(holders(inodes)) == [str(network.switch_pid)]
        raise KeyError
    assert list(holders(inodes)) == []


KILLED = """
import time
from pathlib import Path
from shardwise.launch.emulate.network import emulated
from shardwise.spec.emulation import Emulation

with emulated(Emulation.parse("2x1,1Gbit,1ms")) as network:
    print(network.switch_pid, *(Path(network.namespace(node)).stat().st_ino for node in range(2)), flush=True)
    time.sleep(60)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    switch, *inodes = map(int, parent.stdout.readline().split())
    assert list(holders(set(inodes))) == [str(switch)]
    parent.send_signal(number)
    parent.wait()
    deadline = time.monotonic() + 10
    while list(holders(set(inodes))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(holders(set(inodes))) == []


# -- a pool ------------------------------------------------------------------------------------------


def where(place: WorkerPlace) -> tuple[int, str, str]:
    return place.rank, str(Path("/proc/self/ns/net").readlink()), os.environ["GLOO_SOCKET_IFNAME"]


def fail(place: WorkerPlace) -> None:
    assert place.rank, "rank 0 ends here"


def test_ranks_of_a_pool_live_on_their_nodes() -> None:
    from shardwise.launch.emulate.network import EmulatedPool
    from shardwise.launch.pool import WorkerError

    with EmulatedPool(Emulation.parse("2x2,1Gbit,1ms")) as pool:
        first = pool.run(where, 4)
        with pytest.raises(WorkerError):
            pool.run(fail, 2)
        assert pool.run(where, 4) == first  # new workers for two of them, in the same places
        inodes = {Path(pool.network.namespace(node)).stat().st_ino for node in range(2)}
    assert [rank for rank, _, _ in first] == [0, 1, 2, 3]
    spaces = [space for _, space, _ in first]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3] and str(Path("/proc/self/ns/net").readlink()) not in spaces
    assert list(holders(inodes)) == []
