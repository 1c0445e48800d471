"""`shardwise report`: a job or a run as one HTML file."""

from __future__ import annotations

from shardwise.api.reporting import write_report
from shardwise.cli.arguments import add_campaign_arguments, add_job_arguments, job_arguments, keywords
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.report.progress import status

_EXAMPLE = """
shardwise report job.yaml -o report.html --tokens 15T --price 2.5/h
shardwise report runs/last
"""


def run(arguments: list[str]) -> int:
    parser = Parser(
        "report",
        "Writes one HTML file that needs nothing else, with a table under every picture: the verdict, the mesh over "
        "nodes, the step and its pipeline, memory of every rank and over time, communication, roofline, other "
        "strategies, scaling, cost and days. Of a run's folder also loss, throughput, and predicted beside measured. "
        "The exit status is 1 if the job does not fit.",
        _EXAMPLE,
        "--model --cluster --gpus --tp --pp --dp --zero --global-batch --seq --out",
    )
    add_job_arguments(parser, "job file (YAML), which flags override; or the folder of a run: runs/last is the newest")
    add_campaign_arguments(parser)
    out = "where to write the output; one HTML file (default report.html)"
    parser.add_argument("-o", "--out", default="report.html", metavar="FILE", help=out)
    parser.add_argument("--no-search", dest="search", action="store_false", help="do not search for other strategies")
    parser.add_argument("--time-limit", metavar="10min", help="time limit; of that search, in CPU time (default 1min)")
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    with status("reading", quiet=parsed.json) as on_progress:
        result = write_report(job_arguments(parsed), **keywords(write_report, parsed), on_progress=on_progress)
    show(parsed, lambda: result.page, result.to_dict)
    return 0 if result.assessment.analysis.fits else 1
