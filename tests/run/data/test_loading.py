"""Shards that are copied first, and batches that are made ahead: always the same data, in the same order."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.run.data import order as loading
from shardwise.run.data import run_data
from shardwise.run.data.order import Loader, Mixture, Rows, rows_of
from shardwise.run.data.run_data import mixtures_of
from shardwise.spec.errors import SpecError
from training.runs import job_of, write_shards

BATCH = 8


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Where shards are copied to, by the word of the job; nothing of a test stays on this machine."""
    found = {"memory": tmp_path / "shm", "local-disk": tmp_path / "disk"}
    for path in found.values():
        path.mkdir()
    monkeypatch.setattr(run_data, "_MEMORY", found["memory"])
    monkeypatch.setattr(tempfile, "tempdir", str(found["local-disk"]))
    return found


def rows(shards: str, folder: Path, **data: Any) -> Rows:
    job = job_of(shards, run={"data": {"shards": [shards], "held_out": 0.2, **data}})
    return rows_of(mixtures_of(job, folder)[0], 3, BATCH)


def same(one: Rows, other: Rows) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "labels", "documents"))


def copies(place: Path) -> list[Path]:
    return sorted(place.glob(f"shardwise-{os.getuid()}/*/words.bin"))


# -- staging -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "local-disk"])
def test_a_copy_is_read_in_place_of_the_shards(where: str, tmp_path: Path, places: dict[str, Path]) -> None:
    shards = write_shards(tmp_path / "words")
    there = rows(shards, tmp_path)
    assert same(rows(shards, tmp_path, stage=where), there)
    (copy,) = copies(places[where])
    assert copy.read_bytes() == Path(f"{shards}.bin").read_bytes()
    assert [copies(place) for word, place in places.items() if word != where] == [[]]

    before = copy.stat()
    assert same(rows(shards, tmp_path, stage=where), there)  # the next start of the run, or the next rank
    assert (copy.stat().st_ino, copy.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    write_shards(tmp_path / "words", seed=1)
    assert not same(rows(shards, tmp_path, stage=where), there)
    assert len(copies(places[where])) == 2


def test_a_copy_that_was_begun_is_made_again(tmp_path: Path, places: dict[str, Path]) -> None:
    shards = write_shards(tmp_path / "words")
    rows(shards, tmp_path, stage="memory")
    (copy,) = copies(places["memory"])
    copy.rename(f"{copy}.part")  # as a process that is killed leaves it
    os.truncate(f"{copy}.part", 100)
    assert same(rows(shards, tmp_path, stage="memory"), rows(shards, tmp_path))


def test_more_than_the_limit_is_not_copied(tmp_path: Path, places: dict[str, Path]) -> None:
    shards = write_shards(tmp_path / "words")
    with pytest.raises(SpecError, match=r"run.data.stage: .* more than stage_limit allows \(1.00 KiB\)"):
        rows(shards, tmp_path, stage="memory", stage_limit="1KiB")
    assert not copies(places["memory"])


def test_a_place_that_takes_nothing_is_named(tmp_path: Path, places: dict[str, Path]) -> None:
    (places["memory"] / f"shardwise-{os.getuid()}").write_text("a file where the folder would be")
    with pytest.raises(SpecError, match=r"run.data.stage: .*words could not be copied to .*; stage: none"):
        rows(write_shards(tmp_path / "words"), tmp_path, stage="memory")


# -- batches made ahead ------------------------------------------------------------------------------


class Late(Future[Rows]):
    """A batch that is done only when somebody waits for it."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def result(self, timeout: float | None = None) -> Rows:
        self.set_result(self.rows)
        return super().result(timeout)


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    return mixtures_of(job_of(write_shards(tmp_path / "words")), tmp_path)[0]


def take_late(loader: Loader, step: int) -> Rows:
    """A step that the loop waits for, though it was begun before."""
    loader._made[step] = Late(rows_of(loader.mixture, step, BATCH))
    return loader.take(step)


def test_a_loader_left_to_itself_gets_further_ahead_when_it_is_waited_for(mixture: Mixture) -> None:
    loader = Loader(mixture, BATCH)
    first = loader.prefetch
    loader.take(0)  # nobody could have begun that one before
    assert loader.prefetch == first
    for step in range(1, 4):
        assert same(take_late(loader, step), rows_of(mixture, step, BATCH))
    assert loader.prefetch == first + 3
    assert loader.waited_seconds > 0
    loader.prefetch = loading.MOST_AHEAD
    take_late(loader, 4)
    assert loader.prefetch == loading.MOST_AHEAD


def test_a_number_that_was_asked_for_stays(mixture: Mixture) -> None:
    loader = Loader(mixture, BATCH, prefetch=3, workers=1)
    loader.take(0)
    assert sorted(loader._made) == [1, 2, 3]
    take_late(loader, 1)
    assert loader.prefetch == 3


def test_any_step_may_be_taken_next(mixture: Mixture) -> None:
    """After a roll-back, or where batches are left out, what was made ahead is not what is wanted."""
    loader = Loader(mixture, BATCH, range(BATCH // 2, BATCH))
    for step in (0, 1, 7, 8, 2):
        assert same(loader.take(step), rows_of(mixture, step, BATCH, range(BATCH // 2, BATCH)))
