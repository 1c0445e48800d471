"""A rank's record of its last collectives: a small file that appears whole, and is replaced by the next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.run.attempt import rank_file
from shardwise.spec.files import IN_BULK, read_json


@dataclass(frozen=True)
class Collective:
    """``number`` counts those of its group, from 1; ``bytes`` are this rank's input; ``at_ns`` is when it was begun."""

    number: int
    operation: str  # in the backend's words, such as all-reduce
    bytes: int
    done: bool
    at_ns: int


@dataclass(frozen=True)
class GroupRecord:
    """The last collectives of one group, oldest first. ``name`` is the backend's, ``meaning`` what it is for."""

    name: str
    meaning: str
    ranks: tuple[int, ...]
    collectives: tuple[Collective, ...]

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Equal on all of its ranks."""
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
    """By rank, those that there are."""
    return {rank: record for rank in ranks if (record := read_flight(folder, rank)) is not None}
