"""A rank's record of the profiled steps: named time ranges on a clock shared by all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, read_json

HOST = 0  # the lane of the thread that trains
STREAMS = 1000  # lanes from here on are streams of a GPU
_MOST_CHARACTERS = 256 * 2**20
_PLAIN = ("rank", "node", "device", "clock_error", "groups", "stages", "memory")  # fields written as they are


@dataclass(frozen=True)
class NamedRange:
    """A named stretch of time on one rank, in seconds since the first rank's record began."""

    name: str
    start: float
    end: float
    lane: int = HOST  # thread or GPU stream; ranges of a lane are nested or disjoint

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Flight:
    """A collective as the backend recorded it."""

    name: str
    members: tuple[int, ...]
    bytes: int  # this rank's input
    start: float


@dataclass(frozen=True)
class RankRecord:
    """What a rank recorded of the profiled steps."""

    rank: int
    node: int
    device: str
    clock_error: float  # seconds by which its clock may differ from rank 0's
    groups: Mapping[str, tuple[int, ...]]
    """Ranks that it communicates with, by the name of the group (`engine.mesh.Mesh`)."""
    stages: Mapping[int, tuple[int, ...]]  # layers of every stage that it holds
    memory: Mapping[str, int]  # bytes of its states
    ranges: tuple[NamedRange, ...]
    flights: tuple[Flight, ...] = ()

    def write(self, folder: Path) -> None:
        content = {
            **{name: getattr(self, name) for name in _PLAIN},
            "ranges": [(span.name, round(span.start, 7), round(span.end, 7), span.lane) for span in self.ranges],
            "flights": [(flight.name, flight.members, flight.bytes, round(flight.start, 7)) for flight in self.flights],
        }
        folder.mkdir(exist_ok=True)
        temporary = folder / f"rank-{self.rank}.part"
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path_of(folder, self.rank))


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def read_records(folder: Path, world: int) -> tuple[RankRecord, ...]:
    """The records of all ranks; raises SpecError if there are none, or not all of them."""
    paths = [path_of(folder, rank) for rank in range(world)]
    there = [path for path in paths if path.is_file()]
    if not there:
        remedy = "train with ⟨profile=steps=10:12⟩ (raise ⟨steps⟩ to continue a finished run)"
        raise SpecError(str(folder), "this run was not profiled", remedy)
    if len(there) < world:
        missing = next(path.name for path in paths if path not in there)
        raise SpecError(str(folder), f"{missing} is missing", "copy the records of all hosts into this folder")
    return tuple(_read(path) for path in paths)


def _read(path: Path) -> RankRecord:
    try:
        content = read_json(path, "record of a rank", _MOST_CHARACTERS, IN_BULK)
        converted = {
            "groups": {name: tuple(ranks) for name, ranks in content["groups"].items()},
            "stages": {int(stage): tuple(layers) for stage, layers in content["stages"].items()},
            "ranges": tuple(NamedRange(*fields) for fields in content["ranges"]),
            "flights": tuple(Flight(name, tuple(ranks), *rest) for name, ranks, *rest in content.get("flights", ())),
        }
        return RankRecord(**{**content, **converted})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(str(path), f"is not a record of a rank ({error})", "profile the run again") from None
