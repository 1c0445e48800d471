"""`shardwise dryrun`: the engine on one rank of a world of any size, against the plan."""

from __future__ import annotations

from shardwise.api.quantities import whole_number
from shardwise.cli.arguments import add_job_arguments, job_from
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.engine.refuse import require_runs
from shardwise.measure.dryrun.result import check_rank, fullest_rank, require_equal_stages, resized
from shardwise.report.console import versioned
from shardwise.report.measured import dry_run_data, dry_run_page
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.installation import require_packages
from shardwise.spec.units import parse

MOST_SKEW = 1000
_EXAMPLE = """
shardwise dryrun --model tiny --cluster dgx-h100:2 --tp 2 --zero 1 --global-batch 16 --seq 256
shardwise dryrun --model llama3-8b --cluster dgx-h100:128 --tp 8 --zero 1 --seq 8192
"""


def run(arguments: list[str]) -> int:
    parser = Parser(
        "dryrun",
        "Traces a training step of the real engine on one rank, without the other ranks and without values: memory, "
        "every collective, FLOPs. A difference of more than 2% from the planner's figures is a defect. The exit "
        "status is 1 if the rank does not fit its device.",
        _EXAMPLE,
        "--model --cluster --gpus --tp --pp --zero --global-batch --seq --world --rank",
    )
    add_job_arguments(parser)
    parser.add_argument("--world", metavar="N", help="number of ranks: data parallelism is resized to it")
    parser.add_argument("--rank", metavar="R", help="the rank to trace (default: the one that needs most memory)")
    parser.add_argument("--skew", metavar="X", help="load of this rank's experts, relative to the mean (default 1)")
    parser.add_argument("--full", action="store_true", help="trace every layer and microbatch instead of a few")
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    job = job_from(parsed, runs_here=True)
    require_runs(job)
    require_equal_stages(job)
    if parsed.world is not None:
        job = resized(job, whole_number(parsed.world, "--world"))
    rank = fullest_rank(job) if parsed.rank is None else check_rank(job, _rank(parsed.rank))
    skew = 1.0 if parsed.skew is None else _skew(parsed.skew)
    require_packages("dryrun", "torch")
    from shardwise.measure.dryrun.run import dry_run

    result = dry_run(job, rank=rank, skew=skew, full=parsed.full)
    show(parsed, lambda: dry_run_page(result), lambda: versioned("dryrun", dry_run_data(result)))
    return 0 if result.fits else 1


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise SpecError("--rank", f"{shown(text)} is not a whole number", "count from 0")
    return int(text)


def _skew(text: str) -> float:
    number = float(parse(text, "count", "--skew"))
    if not 0 < number <= MOST_SKEW:
        raise SpecError("--skew", f"{shown(text)} is not between 0 and {MOST_SKEW}", "1 is an even load")
    return number
