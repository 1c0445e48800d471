"""Bubble rates of the zero-bubble paper, from its own profile (validation/pipeline_bubble.csv)."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.accuracy.bubbles import score_bubbles


def test_published_rates() -> None:
    rows = score_bubbles(Path(__file__).parents[2] / "validation" / "pipeline_bubble.csv")
    named = {f"{row.model}-{row.microbatches}-{row.schedule}": row for row in rows}
    assert len(named) == len(rows) == 36
    reported = {name: row.reported for name, row in named.items()}
    assert {name: row.simulated for name, row in named.items()} == pytest.approx(reported, abs=0.006)
