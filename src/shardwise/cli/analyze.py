"""`shardwise analyze`: price one job."""

from __future__ import annotations

import sys

from shardwise.api.analysis import analyze
from shardwise.cli.arguments import Parser, add_campaign_arguments, add_job_arguments, campaign_keywords
from shardwise.cli.inputs import job_from
from shardwise.cli.output import add_output_arguments, form_of, show
from shardwise.cli.over_time import add_over_time_arguments, check_over_time, write_over_time

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
    add_output_arguments(parser)
    parser.add_argument("--scaling", action="store_true", help="strong and weak scaling tables")
    parser.add_argument("--ranks", action="store_true", help="node, local rank and groups of every rank")
    parsed = parser.parse(arguments)
    job = job_from(parsed)
    check_over_time(parsed, job)
    found = analyze(
        job,
        scaling=parsed.scaling,
        ranks=parsed.ranks,
        memory_over_time=parsed.memory_over_time,
        **campaign_keywords(parsed),
    )
    written = write_over_time(parsed, job)
    show(parsed, lambda: found.page, found.to_dict)
    for line in written:
        print(line, file=sys.stdout if form_of(parsed) == "text" and not parsed.json else sys.stderr)
    return 0 if found.fits else 1
