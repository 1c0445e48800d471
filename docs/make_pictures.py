"""Draws docs/pictures: the loop of the project and what `analyze` says about one example, to scale; memory over time.

Run `python docs/make_pictures.py` after a change of prices; `--check` only says whether they are of today's. The
figures are those of the example's own analysis.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from shardwise.cost.analysis import Analysis, analyze
from shardwise.cost.memory.timeline import memory_over_time
from shardwise.interop.jobs import read_job
from shardwise.report.memory_timeline import memory_picture
from shardwise.spec.units import readable_bytes, readable_seconds

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/llama3-70b-dgx-h100.yaml"
WIDTH, HEIGHT = 1000, 470

INK, SOFT, LINE, PAPER = "#1f2430", "#5b6472", "#c9ced6", "#ffffff"
DONE = "#2f6fde"
COLOURS = ("#2f6fde", "#e2853d", "#8fb5f3", "#d9b03f", "#5fa777", "#7f8794")


class Canvas:
    """Collects SVG elements."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", r: int = 0) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{r}" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
        )

    def text(
        self, x: float, y: float, what: str, size: int = 14, fill: str = INK, anchor: str = "start", weight: int = 400
    ) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(what)}</text>'
        )

    def arrow(self, path: str) -> None:
        self.parts.append(f'<path d="{path}" fill="none" stroke="{SOFT}" stroke-width="1.8" marker-end="url(#head)"/>')

    def svg(self, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'font-family="Helvetica, Arial, sans-serif" role="img"><title>{escape(title)}</title>'
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{SOFT}"/></marker></defs>'
        )
        return (
            head
            + f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}"/>'
            + "".join(self.parts)
            + "</svg>\n"
        )


def draw_loop(canvas: Canvas) -> None:
    """plan → train → measure and back, each with the verbs of the command line that do it."""
    steps = (
        ("plan", "price every split", ("plan", "analyze", "explain")),
        ("train", "run exactly that split", ("train", "verify", "dryrun")),
        ("measure", "predicted against actual", ("compare", "calibrate", "bench")),
    )
    width, top, height = 236.0, 62.0, 92.0
    lefts = [40.0, 382.0, 724.0]
    canvas.text(40, 36, "The loop: what is planned is what runs, and what ran corrects the plan", 17, weight=600)
    for left, (step, what, verbs) in zip(lefts, steps, strict=True):
        canvas.box(left, top, width, height, PAPER, DONE, r=8)
        canvas.box(left, top, 6, height, DONE)
        canvas.text(left + 22, top + 31, step, 19, weight=600)
        canvas.text(left + 22, top + 53, what, 14, SOFT)
        canvas.text(left + 22, top + 76, " · ".join(verbs), 12, DONE, weight=600)
    for start, label in ((lefts[0] + width, "job.yaml"), (lefts[1] + width, "run/")):
        canvas.arrow(f"M{start + 8} {top + 46}H{start + 98}")
        canvas.text(start + 52, top + 36, label, 13, SOFT, "middle")
    middle, low = width / 2, top + height + 34
    canvas.arrow(f"M{lefts[2] + middle} {top + height + 4}V{low}H{lefts[0] + middle}V{top + height + 6}")
    canvas.text(500, low - 9, "calibrated cluster.yaml", 13, SOFT, "middle")


def stacked(canvas: Canvas, top: float, title: str, parts: list[tuple[str, float, str]], whole: float) -> None:
    """A bar to scale with a legend: (name, amount, shown); the rest of ``whole`` stays open."""
    left, width, height = 40.0, 920.0, 30.0
    canvas.text(left, top, title, 15, weight=600)
    bar = top + 12
    canvas.box(left, bar, width, height, "#f2f4f7", LINE)
    x = left
    for (_, amount, _), colour in zip(parts, COLOURS, strict=False):
        canvas.box(x, bar, width * amount / whole, height, colour)
        x += width * amount / whole
    x = left
    for (name, _, shown), colour in zip(parts, COLOURS, strict=False):
        canvas.box(x, bar + height + 14, 12, 12, colour)
        label = f"{name} {shown}"
        canvas.text(x + 18, bar + height + 25, label, 13, SOFT)
        x += 38 + 6.6 * len(label)


def largest_first(named: dict[str, float], keep: int) -> list[tuple[str, float]]:
    """The ``keep`` largest in order of size, the others together as "other"."""
    ordered = sorted(((name, amount) for name, amount in named.items() if amount > 0), key=lambda item: -item[1])
    rest = sum(amount for _, amount in ordered[keep:])
    return [*ordered[:keep], *([("other", rest)] if rest else [])]


_PART_NAMES = {
    **{name: name for name in ("attention", "recompute", "optimizer")},
    "products": "matmuls",
    "memory-bound": "memory-bound",
    "launches": "launches",
    "bubble": "pipeline bubble",
    "overhead": "fixed cost",
}


def draw_analysis(canvas: Canvas, analysis: Analysis) -> None:
    memory = analysis.memory
    names = {"optimizer": "optimizer", "allowance": "framework"}
    held = {names.get(part, part): float(getattr(memory, part)) for part in memory.PARTS}
    parts = [(name, amount, readable_bytes(amount)) for name, amount in largest_first(held, 5)]
    canvas.text(40, 240, f"shardwise analyze {EXAMPLE}", 14, SOFT)
    usable = analysis.room.usable_bytes
    title = f"Memory of the fullest device: {readable_bytes(memory.total)} of {readable_bytes(usable)}"
    stacked(canvas, 274, title, parts, usable)
    spent = {_PART_NAMES.get(name, f"exposed {name}"): seconds for name, seconds in analysis.parts.items()}
    times = [(name, seconds, readable_seconds(seconds)) for name, seconds in largest_first(spent, 5)]
    step = readable_seconds(analysis.predicted_seconds)
    title = f"One step is predicted to take {step}; model FLOPs utilisation {analysis.mfu:.0%}"
    stacked(canvas, 380, title, times, analysis.predicted_seconds)


def pictures() -> dict[Path, str]:
    """Every picture by its file."""
    canvas, job = Canvas(), read_job(ROOT / EXAMPLE)
    draw_loop(canvas)
    draw_analysis(canvas, analyze(job))
    folder = ROOT / "docs" / "pictures"
    return {
        folder / "loop.svg": canvas.svg("plan, train, measure; and one analysis to scale"),
        folder / "memory.svg": memory_picture(memory_over_time(job)),
    }


def main(arguments: Sequence[str]) -> int:
    stale = [path for path, text in pictures().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'out of date' if '--check' in arguments else 'wrote'}: {path.relative_to(ROOT)}")
        if "--check" not in arguments:
            path.write_text(pictures()[path], encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
