"""Bubble rates of the zero-bubble paper, from its own profile (validation/pipeline_bubble.csv)."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cost.validation.bubbles import ScoredBubble, score_bubbles

ROWS = score_bubbles(Path(__file__).parents[2] / "validation" / "pipeline_bubble.csv")


def test_the_table_is_whole() -> None:
    assert len(ROWS) == 36


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.microbatches}-{row.schedule}")
def test_published_rates(row: ScoredBubble) -> None:
    assert row.simulated == pytest.approx(row.reported, abs=0.006)
