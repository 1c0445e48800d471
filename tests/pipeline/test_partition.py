"""Partitions are the best there are: compared with trying every one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.pipeline import Place, layers_of, partition_over
from shardwise.spec.errors import SpecError

numbers = st.integers(1, 9).map(float)


def partition(seconds, sizes, stages, limits=float("inf"), activations=None, in_flight=None, **extras):
    """Layers over equally fast devices, whose memory is one number or one per stage."""
    limits = [limits] * stages if isinstance(limits, float) else limits
    places = [Place(1.0, *one) for one in zip(limits, in_flight or [1.0] * stages, strict=True)]
    return partition_over(layers_of(seconds, sizes, activations, **extras), places)


def every_split(layers, places):
    """(slowest, fullest) of every split that fits."""
    count = len(layers.seconds)
    for cuts in combinations(range(1, count), len(places) - 1):
        ends = [*cuts, count]
        starts = [0, *cuts]
        seconds, held = [], []
        for s, (place, i, j) in enumerate(zip(places, starts, ends)):
            first, last = s == 0, s == len(places) - 1
            extra_s = layers.first_extra_seconds * first + layers.last_extra_seconds * last
            extra_b = layers.first_extra_bytes * first + layers.last_extra_bytes * last
            seconds.append((sum(layers.seconds[i:j]) + extra_s) / place.speed)
            held.append(sum(layers.bytes[i:j]) + place.in_flight * sum(layers.activation_bytes[i:j]) + extra_b)
        if all(b <= place.memory_bytes for b, place in zip(held, places)):
            yield max(seconds), max(held)


@st.composite
def problems(draw):
    count = draw(st.integers(1, 8))
    columns = [draw(st.lists(numbers, min_size=count, max_size=count)) for _ in range(3)]
    extras = ("first_extra_seconds", "last_extra_seconds", "first_extra_bytes", "last_extra_bytes")
    layers = layers_of(*columns, **{name: draw(st.sampled_from([0.0, 2.0, 5.0])) for name in extras})
    stages = draw(st.integers(1, min(4, count)))
    place = st.builds(
        Place,
        speed=st.sampled_from([0.5, 1.0, 2.0]),
        memory_bytes=st.sampled_from([20.0, 40.0, float("inf")]),
        in_flight=st.integers(1, 4).map(float),
    )
    return layers, [draw(place) for _ in range(stages)]


@settings(max_examples=examples(200), deadline=None)
@given(problem=problems())
def test_no_split_is_better(problem):
    layers, places = problem
    splits = list(every_split(layers, places))
    if not splits:
        with pytest.raises(SpecError, match="times the memory"):
            partition_over(layers, places)
        return
    found = partition_over(layers, places)
    assert sum(found.layer_counts) == len(layers.seconds)
    assert min(found.layer_counts) >= 1
    slowest = min(seconds for seconds, _ in splits)
    assert max(found.stage_seconds) == pytest.approx(slowest)
    fullest = min(held for seconds, held in splits if seconds <= slowest * (1 + 1e-9))
    assert max(found.stage_bytes) == pytest.approx(fullest)
    assert all(b <= place.memory_bytes for b, place in zip(found.stage_bytes, places))


def test_embedding_and_loss_count():
    plain = partition([1.0] * 8, None, 4)
    assert plain.layer_counts == (2, 2, 2, 2)
    ends = partition([1.0] * 10, None, 4, first_extra_seconds=1.0, last_extra_seconds=1.0)
    assert ends.layer_counts == (2, 3, 3, 2)
    assert ends.stage_seconds == (3.0, 3.0, 3.0, 3.0)


def test_memory_moves_layers_away_from_the_first_stage():
    """1F1B holds p - r microbatches on rank r, so the first stage fills up first."""
    free = partition([1.0] * 12, [1.0] * 12, 4)
    tight = partition([1.0] * 12, [1.0] * 12, 4, 12.0, activations=[1.0] * 12, in_flight=[4, 3, 2, 1])
    assert free.layer_counts == (3, 3, 3, 3)
    assert tight.layer_counts[0] == 2
    assert max(tight.stage_bytes) <= 12.0


def best_order(layers, kinds, in_flight):
    """The order of two kinds of nodes with the fastest partition; those that do not fit say so."""
    found = []
    for order in permutations(range(len(kinds))):
        places = [replace(p, in_flight=held) for p, held in zip([p for k in order for p in kinds[k]], in_flight)]
        try:
            found.append((order, partition_over(layers, places)))
        except SpecError as error:
            assert "times the memory" in str(error)
    return min(found, key=lambda pair: max(pair[1].stage_seconds), default=None)


def test_two_kinds_of_nodes():
    """Fast devices get more layers, and the kind with the memory goes where the microbatches pile up."""
    layers = layers_of([1.0] * 12, [1.0] * 12, [1.0] * 12)
    large = [Place(1.0, 80.0)] * 2
    order, found = best_order(layers, [[Place(2.0, 20.0)] * 2, large], [4, 3, 2, 1])
    assert order == (0, 1)
    assert max(found.stage_seconds) == 2.0
    assert found.layer_counts == (4, 4, 2, 2)
    order, found = best_order(layers, [[Place(2.0, 12.0)] * 2, large], [4, 3, 2, 1])
    assert order == (1, 0)
    assert max(found.stage_seconds) == 2.0
    assert found.layer_counts == (2, 2, 4, 4)


def test_kinds_that_never_fit():
    layers = layers_of([1.0] * 4, [10.0] * 4)
    assert best_order(layers, [[Place(1.0, 5.0)], [Place(2.0, 5.0)]], [1, 1]) is None


def test_limits_may_differ_by_stage():
    found = partition([1.0] * 6, [1.0] * 6, 3, [1.0, 9.0, 9.0])
    assert found.layer_counts[0] == 1


def test_the_error_says_how_much_is_missing():
    with pytest.raises(SpecError, match=r"1\.33 times the memory"):
        partition([1.0] * 8, [1.0] * 8, 4, 1.5)


def test_mistakes():
    for wrong in (
        lambda: partition([1.0] * 3, None, 4),
        lambda: partition([1.0] * 3, None, 0),
        lambda: partition([1.0] * 3, [1.0], 2),
        lambda: partition([-1.0, 1.0], None, 2),
        lambda: partition_over(layers_of([1.0]), [Place(0.0)]),
        lambda: partition_over(layers_of([1.0]), []),
    ):
        with pytest.raises(SpecError):
            wrong()


def test_hundreds_of_layers():
    random = np.random.default_rng(0)
    seconds, sizes = random.uniform(0.5, 2, 320), random.uniform(1, 2, 320)
    found = partition(seconds, sizes, 64, 12.0)
    assert sum(found.layer_counts) == 320 and max(found.stage_bytes) <= 12.0
    fullest = max(partition(seconds, None, 64).stage_seconds)
    assert sum(seconds) / 64 <= fullest <= sum(seconds) / 64 + max(seconds), "cut as evenly as whole layers allow"
    assert fullest <= max(found.stage_seconds)
