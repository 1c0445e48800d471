"""The store through which ranks that another launcher started find each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardwise.engine.world import store_at
from shardwise.run.environment.interfaces import interface_towards, loopback_interface
from shardwise.run.environment.reader import Started
from shardwise.spec.errors import SpecError

if TYPE_CHECKING:
    from shardwise.engine.torch_private import Store

WAIT_SECONDS = 300.0  # for the slowest rank to be started


def store_of(here: Started, seconds: float = WAIT_SECONDS) -> Store:
    """Raises SpecError if the ranks cannot meet in time."""
    assert here.address is not None and here.port is not None, "ranks of our own launcher meet in a file"
    bind_gloo(here.address, several_hosts=here.hosts > 1)
    try:
        return store_at(here.address, here.port, here.rank, here.world, seconds)
    except RuntimeError as error:  # as torch raises
        first = next(iter(str(error).splitlines()), "no answer")
        problem = f"rank {here.rank} of {here.world} at {here.address}:{here.port}: {first}"
        raise SpecError(
            "rendezvous", problem, "set MASTER_ADDR and MASTER_PORT to a free port of rank 0's host"
        ) from None


def bind_gloo(address: str, *, several_hosts: bool) -> None:
    """Makes gloo use the interface that reaches rank 0; by default it uses that of the host's name, often another one.

    Loopback is no choice if other hosts must reach this one.
    """
    name = interface_towards(address)
    if name and not (several_hosts and name == loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
