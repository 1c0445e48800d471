"""What an emulated link reaches of its rate and delay, and what the switch takes of a core for it.

python bench/emulation.py [2x1,1Gbit,1ms ...]
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from shardwise.launch.emulate.namespace import address
from shardwise.launch.emulate.network import Network, emulated, why_not
from shardwise.spec.emulation import Emulation

LINKS = ("2x1,200Mbit,1ms", "2x1,1Gbit,1ms", "2x1,1Gbit,1ms,loss=0.1%")
PORT = 7777
ROUNDS = 200
SECONDS = 3.0


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        return serve()
    if sys.argv[1:2] == ["ask"]:
        return ask(sys.argv[2], float(sys.argv[3]))
    missing = why_not()
    if missing is not None:
        return print(f"not measured: {missing}")
    print(f"{'link':28} {'of the rate':>11} {'round trip':>12} {'asked':>9} {'CPU of the switch':>18}")
    for text in sys.argv[1:] or LINKS:
        measure(Emulation.parse(text))
    return None


def measure(emulation: Emulation) -> None:
    with emulated(emulation) as network:
        server = subprocess.Popen(inside(network, 1, "serve"), stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        before = cpu_seconds(network.switch_pid)
        asked = subprocess.run(
            inside(network, 0, "ask", address(1), str(emulation.rate)), stdout=subprocess.PIPE, check=True
        )
        used = cpu_seconds(network.switch_pid) - before
        server.wait()
    rate, round_trip, seconds = map(float, asked.stdout.split())
    print(
        f"{emulation!s:28} {rate / emulation.rate:11.1%} {round_trip * 1e3:9.2f} ms {2e3 * emulation.delay:6.1f} ms"
        f" {used / seconds:18.1%}"
    )


def inside(network: Network, node: int, *arguments: str) -> list[str]:
    return network.command(node, [sys.executable, __file__, *arguments])


def serve() -> None:
    """Answers one byte with one; then takes all that comes."""
    with socket.create_server(("", PORT)) as listening:
        print("ready", flush=True)
        connection, _ = listening.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUNDS):
            connection.sendall(connection.recv(1))
        left = int.from_bytes(connection.recv(8), "big")
        into = bytearray(2**20)
        while left:
            left -= connection.recv_into(into, min(left, len(into)))
        connection.sendall(b"!")


def ask(host: str, rate: float) -> None:
    """Prints bytes/s, seconds of a round trip, and the seconds that the transfer took."""
    with socket.create_connection((host, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - began)
        data, size = bytes(2**20), int(rate * SECONDS) >> 20
        connection.sendall((size << 20).to_bytes(8, "big"))
        began = time.perf_counter()
        for _ in range(size):
            connection.sendall(data)
        connection.recv(1)
        seconds = time.perf_counter() - began
    print((size << 20) / seconds, statistics.median(trips), seconds)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
