"""A number of an explanation with what it counts: text for people, a plain number for machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shardwise.spec.units import readable_bytes, readable_flops, readable_rate, readable_seconds, readable_share


def _plain_number(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:g}"


_TEXTS: dict[str, Callable[[float], str]] = {
    "number": _plain_number,
    "seconds": readable_seconds,
    "bytes": readable_bytes,
    "bytes_per_second": readable_rate,
    "flops": readable_flops,
    "flops_per_second": lambda number: f"{readable_flops(number)}/s",
    "share": readable_share,
}


@dataclass(frozen=True)
class Quantity:
    """``unit`` is the key of the number in the JSON; ``shown`` replaces the usual text of that unit."""

    value: float
    unit: str = "number"
    shown: str = ""

    @property
    def text(self) -> str:
        return self.shown or _TEXTS[self.unit](self.value)

    @property
    def data(self) -> int | float:
        value = float(self.value)
        return int(value) if value.is_integer() else value


seconds = partial(Quantity, unit="seconds")
size = partial(Quantity, unit="bytes")
rate = partial(Quantity, unit="bytes_per_second")
flops = partial(Quantity, unit="flops")
flop_rate = partial(Quantity, unit="flops_per_second")
share = partial(Quantity, unit="share")


def number(value: float, shown: str = "") -> Quantity:
    return Quantity(value, "number", shown)
