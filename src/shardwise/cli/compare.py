"""`shardwise compare`: a profiled run against its prediction, part by part, with likely causes."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.cli.arguments import Parser
from shardwise.cli.inputs import require_torch
from shardwise.spec.errors import SpecError

_EXAMPLE = """
shardwise compare runs/last
"""
TRACE = "timeline.json"


def run(arguments: list[str]) -> int:
    parser = Parser(
        "compare",
        "Where the time of a run's profiled steps went beside what was predicted: compute, communication of each "
        "dimension, bubble, data, optimizer, checkpoint; memory; the largest differences first with their likely "
        "cause; slow ranks and links by name. Profile a run by `shardwise train --profile steps=10:12`.",
        _EXAMPLE,
    )
    parser.add_argument("run", help="the run's folder; runs/last is the newest")
    parser.add_argument("--trace", metavar="FILE", help=f"both timelines (default: RUN/profile/{TRACE})")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    require_torch("compare")
    from shardwise.measure.compare.comparison import compare
    from shardwise.measure.compare.run import profiled_run
    from shardwise.measure.compare.timeline import timeline
    from shardwise.report.compare import comparison_data, print_comparison

    profiled = profiled_run(parsed.run)
    found = compare(profiled)
    trace = profiled.folder.profile / TRACE if parsed.trace is None else Path(parsed.trace)
    try:
        trace.write_text(json.dumps(timeline(profiled.job, profiled.measured)), encoding="utf-8")
    except OSError as error:
        raise SpecError("--trace", f"{trace} cannot be written ({error.strerror})", "give another name") from None
    if parsed.json:
        print(json.dumps({**comparison_data(found), "trace": str(trace)}, indent=2))
    else:
        print_comparison(found, trace)
    return 0
