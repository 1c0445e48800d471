"""Numbers for people: never "-0", never 1,000 of a unit that has a next one, and in order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_change,
    readable_count,
    readable_decimal_bytes,
    readable_difference,
    readable_duration,
    readable_flops,
    readable_money,
    readable_rate,
    readable_seconds,
    readable_share,
)

MINUTE, HOUR, DAY, YEAR = 60, 3600, 86400, 86400 * 365.25
SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "min": MINUTE, "h": HOUR, "day": DAY, "days": DAY, "years": YEAR}
DECIMAL = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21, "Y": 1e24}
BINARY = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}


def prefixed(unit: str, factors: dict[str, float]) -> dict[str, float]:
    return {prefix + unit: factor for prefix, factor in factors.items()}


FORMATS: dict[str, tuple[Callable[[float], str], dict[str, float], float]] = {
    "bytes": (readable_bytes, prefixed("B", BINARY), 1024),
    "decimal bytes": (readable_decimal_bytes, prefixed("B", DECIMAL), 1000),
    "rate": (readable_rate, prefixed("B/s", DECIMAL), 1000),
    "flops": (readable_flops, prefixed("FLOP", DECIMAL), 1000),
    "count": (readable_count, DECIMAL, 1000),
    "seconds": (readable_seconds, SECONDS, 1000),
    "duration": (readable_duration, SECONDS, 1000),
    "difference": (readable_difference, SECONDS, 1000),
    "share": (readable_share, {"%": 0.01}, math.inf),
    "change": (readable_change, {"%": 0.01}, math.inf),
    "money": (lambda number: readable_money(number, "$"), DECIMAL, 1000),
}
LAST = ("PB", "PB/s", "YFLOP", "T", "EiB", "years")  # there is no next unit
numbers = st.one_of(
    st.floats(-1e15, 1e15),
    st.floats(-10, 10),
    st.floats(-1e-6, 1e-6),
    st.builds(lambda power, off: 10.0**power * (1 + off), st.integers(-10, 20), st.floats(-0.01, 0.01)),
    st.builds(lambda power, off: 2.0**power * (1 + off), st.integers(0, 62), st.floats(-0.01, 0.01)),
    st.builds(lambda size, off: size * (1 + off), st.sampled_from((60, 600, HOUR, DAY, 10 * DAY, YEAR, 2 * YEAR)),
              st.floats(-0.01, 0.01)),
)  # fmt: skip


def parts(text: str) -> list[tuple[float, str]]:
    """Every number of the text with its unit; a sign in front is that of all."""
    sign = -1 if text.startswith("-") else 1
    found = re.findall(r"([\d.,]+) ?([A-Za-zµ%/]*)", text.replace("$", ""))
    return [(sign * float(digits.replace(",", "")), unit) for digits, unit in found]


def value(text: str, units: dict[str, float]) -> float:
    return sum(number * units[unit] for number, unit in parts(text))


@pytest.mark.parametrize("name", FORMATS)
@given(number=numbers)
@example(number=-1e-19)
@example(number=-0.0)
@example(number=999.95)
@example(number=999.5)
@example(number=999_950_000)
@example(number=1023.99 * 1024)
@example(number=59.96)
@example(number=3599.9)
def test_the_text_is_the_number_in_a_unit_that_fits(name: str, number: float) -> None:
    readable, units, full = FORMATS[name]
    text = readable(number)
    found = parts(text)
    assert not re.match(r"[-+][$]?[0.,]+($|[^\d.,])", text), text  # no sign before a zero
    assert text.startswith("-") == (value(text, units) < 0)
    for digits, unit in found:
        assert abs(digits) < full or unit in LAST, text
        assert digits or len(found) == 1, text
    coarse = {"duration": 0.022, "share": 0.01, "change": 0.01}.get(name, 0.0051)  # half an hour of a day
    smallest = {"share": 0.0006, "change": 0.0006, "money": 0.006, "count": 0.51}.get(name, 0.51)
    if name in ("seconds", "duration", "difference"):
        smallest = 6e-12
    assert value(text, units) == pytest.approx(number, rel=coarse, abs=smallest), text


@pytest.mark.parametrize("name", FORMATS)
@given(one=numbers, other=numbers)
def test_a_larger_number_never_has_a_smaller_text(name: str, one: float, other: float) -> None:
    readable, units, _ = FORMATS[name]
    low, high = sorted((one, other))
    assert value(readable(low), units) <= value(readable(high), units) * (1 + 1e-12 * (1 if high > 0 else -1))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_number_and_what_has_no_end(name: str) -> None:
    readable, _, _ = FORMATS[name]
    assert [readable(one).lstrip("+") for one in (math.nan, math.inf, -math.inf)] == ["–", "∞", "-∞"]
    assert "e" not in readable(1e300).replace("years", "")


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        (readable_seconds(-1e-19), "0 s"),
        (readable_seconds(0.9999), "1.00 s"),
        (readable_seconds(262), "262 s"),
        (readable_seconds(599.7), "10.0 min"),
        (readable_duration(262), "4 min 22 s"),
        (readable_duration(-262), "-4 min 22 s"),
        (readable_duration(0), "0 s"),
        (readable_duration(5.26), "5.26 s"),
        (readable_duration(30), "30 s"),
        (readable_duration(59.7), "1 min"),
        (readable_duration(7500), "2 h 5 min"),
        (readable_duration(86399), "1 day"),
        (readable_duration(100_000), "1 day 4 h"),
        (readable_duration(86400 * 54), "54.0 days"),
        (readable_count(999_950_000), "1.00B"),
        (readable_count(999.95), "1.00k"),
        (readable_count(0.4), "0.40"),
        (readable_count(1e15), "1,000T"),
        (readable_flops(3.65e25), "36.5 YFLOP"),
        (readable_rate(999.6e9), "1.00 TB/s"),
        (readable_bytes(1023.999 * 2**20), "1.00 GiB"),
        (readable_share(-0.0001), "0.0%"),
        (readable_change(0.0001), "0.0%"),
        (readable_change(0.012), "+1.2%"),
        (readable_difference(-1e-19), "0 s"),
        (readable_difference(0.0012), "+1.20 ms"),
        (readable_money(2.5, "$"), "$2.50"),
        (readable_money(999.999, "€"), "€1.00k"),
        (readable_money(-1.2e6, "£"), "-£1.20M"),
        (counted(1, "document"), "1 document"),
        (counted(0, "document"), "0 documents"),
        (counted(3, "strategy"), "3 strategies"),
        (counted(1, "microbatch"), "1 microbatch"),
        (counted(2000, "process"), "2,000 processes"),
    ],
)
def test_what_people_read(text: str, readable: str) -> None:
    assert text == readable
