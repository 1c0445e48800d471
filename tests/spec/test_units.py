"""Quantities: every unit means what it says, and what is written reads back to exactly the same number."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.spec.errors import SpecError
from shardwise.spec.units import parse, readable_bytes, readable_count, readable_rate, readable_seconds, render
from tables import table

DIMENSIONS = ["bytes", "seconds", "bytes/s", "flops/s", "count", "watts", "share"]
DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}


def every_unit() -> list[tuple[str, str, Fraction]]:
    """(dimension, unit, exact factor) for all units the documentation promises."""
    units = []
    for prefix, power in DECIMAL.items():
        factor = Fraction(10) ** power
        units.append(("bytes", prefix + "B", factor))
        units.append(("bytes/s", prefix + "B/s", factor))
        units += [("bytes/s", prefix + bits, factor / 8) for bits in ("b/s", "bit/s", "bps")]
        units += [("flops/s", prefix + flops, factor) for flops in ("FLOPS", "FLOP/s", "OPS", "OP/s")]
    for prefix, power in BINARY.items():
        units += [("bytes", prefix + "B", Fraction(2) ** power), ("bytes/s", prefix + "B/s", Fraction(2) ** power)]
    seconds = {"ns": "1/1000000000", "us": "1/1000000", "µs": "1/1000000", "ms": "1/1000", "s": "1"}
    units += [("seconds", unit, Fraction(factor)) for unit, factor in seconds.items()]
    units += [("seconds", "min", Fraction(60)), ("seconds", "h", Fraction(3600)), ("seconds", "d", Fraction(86400))]
    counts = {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
    units += [("count", unit, Fraction(10) ** power) for unit, power in counts.items()]
    return [*units, ("watts", "W", Fraction(1)), ("watts", "kW", Fraction(1000)), ("share", "%", Fraction(1, 100))]


@table(("dimension", "unit", "factor"), every_unit())
@table("number", ["1", "3", "400", "12.5", "0.1"])
def test_a_unit_multiplies_exactly(dimension: str, unit: str, factor: Fraction, number: str) -> None:
    exact = Fraction(number) * factor
    value = parse(f"{number}{unit}", dimension)
    assert math.isclose(value, exact, rel_tol=2e-16)
    if Fraction(number).denominator == 1 and exact.denominator == 1:
        assert value == exact
    assert parse(f" {number} {unit} ", dimension) == value


def test_a_small_b_is_a_bit_and_a_capital_one_a_byte() -> None:
    assert parse("400Gb/s", "bytes/s") == parse("400Gbit/s", "bytes/s") == parse("400Gbps", "bytes/s") == 50e9
    assert parse("400GB/s", "bytes/s") == 400e9
    with pytest.raises(SpecError, match="unknown unit 'Gb'"):
        parse("80Gb", "bytes")


def test_binary_and_decimal_prefixes_differ() -> None:
    assert parse("80GiB", "bytes") == 80 * 2**30
    assert parse("80GB", "bytes") == 80 * 10**9


@table(("text", "value"), [("1_000", 1000), ("70e9", 70e9), ("1.5e3", 1500), ("+5", 5), (".5", 0.5), ("-2", -2)])
def test_number_formats(text: str, value: float) -> None:
    assert parse(text, "count") == value


def test_numbers_pass_unchanged() -> None:
    assert parse(80, "bytes") == 80
    assert parse(0.25, "share") == 0.25


@table("dimension", DIMENSIONS)
@table(
    "text",
    [
        "",
        " ",
        "x",
        "GB",
        "1e",
        "1 2",
        "--1",
        "1..2",
        "nan",
        "inf",
        "0x10",
        "5 parsecs",
        "1e400",
        "1e-320",
        "1e31",
        "٣x",
    ],
)
def test_bad_text_is_refused_with_an_example(text: str, dimension: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, dimension, "cluster.memory")
    assert caught.value.field == "cluster.memory"
    assert repr(text)[1:4].strip("'") in str(caught.value)
    assert caught.value.remedy.startswith(("write it like ", "use one of "))


@table("value", [None, True, [1], {"a": 1}, math.nan, math.inf, -math.inf, 10**400])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(SpecError):
        parse(value, "bytes")


@table("text", ["5GB/s", "5s", "5FLOPS"])
def test_a_unit_of_another_dimension_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="unknown unit"):
        parse(text, "bytes")


numbers = st.one_of(
    st.integers(-(10**18), 10**18),
    st.floats(1e-30, 1e30),
    st.floats(-1e30, -1e-30),
    st.builds(lambda digits, power: digits * 10.0**power, st.integers(1, 9999), st.integers(-12, 15)),
    st.builds(lambda digits, power: digits * 2**power, st.integers(1, 9999), st.integers(0, 45)),
    st.just(0),
)


@given(numbers, st.sampled_from(DIMENSIONS))
@example(5e-6, "seconds")
@example(0.1 + 0.2, "seconds")
@example(900e9, "bytes/s")
def test_rendered_text_reads_back_to_exactly_the_same_number(number: float, dimension: str) -> None:
    assert parse(render(number, dimension), dimension) == number


@table(
    ("number", "dimension", "text"),
    [
        (80 * 2**30, "bytes", "80GiB"),
        (80 * 10**9, "bytes", "80GB"),
        (50e9, "bytes/s", "50GB/s"),
        (5e-6, "seconds", "5us"),
        (989e12, "flops/s", "989TFLOPS"),
        (700, "watts", "700W"),
    ],
)
def test_rendered_text_is_what_people_write(number: float, dimension: str, text: str) -> None:
    assert render(number, dimension) == text


@table(
    ("text", "readable"),
    [
        (readable_bytes(0), "0 B"),
        (readable_bytes(1023), "1,023 B"),
        (readable_bytes(80 * 2**30), "80.0 GiB"),
        (readable_bytes(5 * 2**50), "5.00 PiB"),
        (readable_seconds(0), "0 s"),
        (readable_seconds(2.5e-9), "2.50 ns"),
        (readable_seconds(0.25), "250 ms"),
        (readable_seconds(3600), "1.00 h"),
        (readable_seconds(86400 * 30), "30.0 days"),
        (readable_rate(450e9), "450 GB/s"),
        (readable_rate(12), "12 B/s"),
        (readable_count(70.55e9), "70.5B"),
        (readable_count(7), "7"),
    ],
)
def test_what_a_table_shows(text: str, readable: str) -> None:
    assert text == readable
