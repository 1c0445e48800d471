"""Quantities as people write them ("80GiB", "400Gb/s", "5us") and as the system uses them.

Inside, every quantity is a plain number of bytes, seconds, bytes per second or FLOP per second. Strings
with units exist only at the border: ``parse`` reads them, ``render`` writes one that reads back to
exactly the same number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from shardwise.spec.errors import SpecError, shown

Number = int | float

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def _prefixed(unit: str, scale: float = 1, binary: bool = False) -> dict[str, float]:
    prefixes = {**_DECIMAL, **_BINARY} if binary else _DECIMAL
    return {prefix + unit: factor * scale for prefix, factor in prefixes.items()}


class _Dimension(NamedTuple):
    units: dict[str, float]  # in units of the number used inside; a capital B is a byte, a small b a bit
    example: str
    rendered: tuple[str, ...] = ()  # units that `render` tries, largest first: people read "80GiB", not 85899345920


_BITS = {**_prefixed("bit/s", 1 / 8), **_prefixed("b/s", 1 / 8), **_prefixed("bps", 1 / 8)}
_DIMENSIONS = {
    "bytes": _Dimension(
        _prefixed("B", binary=True), "80GiB or 640MB", ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB")
    ),
    "seconds": _Dimension(
        {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400},
        "5us or 2ms",
        ("s", "ms", "us", "ns"),
    ),
    "bytes/s": _Dimension(
        {**_prefixed("B/s", binary=True), **_BITS}, "450GB/s or 400Gb/s", ("TB/s", "GB/s", "MB/s", "kB/s")
    ),
    "flops/s": _Dimension(
        {**_prefixed("FLOPS"), **_prefixed("FLOP/s"), **_prefixed("OPS"), **_prefixed("OP/s")},
        "989TFLOPS",
        ("PFLOPS", "TFLOPS", "GFLOPS", "MFLOPS"),
    ),
    "count": _Dimension(
        {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}, "70e9 or 70B"
    ),
    "watts": _Dimension({"W": 1, "kW": 1e3}, "700W", ("W",)),
    "share": _Dimension({"%": 0.01}, "0.5 or 50%"),
}
# Beyond these no quantity means anything, and products of a few would leave what a float can hold.
_LEAST, _MOST = 1e-30, 1e30
_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ%/]*)\s*")


def parse(text: object, dimension: str, field: str = "") -> Number:
    """The number behind ``text``, in bytes, seconds, bytes/s, FLOP/s, ...; numbers pass unchanged."""
    units, remedy = _DIMENSIONS[dimension].units, f"write it like {_DIMENSIONS[dimension].example}"
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    number: Number
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number = text
    elif match is None:
        raise SpecError(field, f"{shown(text)} is not a quantity", remedy)
    else:
        digits, unit = match.groups()
        factor = 1 if unit == "" else units.get(unit)
        if factor is None:
            known = ", ".join(u for u in units if u)
            raise SpecError(field, f"{shown(text)} has the unknown unit {unit!r}", f"use one of {known}")
        number = _scaled(digits.replace("_", ""), factor)
    if not abs(number) < math.inf:  # holds for a whole number too large for a float, too
        raise SpecError(field, f"{shown(text)} is not a finite number", remedy)
    if number and not _LEAST <= abs(number) <= _MOST:
        raise SpecError(field, f"{shown(text)} is out of range", remedy)
    return number


def _scaled(digits: str, factor: float) -> Number:
    """digits × factor, exact whenever the result is a whole number."""
    value = float(digits)
    if not math.isfinite(value):
        return value
    if factor < 1:
        # Dividing by the exact inverse rounds once; multiplying by 1e-6 would round twice.
        return value / round(1 / factor)
    if re.fullmatch(r"[+-]?\d+", digits):
        return int(digits) * int(factor)
    product = value * factor
    return int(product) if product.is_integer() and abs(product) < 2**53 else product


def render(number: Number, dimension: str) -> Number | str:
    """Text with a unit that parses back to exactly ``number``; the bare number where none is short."""
    if number == 0 or not math.isfinite(number):
        return number
    for unit in _DIMENSIONS[dimension].rendered:
        factor = _DIMENSIONS[dimension].units[unit]
        scaled = number * round(1 / factor) if factor < 1 else number / factor
        if not 1 <= abs(scaled) < 10_000:
            continue
        text = f"{scaled:.6g}{unit}"
        if "e" not in text and parse(text, dimension) == number:
            return text
    return number


# -- for people: three digits and the largest unit that leaves at least one before the point ------------------

_MINUTE, _HOUR, _DAY, _YEAR = 60.0, 3600.0, 86400.0, 86400 * 365.25
# Each with the first number of seconds that is written in it: a step of 262 s is compared with one of 259 s.
_TIMES = ((1e-9, " ns", 0.0), (1e-6, " µs", 1e-6), (1e-3, " ms", 1e-3), (1.0, " s", 1.0), (_MINUTE, " min", 600.0),
          (_HOUR, " h", _HOUR), (_DAY, " days", 2 * _DAY), (_YEAR, " years", 2 * _YEAR))  # fmt: skip


def readable_seconds(number: float) -> str:
    """A time for a table, from nanoseconds to years: three digits and one unit, so that two can be compared."""
    if _is_odd(number):
        return _odd(number)
    sign, magnitude = _sign(number), abs(number)
    for (factor, unit, _), (_, _, above) in zip(_TIMES, (*_TIMES[1:], (0.0, "", math.inf))):
        if magnitude >= above:  # rounding does not bring it back below
            continue
        text = _three_digits(magnitude / factor)
        if _value(text) * factor < above * (1 - 1e-12):
            return f"{sign}{text}{unit}" if _value(text) else "0 s"
    raise AssertionError("the last unit has no end")


def readable_duration(number: float) -> str:
    """How long something takes, as people say it: "4 min 22 s", "2 h 5 min", "3 days 4 h"."""
    if _is_odd(number):
        return _odd(number)
    sign, magnitude = _sign(number), abs(float(number))
    if round(magnitude) < _MINUTE:
        return f"{sign}{magnitude:.0f} s" if magnitude.is_integer() else readable_seconds(number)
    for large, small, below in (
        (("min", _MINUTE), ("s", 1.0), _HOUR),
        (("h", _HOUR), ("min", _MINUTE), _DAY),
        (("day", _DAY), ("h", _HOUR), 10 * _DAY),
    ):
        steps = round(magnitude / small[1])
        if steps * small[1] < below:
            many, rest = divmod(steps, round(large[1] / small[1]))
            first = counted(many, "day") if large[0] == "day" else f"{many} {large[0]}"
            return sign + first + (f" {rest} {small[0]}" if rest else "")
    return readable_seconds(number)


def readable_count(number: float) -> str:
    """A large count in thousands, millions, billions or trillions, three significant digits."""
    return _scaled_text(_scale("", "k M B T"), number, whole=float(number).is_integer())


def readable_share(number: float, digits: int = 1) -> str:
    return _odd(number) if _is_odd(number) else _without_minus_zero(f"{number:.{digits}%}")


def readable_change(number: float, digits: int = 1) -> str:
    """A share by which something grows or shrinks, with its sign."""
    text = readable_share(number, digits)
    return f"+{text}" if number > 0 and any(digit in "123456789" for digit in text) else text


def readable_difference(seconds: float) -> str:
    """A time by which something takes longer or shorter, with its sign."""
    text = readable_seconds(seconds)
    return f"+{text}" if seconds > 0 and text != "0 s" else text


def readable_money(amount: float, currency: str) -> str:
    """An amount with its currency: "$2.50", "€1.23M"."""
    if _is_odd(amount):
        return _odd(amount)
    small = _without_minus_zero(f"{amount:.2f}")
    text = small if _value(small.lstrip("-")) < 1000 else readable_count(amount)
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    return f"{sign}{currency}{digits}"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 document", "2,000 documents", "2 batches", "3 strategies"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and not noun.endswith("ay"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch', 'x')) else 's'}"


_Scale = tuple[tuple[float, str], ...]  # factors and their units, ascending


@cache
def _scale(unit: str, prefixes: str = "k M G T P", base: float = 1000.0) -> _Scale:
    return tuple(
        (base**power, f" {prefix}{unit}" if unit else prefix) for power, prefix in enumerate(["", *prefixes.split()])
    )


def _scaled_text(units: _Scale, number: float, *, whole: bool = True) -> str:
    """In the largest unit in which the rounded text is at least 1; ``whole`` numbers have no point in the smallest."""
    if _is_odd(number):
        return _odd(number)
    sign, magnitude = _sign(number), abs(number)
    for (factor, unit), (above, _) in zip(units, (*units[1:], (math.inf, ""))):
        if magnitude >= above:  # rounding does not bring it back below
            continue
        text = f"{magnitude:,.0f}" if whole and factor == 1 else _three_digits(magnitude / factor)
        if _value(text) * factor < above:
            return f"{sign}{text}{unit}" if _value(text) else f"0{units[0][1]}"
    raise AssertionError("the last unit has no end")


readable_bytes: Callable[[float], str] = partial(_scaled_text, _scale("B", "Ki Mi Gi Ti Pi Ei", 1024.0))
readable_decimal_bytes: Callable[[float], str] = partial(_scaled_text, _scale("B"))  # as papers and vendors count
readable_rate: Callable[[float], str] = partial(_scaled_text, _scale("B/s"))  # bytes per second, as links are sold
readable_flops: Callable[[float], str] = partial(_scaled_text, _scale("FLOP", "k M G T P E Z Y"))


def _three_digits(magnitude: float) -> str:
    """Three significant digits from 1 on; two behind the point below."""
    for digits in (2, 1):
        text = f"{magnitude:.{digits}f}"
        if float(text) < 10 ** (3 - digits):
            return text
    return f"{magnitude:,.0f}"


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _sign(number: float) -> str:
    return "-" if number < 0 else ""


def _is_odd(number: float) -> bool:
    return not abs(number) < math.inf


def _odd(number: float) -> str:
    return "–" if number != number else f"{_sign(number)}∞"


def _without_minus_zero(text: str) -> str:
    return text if any(digit in "123456789" for digit in text) else text.removeprefix("-")
