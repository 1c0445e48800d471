"""`shardwise verify`: a layout against the single process, in numbers."""

from __future__ import annotations

from shardwise.api.verification import PROCESSES, STEPS, TOLERANCE, verify
from shardwise.cli.arguments import add_job_arguments, job_from, keywords, require_torch
from shardwise.cli.on_target import add_run_device_argument, add_target_argument, run_on_target, target_of_verb
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.report.measured import verification_progress
from shardwise.run.environment import started

_EXAMPLE = """
shardwise verify --model tiny --cluster laptop:4 --tp 2 --pp 2 --global-batch 8 --seq 64
"""


def run(arguments: list[str]) -> int:
    parser = Parser(
        "verify",
        "Runs a layout and the single process side by side in fp32: loss, every gradient, every weight after 3 steps.",
        _EXAMPLE,
        "--model --cluster --tp --pp --cp --zero --global-batch --seq --steps --on",
    )
    add_job_arguments(parser)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps to train; with AdamW (default {STEPS})")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest relative deviation (default 1e-5)")
    fewer = f"reduce a larger layout to the smallest of its kind (default {PROCESSES})"
    parser.add_argument("--max-processes", type=int, default=PROCESSES, metavar="N", help=fewer)
    parser.add_argument("--shrink", action="store_true", help="fewer layers and smaller widths, the same kind of model")
    add_run_device_argument(parser.add_argument_group("where it runs"), " (default cpu; with --on the job's)")
    add_target_argument(parser)
    parser.add_argument("--seed", type=int, default=0, help="random seed; of weights and tokens (default 0)")
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    here = started()
    target = target_of_verb(parsed.on, here)
    job = job_from(parsed, runs_here=True)
    require_torch("verify")
    if target is not None:
        return run_on_target(target, job, "verify", arguments, parsed.run_device or job.run_device)
    with verification_progress(parsed.steps, shown=not parsed.json and here is None) as watch:
        result = verify(job, **keywords(verify, parsed), watch=watch)
    if here is not None and here.rank:
        return 0 if result.ok else 1
    show(parsed, lambda: result.page, result.to_dict)
    return 0 if result.ok else 1
