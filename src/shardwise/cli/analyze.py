"""`shardwise analyze`: price one job."""

from __future__ import annotations

import json
import sys

from shardwise.cli.arguments import Parser, add_job_arguments
from shardwise.cli.campaign import add_campaign_arguments, campaign_from
from shardwise.cli.inputs import job_from
from shardwise.cli.over_time import add_over_time_arguments, write_over_time
from shardwise.cost.analysis import analyze
from shardwise.planner.assessment import assess
from shardwise.spec.errors import SpecError

_MOST_RANKS = 100_000

_EXAMPLE = """
shardwise analyze --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --dp 16 --zero 1 --global-batch 1024 --seq 8192
"""


def run(arguments: list[str]) -> int:
    parser = Parser(
        "analyze",
        "Prices one job: communication, memory, FLOPs, what bounds it. The exit status is 1 where it does not fit.",
        _EXAMPLE,
    )
    add_job_arguments(parser)
    add_campaign_arguments(parser)
    add_over_time_arguments(parser)
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.add_argument("--scaling", action="store_true", help="strong and weak scaling tables")
    parser.add_argument("--ranks", action="store_true", help="node, local rank and groups of every rank")
    parsed = parser.parse(arguments)
    job = job_from(parsed)
    if parsed.ranks and job.cluster.devices > _MOST_RANKS:
        raise SpecError("--ranks", f"{job.cluster.devices:,} rows are more than {_MOST_RANKS:,}", "leave it out")
    analysis = analyze(job)
    campaign = campaign_from(parsed, job, analysis.predicted_seconds)
    written = write_over_time(parsed, job)
    found = assess(
        analysis, campaign=campaign, scaling=parsed.scaling, ranks=parsed.ranks, over_time=parsed.memory_over_time
    )
    if parsed.json:
        from shardwise.report.analysis_json import analysis_data

        print(json.dumps(analysis_data(found), indent=2))
    else:
        from shardwise.report.analysis_text import analysis_page

        analysis_page(found).print()
    for line in written:
        print(line, file=sys.stderr if parsed.json else sys.stdout)
    return 0 if analysis.fits else 1
