"""Time against size of measured collectives, both on logarithmic scales, with the model's line through the points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from shardwise.spec.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from shardwise.measure.collectives.request import Measured

_INK, _SOFT, _LINE, _PAPER = "#1f2430", "#5b6472", "#dde1e7", "#ffffff"
_COLOURS = ("#2f6fde", "#e2853d", "#5fa777", "#8c6bb8", "#c23b3b", "#d9b03f", "#1f4fa8", "#aab2bf")
_WIDTH, _LEFT, _RIGHT = 1000, 84, 250
_TOP, _PANEL, _ROW = 60, 260, 340


def collectives_picture(measured: Sequence[Measured]) -> str:
    """A panel for every collective and level, as the text of an SVG file."""
    panels = [
        (f"{kind.replace('_', '-')} over {level}", list(some))
        for (level, kind), some in groupby(measured, key=lambda one: (one.level, one.kind))
    ]
    height = _TOP + _ROW * len(panels)
    parts = [_text(24, 34, "Collectives: time against size (points measured, lines by the model)", 17, weight=600)]
    for index, (title, some) in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT} {_TOP + index * _ROW + 30})">')
        parts += [_text(0, -10, title, 13, weight=600), *_Panel(some).drawn(), "</g>"]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img"><title>Collectives, time against size</title>'
        f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="{_PAPER}"/>' + "\n".join(parts) + "</svg>\n"
    )


class _Panel:
    def __init__(self, measured: list[Measured]) -> None:
        self.measured = measured
        times = [one.median_seconds for one in measured]
        times += [one.predicted_seconds for one in measured if one.predicted_seconds]
        self.sizes = _bounds([one.size_bytes for one in measured])
        self.times = _bounds(times)
        self.width = _WIDTH - _LEFT - _RIGHT

    def x(self, size: float) -> float:
        low, high = self.sizes
        return self.width * (math.log10(size) - low) / (high - low)

    def y(self, seconds: float) -> float:
        low, high = self.times
        return _PANEL * (1 - (math.log10(seconds) - low) / (high - low))

    def drawn(self) -> Iterator[str]:
        yield from self._axes()
        names = list(dict.fromkeys(one.algorithm for one in self.measured))
        for index, name in enumerate(names):
            colour = _COLOURS[index % len(_COLOURS)]
            some = sorted((one for one in self.measured if one.algorithm == name), key=lambda one: one.size_bytes)
            modelled = [(one.size_bytes, one.predicted_seconds) for one in some if one.predicted_seconds]
            line = " ".join(f"{self.x(size):.1f},{self.y(seconds):.1f}" for size, seconds in modelled)
            yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="0.7"/>'
            for one in some:
                at = f'cx="{self.x(one.size_bytes):.1f}" cy="{self.y(one.median_seconds):.1f}"'
                yield f'<circle {at} r="3.5" fill="{colour}"/>'
            yield f'<circle cx="{self.width + 24}" cy="{10 + 20 * index}" r="4" fill="{colour}"/>'
            yield _text(self.width + 36, 14 + 20 * index, name, 12)

    def _axes(self) -> Iterator[str]:
        yield f'<rect width="{self.width}" height="{_PANEL}" fill="none" stroke="{_LINE}"/>'
        for power in range(math.ceil(self.times[0]), math.floor(self.times[1]) + 1):
            y = self.y(10.0**power)
            yield f'<line x1="0" x2="{self.width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_LINE}"/>'
            yield _text(-8, y + 4, readable_seconds(10.0**power), 11, anchor="end", fill=_SOFT)
        low, high = (round(bound / math.log10(2)) for bound in self.sizes)
        for power in range(low, high + 1, max(1, (high - low) // 7)):
            yield _text(self.x(2.0**power), _PANEL + 18, readable_bytes(2**power), 11, anchor="middle", fill=_SOFT)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(max(min(values), 1e-9)), math.log10(max(*values, 1e-9))
    return low - 0.05, max(high, low + 0.5) + 0.05


def _text(
    x: float, y: float, text: str, size: int, *, weight: int = 400, anchor: str = "start", fill: str = _INK
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f"<text {place}>{escape(text)}</text>"
