"""A rebalanced pipeline as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.report.console import table
from shardwise.report.page import Piece, paged
from shardwise.spec.units import readable_seconds

if TYPE_CHECKING:
    from shardwise.measure.recut import Recut

SLOW = 1.1  # times the median rank's time for a layer: ranks below that are not mentioned


@paged
def recut_page(found: Recut, written: Path) -> Iterator[Piece | str]:
    before, after = found.layers
    rows = [
        (str(stage), str(old), str(new), f"{new - old:+d}" if new != old else "")
        for stage, (old, new) in enumerate(zip(before, after))
    ]
    yield table("Layers of every stage", ("stage", "measured run", "new cut", ""), rows)
    slow = [(rank, one) for rank, one in enumerate(found.slowness) if one >= SLOW]
    if slow:
        words = ", ".join(f"rank {rank} {one:.2f} times" for rank, one in slow)
        yield f"Slow ranks, by time for a layer against the median rank: {words}."
    if found.job.strategy.order != found.old.strategy.order:
        order = ", ".join(found.job.strategy.order)
        yield f"Ranks are moved: order [{order}] puts slow ranks into the same stages."
    if found.job == found.old:
        yield "The stages are as even as whole layers allow: no other split is faster."
    else:
        old, new = readable_seconds(found.step_seconds), readable_seconds(found.expected_seconds)
        yield f"Step time {old} → {new} expected, {found.gain:.2f} times faster."
    yield f"Written: {written}"
