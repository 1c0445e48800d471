"""Every layout computes what one process computes: loss, gradients, weights after a few steps, gradient norm.

Generated from the factors in `layouts` and the support matrix: what runs is run, what is refused is tried.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.layouts import (
    FACTORS,
    FILES,
    MODELS,
    Layout,
    covering,
    every_pair,
    judged,
    missing_pairs,
    runnable,
)
from engine.parity import check
from shardwise.measure.reference import run_reference

SCHEDULES = tuple(name for name in FACTORS["pipeline"] if name != "one")


def alone() -> Iterable[Layout]:
    """Each value of each factor with nothing else; experts and recompute with what they need."""
    for model in MODELS:
        yield Layout.of(model)
    for name in ("data", "tensor", "context", "pipeline"):
        for value in tuple(FACTORS[name])[1:]:
            yield Layout.of("tiny", **{name: value})
    for value in ("ep", "ep-deduplicated", "ep-overlapped"):
        yield Layout.of("tiny-moe", data="zero-0", experts=value)
    for value in ("one", "ep-expert-tp"):
        yield Layout.of("tiny-moe", data="zero-0", tensor="sp", experts=value)
    for value in ("selective", "full", "one-layer"):
        yield Layout.of("tiny-mla", recompute=value)


def combined() -> Iterable[Layout]:
    """Three dimensions and more at once, most on eight ranks: dense and MoE, every stage of ZeRO with each."""
    for model, experts in (("tiny", "one"), ("tiny-moe", "ep")):
        for data, recompute in zip(
            ("zero-0", "zero-1", "zero-2", "zero-3"), ("selective", "full", "one-layer", "none")
        ):
            chosen = {"data": data, "recompute": recompute, "experts": experts}
            yield Layout.of(model, **chosen, tensor="sp", pipeline="1f1b")
            for method in ("ring", "ulysses"):
                yield Layout.of(model, **chosen, context=method, pipeline="1f1b")
        for data in ("one", "only-zero-1", "only-zero-2", "only-zero-3"):
            for method in ("ring", "ulysses"):
                yield Layout.of(model, data=data, experts=experts, tensor="sp", context=method, pipeline="interleaved")
    for data in ("zero-0", "zero-1", "zero-2", "zero-3"):
        yield Layout.of("tiny-mla", data=data, experts="ep", pipeline="1f1b")
    for schedule in SCHEDULES:
        yield Layout.of("tied-gpt", data="zero-1", tensor="sp", pipeline=schedule)
        yield Layout.of("tiny-mla", data="zero-2", experts="ep", pipeline=schedule, tensor="sp")
        yield Layout.of("tiny", data="zero-3-kept", context="ring", pipeline=schedule)
    for data in ("hybrid-1", "hybrid-2", "hybrid-3"):
        yield Layout.of("tiny", data=data, tensor="sp")
        yield Layout.of("tiny", data=data, pipeline="1f1b")
        yield Layout.of("tiny-moe", data=data, experts="ep", context="ring")
        yield Layout.of("tiny-moe", data=data, experts="ep", pipeline="1f1b")


def unique(layouts: Iterable[Layout]) -> list[Layout]:
    return [one for one in dict.fromkeys(layouts) if runnable(one)]


PAIRS, ALONE, COMBINED = covering("quick"), unique(alone()), unique(combined())
FEW = 2  # steps: the second begins with the moments and the weights of the first; `make test-all` does three
IN_PAIRS = {value for layout in PAIRS for value in layout.values}


@pytest.mark.parametrize("layout", [one for one in ALONE if not IN_PAIRS.issuperset(one.values)], ids=str)
def test_a_technique_alone_equals_one_process(layout: Layout) -> None:
    """Those that no layout of the quick pairs has."""
    run(layout, FEW)


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_pairs_of_techniques_equal_one_process(layout: Layout) -> None:
    """Some have three dimensions or more at once."""
    run(layout, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [one for one in ALONE if IN_PAIRS.issuperset(one.values)], ids=str)
def test_the_others_alone_equal_one_process(layout: Layout) -> None:
    run(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", COMBINED, ids=str)
def test_three_dimensions_equal_one_process(layout: Layout) -> None:
    run(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", covering("all"), ids=str)
def test_all_pairs_equal_one_process(layout: Layout) -> None:
    run(layout)


def run(layout: Layout, steps: int = 3) -> None:
    job = layout.job()
    assert job is not None
    check(job, steps=steps)


def test_every_pair_of_techniques_runs() -> None:
    """But one, which the matrix refuses; what it refuses is tried in `test_matrix_runs`."""
    refused = [dict(one.values) for one in every_pair() if (found := judged(one)) and found.status != "runs"]
    assert [(one["tensor"], one["experts"]) for one in refused] == [("plain", "ep-overlapped")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_covering_arrays_have_every_pair_that_runs(name: str) -> None:
    """Else run ``python tests/engine/layouts.py``."""
    layouts = covering(name)
    assert all(runnable(one) for one in layouts)
    assert not missing_pairs(layouts, FILES[name])


def test_every_step_is_clipped_and_accumulated() -> None:
    """Else parity would say nothing of either."""
    for model in MODELS:
        job = Layout.of(model).job()
        assert job is not None and job.microbatches > 2 and job.training.optimization.clip_norm is not None
        assert min(run_reference(job, 3, 0).gradient_norms) > job.training.optimization.clip_norm
