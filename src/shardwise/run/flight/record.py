"""A rank's record of its last collectives: a small file that appears complete and is replaced by the next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.run.attempt import rank_file
from shardwise.spec.files import IN_BULK, read_json


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has begun."""

    number: int
    """Counted within its group, from 1."""
    operation: str
    """In the backend's words, such as all-reduce."""
    bytes: int
    """This rank's input."""
    done: bool
    at_ns: int
    """When it was begun."""


@dataclass(frozen=True)
class GroupRecord:
    """The last collectives of a group, oldest first."""

    name: str
    """The backend's."""
    meaning: str
    """What the group is for."""
    ranks: tuple[int, ...]
    collectives: tuple[Collective, ...]

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Equal on all ranks of the group."""
        return self.name, self.ranks


@dataclass(frozen=True)
class FlightRecord:
    rank: int
    written_at: float  # seconds since the epoch
    groups: tuple[GroupRecord, ...]

    def text(self) -> str:
        return json.dumps(asdict(self))

    def write(self, folder: Path) -> None:
        write_flight(folder, self.rank, self.text())


def write_flight(folder: Path, rank: int, text: str) -> None:
    path = rank_file(folder, rank, "flight.json")
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_flight(folder: Path, rank: int) -> FlightRecord | None:
    """None if there is none, or it is damaged."""
    try:
        document = read_json(rank_file(folder, rank, "flight.json"), "flight record", most_values=IN_BULK)
        groups = tuple(
            GroupRecord(
                str(group["name"]),
                str(group["meaning"]),
                tuple(map(int, group["ranks"])),
                tuple(Collective(**each) for each in group["collectives"]),
            )
            for group in document["groups"]
        )
        return FlightRecord(int(document["rank"]), float(document["written_at"]), groups)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_flights(folder: Path, ranks: Iterable[int]) -> dict[int, FlightRecord]:
    """The records that exist, by rank."""
    return {rank: record for rank in ranks if (record := read_flight(folder, rank)) is not None}
