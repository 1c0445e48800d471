"""`shardwise dryrun`: the engine on one rank of a world of any size, against the plan."""

from __future__ import annotations

import json
from collections.abc import Callable

from shardwise.cli.arguments import Parser, add_job_arguments
from shardwise.cli.inputs import job_from, whole
from shardwise.engine.refuse import require_runs
from shardwise.measure.dryrun.result import DryRun, check_rank, fullest_rank, resized
from shardwise.spec.errors import SpecError, shown
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
        "every collective, arithmetic. What differs from the planner's figures by more than 2% is a defect. The exit "
        "status is 1 where the rank does not fit its device.",
        _EXAMPLE,
    )
    add_job_arguments(parser)
    parser.add_argument("--world", metavar="N", help="ranks of the job: data parallelism is resized to it")
    parser.add_argument("--rank", metavar="R", help="the rank to trace (default: the one with most memory)")
    parser.add_argument("--skew", metavar="X", help="how many times more tokens this rank's experts get (default 1)")
    parser.add_argument("--full", action="store_true", help="trace every layer and microbatch instead of a few")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    job = job_from(parsed, runs_here=True)
    require_runs(job)
    if parsed.world is not None:
        job = resized(job, whole(parsed.world, "--world"))
    rank = fullest_rank(job) if parsed.rank is None else check_rank(job, _rank(parsed.rank))
    skew = 1.0 if parsed.skew is None else _skew(parsed.skew)
    found = _dry_run()(job, rank=rank, skew=skew, full=parsed.full)
    if parsed.json:
        from shardwise.report.dryrun import dry_run_data

        print(json.dumps(dry_run_data(found), indent=2))
    else:
        from shardwise.report.dryrun import print_dry_run

        print_dry_run(found)
    return 0 if found.fits else 1


def _dry_run() -> Callable[..., DryRun]:
    try:
        from shardwise.measure.dryrun.run import dry_run
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise SpecError("", "a dry run needs PyTorch", "install it: pip install 'shardwise[train]'") from None
    return dry_run


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise SpecError("--rank", f"{shown(text)} is not a whole number", "count from 0")
    return int(text)


def _skew(text: str) -> float:
    number = float(parse(text, "count", "--skew"))
    if not 0 < number <= MOST_SKEW:
        raise SpecError("--skew", f"{shown(text)} is not between 0 and {MOST_SKEW}", "1 is an even load")
    return number
