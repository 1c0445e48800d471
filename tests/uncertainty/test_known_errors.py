"""The rule behind error bars: quantiles, weights of sources, and which rows speak for a job."""

from __future__ import annotations

import random

import pytest

from shardwise.uncertainty.residuals import MOST_OF_A_SOURCE, KnownErrors, RunError, Standing, quantile, weighed

NEAR = Standing("known", "dense", "framework", 8)


def rows(source: str, standing: Standing, *errors: float) -> list[RunError]:
    return [
        RunError(f"{source}-{standing}-{number}", source, standing, "", error) for number, error in enumerate(errors)
    ]


def test_a_quantile_counts_the_one_to_come() -> None:
    values = [(float(number), 1.0) for number in range(1, 10)]
    assert quantile(values, 0.8) == 8  # of 10 with the next one, 8
    assert quantile(values, 0.9) == 9
    assert quantile(values, 0.95) == 9  # so few cannot say: the largest
    assert quantile([(1.0, 0.5), (2.0, 0.5), (3.0, 4.0)], 0.5) == 3.0


def test_a_quantile_holds_what_it_says_of_rows_to_come() -> None:
    """Conformal: over many samples of 9 and one more, the next one is within the 80% quantile 80% of the time."""
    draw = random.Random(1)
    held = 0
    for _ in range(4000):
        *known, new = [draw.lognormvariate(0, 1) for _ in range(10)]
        held += new <= quantile([(one, 1.0) for one in known], 0.8)
    assert held / 4000 == pytest.approx(0.8, abs=0.02)


def test_a_source_of_many_rows_counts_as_a_few() -> None:
    many, few = rows("many", NEAR, *[0.1] * 60), rows("few", NEAR, 0.2, 0.3)
    weights = weighed(many + few)
    assert sum(weight for one, weight in weights if one.source == "many") == pytest.approx(MOST_OF_A_SOURCE)
    assert [weight for one, weight in weights if one.source == "few"] == [1.0, 1.0]


def known_errors() -> KnownErrors:
    """Four sources on a known device, two of them with a framework of their own; three on a device without a fit."""
    errors = []
    for source, stack, error in (("a", "framework", 0.05), ("b", "framework", 0.06), ("c", "framework", 0.07)):
        errors += rows(source, Standing("known", "dense", stack, 8), *[error] * 10)
    for source in ("d", "e", "f"):
        errors += rows(source, Standing("known", "dense", f"only {source}", 64), *[0.2] * 10)
        errors += rows(source, Standing("unfitted", "dense", f"only {source}", 64), *[0.4] * 10)
    return KnownErrors(errors, frozenset({"known"}))


@pytest.mark.parametrize(
    ("standing", "width", "words"),
    [
        (NEAR, 0.07, "fitted devices, dense"),
        (Standing("known", "dense", "mine", 8), 0.2, "fitted devices, dense, framework not seen"),
        (Standing("unfitted", "dense", "mine", 8), 0.4, "devices without a fit, dense, framework not seen"),
        (Standing("other", "dense", "mine", 8), 0.4, "devices without a fit, dense, framework not seen"),
        (Standing("known", "moe", "framework", 8), 0.2, "fitted devices"),  # no mixtures: of dense models
    ],
)
def test_rows_that_stand_as_far_away_speak_for_a_job(standing: Standing, width: float, words: str) -> None:
    band = known_errors().band(standing, 0.8)
    assert (band.low, band.high, band.of) == (0, pytest.approx(width), words)


def test_beyond_the_largest_run_rows_that_were_so_too_are_asked() -> None:
    """Of each source's device the others have smaller runs: the largest of every device stands beyond the rest."""
    errors = [row for number in range(20) for row in rows(f"small {number}", NEAR, *[0.05] * 10)]
    for number, source in enumerate("abc"):
        for device in ("known", f"known-{number}"):
            small = Standing(device, "dense", "framework", 8)
            errors += rows("small", small, *[0.05] * 10) + rows(source, small, *[0.05] * 10)
            large = Standing(f"known-{number}", "dense", "framework", 1024)
            errors += rows(source, large, *[0.3] * 10)
    known = KnownErrors(errors, frozenset({"known", "known-0", "known-1", "known-2"}))
    assert known.band(Standing("known", "dense", "framework", 8), 0.8).high == 0.05
    band = known.band(Standing("known", "dense", "framework", 4096), 0.8)
    assert (band.high, band.of) == (0.3, "beyond 8 devices")


def test_a_band_lies_where_the_errors_do() -> None:
    """As many rows below as above, no error inside; where predictions are too fast, more room above them."""
    errors = [row for number, source in enumerate("abc") for row in rows(source, NEAR, *[0.1 * (number - 2)] * 10)]
    band = KnownErrors(errors, frozenset({"known"})).band(NEAR, 0.8)
    assert (band.low, band.high) == (pytest.approx(-0.2), 0.0)
    assert band.holds(-0.2) and band.holds(0) and not band.holds(0.01)


def test_a_stand_in_is_a_framework_that_was_never_seen() -> None:
    errors = [row for source in "abc" for row in rows(source, Standing("known", "dense", "pytorch", 8), *[0.1] * 10)]
    known = KnownErrors(errors, frozenset({"known"}))
    assert not known.is_framework_known("pytorch")
    assert known.band(Standing("known", "dense", "mine", 8), 0.8).of == known.band(errors[0].standing, 0.8).of


def test_a_source_does_not_vouch_for_itself() -> None:
    """A device, a framework and a size are known to a row only by other sources."""
    alone = KnownErrors(rows("a", NEAR, 0.1), frozenset({"known"}))
    assert alone.is_fitted("known") and not alone.is_fitted("known", besides="a")
    assert alone.is_framework_known("framework") and not alone.is_framework_known("framework", besides="a")
    assert alone.largest("known") == 8 and alone.largest("known", besides="a") == 0
