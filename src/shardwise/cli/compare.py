"""`shardwise compare`: a profiled run against its prediction, part by part, with likely causes."""

from __future__ import annotations

from shardwise.api.observation import TRACE, compare
from shardwise.cli.arguments import require_torch
from shardwise.cli.output import add_output_arguments, add_plot_argument, show
from shardwise.cli.parser import Parser

_EXAMPLE = """
shardwise compare runs/last
"""


def run(arguments: list[str]) -> int:
    parser = Parser(
        "compare",
        "Where the time of a run's profiled steps went beside what was predicted: compute, communication of each "
        "dimension, bubble, data, optimizer, checkpoint; memory; the largest differences first with their likely "
        "cause; slow ranks and links by name. Profile a run by `shardwise train --profile steps=10:12`.",
        _EXAMPLE,
    )
    parser.add_argument("run", help="the run's folder; runs/last is the newest")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help=f"trace to write, for ui.perfetto.dev; both timelines (default: RUN/profile/{TRACE})",
    )
    add_plot_argument(add_output_arguments(parser))
    parsed = parser.parse(arguments)
    require_torch("compare")
    result = compare(parsed.run, trace=parsed.trace)
    show(parsed, lambda: result.plots if parsed.plot else result.page, result.to_dict)
    return 0
