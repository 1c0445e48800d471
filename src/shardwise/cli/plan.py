"""`shardwise plan`: the best strategies for a model, a cluster and a batch."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.api.planning import MixedPlanResult, PlanResult, plan, plan_mixed
from shardwise.api.quantities import not_written, write_text
from shardwise.cli.arguments import add_campaign_arguments, add_job_arguments, job_arguments, keywords
from shardwise.cli.output import add_details_argument, add_output_arguments, add_plot_argument, form_of, page_of, show
from shardwise.cli.parser import Parser
from shardwise.planner.constraints import OFFLOADS
from shardwise.report.page import Line, Page
from shardwise.report.progress import status
from shardwise.spec.clusters import parse_mixed
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.support import verdict

_EXAMPLE = """
shardwise plan --model llama3-405b --cluster dgx-h100:2048 --global-batch 16M-tokens --seq 8192
shardwise plan --model llama3-70b --cluster dgx-h100:16 --global-batch 512 --tp 2..8 --zero 1,3 --why-not tp=8,pp=1
"""
_FIRST = "--model --cluster --gpus --global-batch --seq --tp --pp --zero --why-not --details"
_HEADER = "# Written by `shardwise plan`; run it again to replace this file.\n"
_NOT_MIXED = ("why_not", "what_if", "framework", "pareto", "plot", "offload", "tokens", "gpus", "gpus_per_node")


def run(arguments: list[str]) -> int:
    parsed = _parser().parse(arguments)
    if parsed.no_offload and parsed.offload is not None:
        raise SpecError("--offload", "and --no-offload are mutually exclusive", "give one of them")
    if parsed.cluster is not None and parse_mixed(parsed.cluster) is not None:
        return _plan_mixed(parsed)
    parsed.offload = False if parsed.no_offload else parsed.offload
    output = _output(parsed.out)
    with status("searching", quiet=parsed.json) as on_progress:
        result = plan(job_arguments(parsed), **keywords(plan, parsed), on_progress=on_progress)
    _write_and_show(parsed, result, output)
    return 0


def _plan_mixed(parsed: argparse.Namespace) -> int:
    for name in _NOT_MIXED:
        if getattr(parsed, name):
            flag = "--for" if name == "framework" else f"--{name.replace('_', '-')}"
            raise SpecError(flag, "is not supported for several kinds of nodes", "leave it out, or plan for one kind")
    output = _output(parsed.out)
    with status("searching", quiet=parsed.json):
        result = plan_mixed(job_arguments(parsed), **keywords(plan_mixed, parsed))
    _write_and_show(parsed, result, output)
    return 0


def _write_and_show(parsed: argparse.Namespace, result: PlanResult | MixedPlanResult, output: Path | None) -> None:
    if output is not None:
        write_text(output, _HEADER + result.job.to_yaml(), "--out")

    def page() -> Page:
        return result.plots if isinstance(result, PlanResult) and parsed.plot else page_of(parsed, result)

    show(parsed, page, result.to_dict)
    if output is not None and form_of(parsed) == "text" and not parsed.json:
        runs = verdict(result.job).status == "runs"
        following = [f"shardwise {verb} {output}" for verb in ("analyze", "train")[: 1 + runs]]
        Page((Line(f"\nWrote {output}. Next: {', '.join(following)}", "bold"),)).print()


def _parser() -> Parser:
    parser = Parser(
        "plan", "Finds the best way to split a training job, explains it, and writes job.yaml.", _EXAMPLE, _FIRST
    )
    add_job_arguments(parser)
    search = parser.add_argument_group(
        "the search", "strategy flags constrain the search: --tp 8, --tp 2,4,8, --pp 1..16, --schedule 1f1b,zbv"
    )
    search.add_argument("--exclude", action="append", default=[], metavar="tp=8,pp=1", help="exclude such strategies")
    search.add_argument(
        "--max-memory",
        metavar="70GB",
        help="device memory that a plan may use, or a share: 90%% (default: what --memory-risk leaves)",
    )
    search.add_argument(
        "--min-global-batch", metavar="N", help="search the batch too: the smallest from N sequences on"
    )
    kinds = f"allow offload: any, or a list of {', '.join(OFFLOADS)} (default: where it gains)"
    search.add_argument("--offload", nargs="?", const="any", metavar="KIND", help=kinds)
    search.add_argument("--no-offload", action="store_true", help="never offload")
    any_priced = "include strategies that this project's engine cannot run"
    search.add_argument("--any", dest="any_priced", action="store_true", help=any_priced)
    search.add_argument("--for", dest="framework", metavar="NAME", help="only what this framework can express, or ddp")
    search.add_argument("--thorough", action="store_true", help="search the whole space, however long it takes")
    limit = "time limit; in CPU time, after which the best so far is shown (default 1min; with --thorough 1h)"
    search.add_argument("--time-limit", metavar="10min", help=limit)
    questions = parser.add_argument_group("questions")
    questions.add_argument(
        "--why-not", action="append", default=[], metavar="tp=8,pp=1", help="why this strategy does not win"
    )
    changes = "the plan on changed hardware: LEVEL=RATE, LEVEL-size=N, memory=192GB, device=b200, sm-free"
    questions.add_argument("--what-if", action="append", default=[], metavar="ib=800Gb/s", help=changes)
    questions.add_argument("--pareto", choices=("memory", "money"), help="trade time against memory, or against money")
    add_campaign_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--top", metavar="N", help="how many layouts to show (default 3; with --details 8)")
    output.add_argument("--all", dest="unfolded", action="store_true", help="list near-duplicate layouts separately")
    out = "where to write the output; a job file, or - for none (default job.yaml)"
    output.add_argument("--out", default="job.yaml", metavar="FILE", help=out)
    add_details_argument(parser)
    add_plot_argument(add_output_arguments(parser))
    return parser


def _output(text: str) -> Path | None:
    """The file to write; raises SpecError for an existing file that plan did not write."""
    if text == "-":
        return None
    path = Path(text)
    try:
        if path.is_dir():
            raise SpecError("--out", f"{shown(text)} is a folder", "name a file in it, or - for none")
        if path.exists() and not _was_planned(path):
            problem = f"{shown(text)} exists and was not written by plan"
            raise SpecError("--out", problem, "give another name, or - for none")
        if not path.parent.is_dir():
            problem = f"{shown(str(path.parent))} is not a directory"
            raise SpecError("--out", problem, "make it, or give another name")
    except SpecError:
        raise
    except (OSError, ValueError) as error:
        raise not_written(path, error, "--out") from None
    return path


def _was_planned(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEADER)).startswith(_HEADER.strip().encode())
