"""This process as one rank of a world that torchrun has started, on one host or several (srun: with the same names)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.spec.errors import SpecError
from shardwise.train.attempt import number_in

_HOW = "start all ranks by torchrun"


@dataclass(frozen=True)
class Started:
    """Ranks are numbered host by host."""

    rank: int
    world: int
    ranks_per_host: int

    @property
    def hosts(self) -> int:
        return self.world // self.ranks_per_host


def started(environment: Mapping[str, str] = os.environ) -> Started | None:
    """None where nobody has started a world: neither RANK nor WORLD_SIZE is set."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    rank, world = (number_in(environment, name, _HOW) for name in ("RANK", "WORLD_SIZE"))
    here = number_in(environment, "LOCAL_WORLD_SIZE", _HOW)
    if not rank < world:
        raise SpecError("RANK", f"{rank} of a world of {world}", _HOW)
    if not here or world % here:
        raise SpecError(
            "LOCAL_WORLD_SIZE", f"{world} ranks do not fill hosts of {here}", "start as many ranks on every host"
        )
    if not environment.get("MASTER_ADDR"):
        raise SpecError("MASTER_ADDR", "is not set", _HOW)
    number_in(environment, "MASTER_PORT", _HOW)
    return Started(rank, world, here)
