"""Every layout computes what one process computes: loss, gradients, weights after three steps, gradient norm.

Generated from the factors in `layouts` and the support matrix: what runs is run, what is refused is tried.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.layouts import (
    ALL,
    FACTORS,
    FILES,
    MODELS,
    NAMES,
    Layout,
    covering,
    every_pair,
    judged,
    make_covering,
    runnable,
)
from engine.parity import check
from shardwise.engine.engine import Engine
from shardwise.spec.errors import SpecError

SCHEDULES = tuple(name for name in FACTORS["pipeline"] if name != "one")


def alone() -> Iterable[Layout]:
    """Each value of each factor with nothing else; experts and recompute with what they need."""
    for model in MODELS:
        yield Layout.of(model)
    for name in ("data", "tensor", "context", "pipeline"):
        for value in tuple(FACTORS[name])[1:]:
            yield Layout.of("tiny", **{name: value})
    for value in ("ep", "ep-deduplicated"):
        yield Layout.of("tiny-moe", data="zero-0", experts=value)
    for value in ("one", "ep-expert-tp"):
        yield Layout.of("tiny-moe", data="zero-0", tensor="sp", experts=value)
    for value in ("selective", "full", "one-layer"):
        yield Layout.of("tiny-mla", recompute=value)


def on_eight() -> Iterable[Layout]:
    """Three dimensions at once."""
    for data in ("zero-0", "zero-1", "zero-2", "zero-3"):
        yield Layout.of("tiny", data=data, tensor="sp", pipeline="1f1b")
        yield Layout.of("tiny-moe", data=data, experts="ep", pipeline="1f1b", context="all-gather")
    for method in ("ring", "ulysses"):
        yield Layout.of("tiny", data="zero-1", context=method, pipeline="1f1b")
        yield Layout.of("tiny-moe", tensor="sp", context=method, pipeline="interleaved")
        for data in ("zero-2", "zero-3"):
            yield Layout.of("tiny", data=data, context=method, pipeline="1f1b", recompute="full")
    for schedule in SCHEDULES:
        yield Layout.of("tied-gpt", data="zero-1", tensor="sp", pipeline=schedule)
        yield Layout.of("tiny-mla", data="zero-2", experts="ep", pipeline=schedule, tensor="sp")
    for data in ("hybrid-1", "hybrid-2", "hybrid-3"):
        yield Layout.of("tiny", data=data, tensor="sp")
        yield Layout.of("tiny", data=data, pipeline="1f1b")
        yield Layout.of("tiny-moe", data=data, experts="ep", context="ring")


def unique(layouts: Iterable[Layout]) -> list[Layout]:
    return [one for one in dict.fromkeys(layouts) if runnable(one)]


ALONE, ON_EIGHT = unique(alone()), unique(on_eight())
QUICK_ON_EIGHT = ON_EIGHT[::5]


@pytest.mark.parametrize("layout", ALONE, ids=str)
def test_each_technique_alone_equals_one_process(layout: Layout) -> None:
    run(layout)


@pytest.mark.parametrize("layout", covering("quick"), ids=str)
def test_pairs_of_techniques_equal_one_process(layout: Layout) -> None:
    run(layout)


@pytest.mark.parametrize("layout", QUICK_ON_EIGHT, ids=str)
def test_three_dimensions_equal_one_process(layout: Layout) -> None:
    run(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [one for one in ON_EIGHT if one not in QUICK_ON_EIGHT], ids=str)
def test_more_of_three_dimensions_equal_one_process(layout: Layout) -> None:
    run(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", covering("all"), ids=str)
def test_all_pairs_equal_one_process(layout: Layout) -> None:
    run(layout)


def run(layout: Layout) -> None:
    job = layout.job()
    assert job is not None
    check(job)


def refused() -> list[Layout]:
    return [one for one in dict.fromkeys(every_pair()) if (found := judged(one)) and found.status != "runs"]


@pytest.mark.parametrize("layout", refused(), ids=str)
def test_what_the_matrix_refuses_is_refused_with_its_reason(layout: Layout) -> None:
    job, found = layout.job(), judged(layout)
    assert job is not None and found is not None
    with pytest.raises(SpecError) as raised:
        Engine(job)  # there is no process group: it must not come that far
    assert found.findings[0].reason in str(raised.value) and found.findings[0].remedy in str(raised.value)


@pytest.mark.slow
def test_the_covering_arrays_are_what_the_matrix_says_now() -> None:
    """Else run ``python tests/engine/layouts.py``."""
    for name, choices in FILES.items():
        assert covering(name) == make_covering(choices)
    assert set(ALL) == set(NAMES)
