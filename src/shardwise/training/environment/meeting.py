"""The store in which ranks that a launcher has started find each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardwise.engine.world import store_at
from shardwise.spec.errors import SpecError
from shardwise.training.environment.interfaces import loopback_interface
from shardwise.training.environment.reader import Started

if TYPE_CHECKING:
    from shardwise.engine.torch_private import Store

WAIT_SECONDS = 300.0  # for the slowest rank to be started
LOOPBACK = "127.0.0.1"


def store_of(here: Started, seconds: float = WAIT_SECONDS) -> Store:
    """Raises SpecError if the ranks cannot meet in time."""
    assert here.address is not None and here.port is not None, "ranks of our own launcher meet in a file"
    bind_to_loopback(here.address)
    try:
        return store_at(here.address, here.port, here.rank, here.world, seconds)
    except RuntimeError as error:  # torch's own are of this kind
        first = next(iter(str(error).splitlines()), "no answer")
        problem = f"rank {here.rank} of {here.world} at {here.address}:{here.port}: {first}"
        raise SpecError(
            "rendezvous", problem, "set MASTER_ADDR and MASTER_PORT to a free port of rank 0's host"
        ) from None


def bind_to_loopback(address: str) -> None:
    """gloo uses the interface of the host's name: ranks that meet on loopback need no other."""
    if address == LOOPBACK and (name := loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
