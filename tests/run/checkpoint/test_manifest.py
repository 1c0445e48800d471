"""A manifest of which a byte or a type is wrong is refused in one line, whoever reads it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.running import run
from run.checkpoint.sealed import seal
from shardwise.run.checkpoint.manifest import Box, FullTensor, Manifest, SavedPiece, Shard, read_manifest
from shardwise.spec import Job
from shardwise.spec.errors import SpecError

JOB = {"model": "tiny", "cluster": "laptop:1", "training": {"global_batch": 8, "seq": 32, "precision": "fp32"}}
NUMBERS = {
    "optimizer_steps": 5.0,
    "loss_scale": {"scale": 1024.0},
    "inner_steps": 1,
    "late_sums": 0,
    "data": {"batch": 6, "left_out": [3], "sequences": 8},
    "losses": [3.5, 3.25],
}
FILE = "shard-00000.safetensors"


def sound() -> Manifest:
    pieces = tuple(SavedPiece(FILE, f"weight/a@{start},0", Box((start, 0), (2, 3))) for start in (0, 2))
    shard = Shard(48, hashlib.sha256(b"").hexdigest())
    return Manifest(
        5, Job.from_dict(JOB).to_dict(), NUMBERS, {"weight/a": FullTensor((4, 3), "F32", pieces)}, {FILE: shard}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000005"
    path.mkdir()
    (path / "manifest.json").write_bytes(sound().to_bytes())
    return path


def test_what_is_written_is_read(folder: Path) -> None:
    assert read_manifest(folder) == sound()
    assert read_manifest(folder).numbers == NUMBERS


def test_no_flipped_bit_and_no_lost_byte_goes_unnoticed(folder: Path) -> None:
    path = folder / "manifest.json"
    raw = path.read_bytes()
    for at in range(0, len(raw), 7):  # and so every bit comes in turn
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        with pytest.raises(SpecError):
            read_manifest(folder)
    for changed in (b"", raw[:-1], raw[: len(raw) // 2], raw + b" ", raw.replace(b": ", b":  ", 1)):
        path.write_bytes(changed)
        with pytest.raises(SpecError):
            read_manifest(folder)


def changed_at(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(document)
    place = made
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return made


def places_in(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every value of a document, by the way to it."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in inner:
        yield (*at, name)
        yield from places_in(value, (*at, name))


def test_a_wrong_type_is_refused_or_does_no_harm(folder: Path) -> None:
    """Also under a checksum that is right. Of the job nothing is believed; all else has its type."""
    path = folder / "manifest.json"
    document = json.loads(sound().to_bytes())
    del document["checksum"]
    values = (None, True, -1, "x", [], [1], {}, {"x": 1}, 1.5, 10**30)
    for number, place in enumerate(places_in(document)):
        for value in values if place[0] != "job" else values[number % 3 :: 3]:
            path.write_bytes(seal(changed_at(document, place, value)))
            try:
                read_manifest(folder)
            except SpecError:
                continue
            found = run("checkpoint", "inspect", str(folder), "--tensors")
            assert (found.status, found.err) == (0, ""), (place, value)


@pytest.mark.parametrize(
    "place", [("numbers", "data"), ("numbers", "data", "batch"), ("numbers", "data", "left_out"), ("numbers", "losses"),
              ("numbers", "optimizer_steps"), ("step",), ("job",), ("files",), ("tensors",)], ids=str
)  # fmt: skip
@pytest.mark.parametrize("value", ["x", True, None, {"x": 1}], ids=str)
def test_the_types_that_a_run_depends_on(folder: Path, place: tuple[str, ...], value: Any) -> None:
    document = json.loads(sound().to_bytes())
    del document["checksum"]
    (folder / "manifest.json").write_bytes(seal(changed_at(document, place, value)))
    if place == ("job",) and isinstance(value, dict):
        return
    with pytest.raises(SpecError, match="does not describe a checkpoint"):
        read_manifest(folder)


def test_a_number_that_a_run_needs_is_missed_before_one_goes_on_without_it(folder: Path) -> None:
    document = json.loads(sound().to_bytes())
    del document["checksum"], document["numbers"]["optimizer_steps"]
    (folder / "manifest.json").write_bytes(seal(document))
    found = run("checkpoint", "verify", str(folder))
    assert found.status == 1
    assert "does not say where the run was: it has no optimizer_steps" in found.out
    states = {key.replace("weight/", "exp_avg/"): one for key, one in document["tensors"].items()}
    (folder / "manifest.json").write_bytes(seal({**document, "numbers": {}, "tensors": states}))
    assert "it has no optimizer_steps, data, losses" in run("checkpoint", "verify", str(folder)).out
    (folder / "manifest.json").write_bytes(seal({**document, "numbers": {}}))  # weights alone have no run
    assert "where the run was" not in run("checkpoint", "verify", str(folder)).out


@pytest.mark.parametrize("start", [[0, 0], [1, 0]])
def test_pieces_that_leave_a_part_of_a_tensor_open_are_refused(folder: Path, start: list[int]) -> None:
    """As many elements as the tensor has, some of them twice: what is between would be whatever memory holds."""
    document = json.loads(sound().to_bytes())
    del document["checksum"]
    assert document["tensors"]["weight/a"]["pieces"][1][2] == [2, 0]
    document["tensors"]["weight/a"]["pieces"][1][2] = start
    (folder / "manifest.json").write_bytes(seal(document))
    with pytest.raises(SpecError, match="does not describe a checkpoint"):
        read_manifest(folder)


def test_a_manifest_without_a_checksum_is_not_believed(folder: Path) -> None:
    document = json.loads(sound().to_bytes())
    del document["checksum"]
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(SpecError, match="is damaged: it does not end in its checksum"):
        read_manifest(folder)
