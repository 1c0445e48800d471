"""Quantities as people write them ("80GiB", "400Gb/s", "5us") and as the system uses them.

Inside, every quantity is a plain number of bytes, seconds, bytes per second or FLOP per second. Strings
with units exist only at the border: ``parse`` reads them, ``render`` writes one that reads back to
exactly the same number.
"""

from __future__ import annotations

import math
import re

from shardwise.spec.errors import SpecError, shown

Number = int | float

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def _prefixed(unit: str, scale: float = 1, binary: bool = False) -> dict[str, float]:
    prefixes = {**_DECIMAL, **_BINARY} if binary else _DECIMAL
    return {prefix + unit: factor * scale for prefix, factor in prefixes.items()}


# Every unit of a dimension, in units of the number used inside. A capital B is a byte, a small b a bit.
_UNITS: dict[str, dict[str, float]] = {
    "bytes": _prefixed("B", binary=True),
    "seconds": {
        "ns": 1e-9,
        "us": 1e-6,
        "µs": 1e-6,
        "ms": 1e-3,
        "s": 1,
        "min": 60,
        "h": 3600,
        "d": 86400,
    },
    "bytes/s": {
        **_prefixed("B/s", binary=True),
        **_prefixed("bit/s", 1 / 8),
        **_prefixed("b/s", 1 / 8),
        **_prefixed("bps", 1 / 8),
    },
    "flops/s": {**_prefixed("FLOPS"), **_prefixed("FLOP/s"), **_prefixed("OPS"), **_prefixed("OP/s")},
    "count": {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12},
    "watts": {"W": 1, "kW": 1e3},
    "share": {"%": 0.01},
}
_EXAMPLE = {
    "bytes": "80GiB or 640MB",
    "seconds": "5us or 2ms",
    "bytes/s": "450GB/s or 400Gb/s",
    "flops/s": "989TFLOPS",
    "count": "70e9 or 70B",
    "watts": "700W",
    "share": "0.5 or 50%",
}
# Units that `render` tries, largest first, so that people read "80GiB" and not 85899345920.
_RENDERED = {
    "bytes": ["TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB"],
    "seconds": ["s", "ms", "us", "ns"],
    "bytes/s": ["TB/s", "GB/s", "MB/s", "kB/s"],
    "flops/s": ["PFLOPS", "TFLOPS", "GFLOPS", "MFLOPS"],
    "count": [],
    "watts": ["W"],
    "share": [],
}
# Beyond these no quantity means anything, and products of a few would leave what a float can hold.
_LEAST, _MOST = 1e-30, 1e30
_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ%/]*)\s*")


def parse(text: object, dimension: str, field: str = "") -> Number:
    """The number behind ``text``, in bytes, seconds, bytes/s, FLOP/s, ...; numbers pass unchanged."""
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise SpecError(field, f"{shown(text)} is not a quantity", f"write it like {_EXAMPLE[dimension]}")
    number: Number
    if isinstance(text, str):
        match = _QUANTITY.fullmatch(text)
        if match is None:
            raise SpecError(field, f"{shown(text)} is not a quantity", f"write it like {_EXAMPLE[dimension]}")
        digits, unit = match.groups()
        factor = 1 if unit == "" else _UNITS[dimension].get(unit)
        if factor is None:
            known = ", ".join(u for u in _UNITS[dimension] if u)
            raise SpecError(field, f"{shown(text)} has the unknown unit {unit!r}", f"use one of {known}")
        number = _scaled(digits.replace("_", ""), factor)
    else:
        number = text
    if not abs(number) < math.inf:  # holds for a whole number too large for a float, too
        raise SpecError(field, f"{shown(text)} is not a finite number", f"write it like {_EXAMPLE[dimension]}")
    if number and not _LEAST <= abs(number) <= _MOST:
        raise SpecError(field, f"{shown(text)} is out of range", f"write it like {_EXAMPLE[dimension]}")
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
    for unit in _RENDERED[dimension]:
        factor = _UNITS[dimension][unit]
        scaled = number * round(1 / factor) if factor < 1 else number / factor
        if not 1 <= abs(scaled) < 10_000:
            continue
        text = f"{scaled:.6g}{unit}"
        if "e" not in text and parse(text, dimension) == number:
            return text
    return number


def readable_bytes(number: float) -> str:
    """Bytes for a table: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.{_digits_after_point(number)}f} {unit}"


def readable_seconds(number: float) -> str:
    """Seconds for a table, from nanoseconds to years."""
    if number == 0:
        return "0 s"
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1, 1e3, "ms"), (600, 1, "s")):
        if abs(number) < limit:
            scaled = number * factor
            return f"{scaled:.{_digits_after_point(scaled)}f} {unit}"
    for limit, divisor, unit in ((7200, 60, "min"), (172800, 3600, "h"), (86400 * 730, 86400, "days")):
        if abs(number) < limit:
            return f"{number / divisor:.1f} {unit}"
    return f"{number / (86400 * 365.25):,.1f} years"


def readable_rate(number: float) -> str:
    """Bytes per second for a table, in the decimal units links are sold in."""
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if abs(number) >= factor:
            return f"{number / factor:.{_digits_after_point(number / factor)}f} {unit}"
    return f"{number:.0f} B/s"


def readable_count(number: float) -> str:
    """A large count in thousands, millions, billions or trillions, three significant digits."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.{_digits_after_point(number / factor)}f}{unit}"
    return f"{number:.0f}"


def readable_flops(number: float) -> str:
    """FLOPs for a table, in the largest prefix below the number."""
    for factor, unit in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(number) >= factor:
            return f"{number / factor:.{_digits_after_point(number / factor)}f} {unit}FLOP"
    return f"{number:.0f} FLOP"


def _digits_after_point(number: float) -> int:
    magnitude = abs(number)
    return 2 if magnitude < 10 else 1 if magnitude < 100 else 0
