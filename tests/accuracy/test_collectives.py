"""All-reduce times of published machines, one description per machine in the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.accuracy.collectives import ScoredRow, score_all_reduces

ROWS = score_all_reduces(Path(__file__).parents[2] / "validation" / "collectives.csv")


def mean_error(rows: list[ScoredRow]) -> float:
    return sum(abs(row.error) for row in rows) / len(rows)


def test_mean_and_worst_error_from_one_mebibyte_up() -> None:
    assert len(ROWS) == 43
    assert mean_error(ROWS) <= 0.10
    assert max(abs(row.error) for row in ROWS) <= 0.25


@pytest.mark.parametrize("machine", ["dgx-h100", "dgx-h200", "p6-b200"])
def test_every_machine_by_itself(machine: str) -> None:
    assert mean_error([row for row in ROWS if row.machine == machine]) <= 0.10


def test_the_library_is_predicted_to_use_the_switch_for_large_messages() -> None:
    """The source says so: NVLS at large sizes on one node."""
    large = [row for row in ROWS if row.machine == "dgx-h100" and row.size_bytes >= 2**24]
    assert {row.predicted_algorithm for row in large} == {"nvls"}
