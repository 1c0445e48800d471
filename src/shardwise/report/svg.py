"""SVG pictures on paper of their own: the document, its text, the colours of axes and captions."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, SOFT, LINE, PAPER = "#1f2430", "#5b6472", "#dde1e7", "#ffffff"


def document(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img"><title>{title}</title>'
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>' + "\n".join(parts) + "</svg>\n"
    )


def text(x: float, y: float, what: str, size: int, weight: int = 400, fill: str = INK, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(what)}</text>'
    )
