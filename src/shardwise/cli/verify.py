"""`shardwise verify`: a layout against the single process, in numbers."""

from __future__ import annotations

import json

from shardwise.cli.arguments import Parser, add_job_arguments
from shardwise.cli.inputs import job_from, require_torch
from shardwise.spec.errors import SpecError

_EXAMPLE = """
shardwise verify --model tiny --cluster laptop:4 --tp 2 --pp 2 --global-batch 8 --seq 64
"""
STEPS, PROCESSES = 3, 8
LARGEST_SEED = 10**12  # data draws from a million times as much, in 64 bits


def run(arguments: list[str]) -> int:
    parser = Parser(
        "verify",
        "Runs a layout and the single process side by side in fp32: loss, every gradient, every weight after 3 steps.",
        _EXAMPLE,
    )
    add_job_arguments(parser)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"AdamW steps (default {STEPS})")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative deviation (default 1e-5)")
    parser.add_argument(
        "--max-processes", type=int, default=PROCESSES, metavar="N",
        help=f"a larger layout is reduced to the smallest of its kind (default {PROCESSES})",
    )  # fmt: skip
    parser.add_argument("--shrink", action="store_true", help="fewer layers and widths, the same kind of model")
    parser.add_argument("--on", choices=("cpu", "cuda"), default="cpu", help="processes on this device (default cpu)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default 0)")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    _require_positive("--steps", parsed.steps)
    _require_positive("--max-processes", parsed.max_processes)
    if not parsed.tolerance >= 0:
        raise SpecError("--tolerance", f"{parsed.tolerance:g} is no deviation", "use 0 or more, such as 1e-5")
    if abs(parsed.seed) > LARGEST_SEED:
        raise SpecError("--seed", f"{parsed.seed} is out of range", f"use a number up to {LARGEST_SEED:,}")
    job = job_from(parsed, runs_here=True)
    require_torch("verify")

    from shardwise.measure.smaller import on_fewer_ranks, with_small_model
    from shardwise.measure.verify import verify
    from shardwise.report.verify import print_verification, verification_data, verification_progress

    asked = job
    job = on_fewer_ranks(job, parsed.max_processes)
    if parsed.shrink:
        job = with_small_model(job)
    settings = {"steps": parsed.steps, "seed": parsed.seed, "tolerance": parsed.tolerance, "device": parsed.on}
    with verification_progress(parsed.steps, shown=not parsed.json) as watch:
        found = verify(job, **settings, watch=watch)
    if parsed.json:
        print(json.dumps(verification_data(found)))
    else:
        print_verification(asked, found)
    return 0 if found.ok else 1


def _require_positive(flag: str, value: int) -> None:
    if value < 1:
        raise SpecError(flag, f"{value}", "use 1 or more")
