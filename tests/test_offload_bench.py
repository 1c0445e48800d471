"""bench/offload_gpu.py: what of a profile are copies and kernels, and how much of the copies lies under kernels."""

from __future__ import annotations

import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

# From its path: with bench/ among the paths, other tests would find bench/engine.py in place of tests/engine.
_SPEC = spec_from_file_location("offload_gpu", Path(__file__).resolve().parents[1] / "bench" / "offload_gpu.py")
assert _SPEC is not None and _SPEC.loader is not None
bench = sys.modules["offload_gpu"] = module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)


def event(kind: str, name: str, start: float, end: float) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": 1e6 * start, "dur": 1e6 * (end - start)}


def test_marked_ranges_are_no_kernels_and_copies_inside_the_device_no_copies() -> None:
    found = bench.spans_of(
        [
            event("kernel", "gemm", 2.0, 3.0),
            event("kernel", "adamw", 2.5, 4.0),
            event("kernel", "Memory-bound by its name alone", 5.0, 6.0),
            event("gpu_user_annotation", "forward 0", 0.0, 9.0),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1.0, 2.5),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4.0, 5.0),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7.0, 8.0),
            event("gpu_memset", "Memset (Device)", 7.0, 8.0),
            {"cat": "ac2g", "name": "a flow has no duration", "ts": 0.0},
        ]
    )
    assert found.kernels == ((2.0, 4.0), (5.0, 6.0))
    assert (found.out, found.back) == (((4.0, 5.0),), ((1.0, 2.5),))
    assert found.copied_seconds == 2.5
    assert found.hidden_share == pytest.approx(0.5 / 2.5)


def test_common_counts_every_instant_once() -> None:
    """Against a count of short ticks."""
    chosen, ticks = random.Random(3), range(1000)
    for _ in range(50):
        spans = [tuple(sorted(chosen.sample(ticks, 2))) for _ in range(12)]
        busy = bench.union(spans)
        under = {tick for start, end in spans for tick in range(start, end)}
        start, end = sorted(chosen.sample(ticks, 2))
        assert bench.length(busy) == len(under)
        assert bench.common((start, end), busy) == len(under & set(range(start, end)))
        assert bench.length(bench.clipped(busy, (start, end))) == len(under & set(range(start, end)))


def test_the_middle_is_whole_steps_and_a_profile_that_began_late_is_noticed() -> None:
    """Steps of 10 ms: kernels for 8, a copy from the 6th to the 10th, so that half of it is hidden."""
    starts = [0.01 * number for number in range(bench.PROFILED)]
    kernels = tuple((start, start + 0.008) for start in starts)
    copies = tuple((start + 0.006, start + 0.01) for start in starts)
    whole = bench.StepProfile((), copies, kernels)
    middle = whole.middle(0.01)
    assert middle.hidden_share == pytest.approx(0.5)
    assert bench.length(middle.back) == pytest.approx(bench.COUNTED * 0.004)
    figures = ("optimizer", 4, 1, 0.01, 0.01, 0.0, 0.0, 0.0, 0, 0.0)
    row, late = (bench.OffloadRow(*figures, bench.StepProfile((), copies, some)) for some in (kernels, kernels[1:]))
    assert row.profile_is_whole and not late.profile_is_whole
    assert "NOT ALL" in late.line()


def test_the_timeline_joins_copies_in_a_row_and_names_idle_times() -> None:
    one = bench.StepProfile(((0.001, 0.002), (0.0021, 0.003)), (), ((0.0, 0.002), (0.005, 0.006)))
    assert [line.split() for line in bench.timeline(one)] == [
        ["1.00", "2.00", "out"],
        ["2.00", "3.00", "no", "kernel"],
    ]
