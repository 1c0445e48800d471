"""`shardwise plan`: the best strategies for a model, a cluster and a batch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwise.api.planning import plan, plan_mixed
from shardwise.cli.arguments import Parser, add_campaign_arguments, add_job_arguments, campaign_keywords, given
from shardwise.cli.output import add_output_arguments, form_of, show
from shardwise.cli.plan_progress import Progress
from shardwise.planner.constraints import OFFLOADS
from shardwise.report.page import Line, Page
from shardwise.spec.clusters import parse_mixed
from shardwise.spec.errors import SpecError, shown

_EXAMPLE = """
shardwise plan --model llama3-405b --cluster dgx-h100:2048 --global-batch 16M-tokens --seq 8192
shardwise plan --model llama3-70b --cluster dgx-h100:16 --global-batch 512 --tp 2..8 --zero 1,3 --why-not tp=8,pp=1
"""
_HEADER = "# Written by `shardwise plan`; run it again to replace this file.\n"


def run(arguments: list[str]) -> int:
    parsed = _parser().parse(arguments)
    if parsed.cluster is not None and parse_mixed(parsed.cluster) is not None:
        return _plan_mixed(parsed)
    output = _output(parsed.output)
    with Progress(quiet=parsed.json) as progress:
        found = plan(
            given(parsed),
            **_common(parsed),
            offload=_offload(parsed),
            framework=parsed.framework,
            thorough=parsed.thorough,
            why_not=parsed.why_not,
            what_if=parsed.what_if,
            pareto=parsed.pareto,
            top=parsed.top,
            unfolded=parsed.all,
            on_progress=progress.say,
            **campaign_keywords(parsed),
        )
    if output is not None:
        _written(output, _HEADER + found.job.to_yaml())
    show(parsed, lambda: found.page, found.to_dict)
    if output is not None and form_of(parsed) == "text" and not parsed.json:
        Page((Line(f"\nWrote {output}: shardwise analyze {output}", "bold"),)).print()
    return 0


def _plan_mixed(parsed: argparse.Namespace) -> int:
    """The plan for several kinds of nodes, which is priced only: nothing is written."""
    for flag in ("why_not", "what_if", "framework", "pareto", "offload", "tokens", "gpus", "gpus_per_node"):
        if getattr(parsed, flag):
            name = "--for" if flag == "framework" else "--" + flag.replace("_", "-")
            raise SpecError(name, "is not answered for several kinds of nodes", "leave it out, or plan one kind")
    with Progress(quiet=parsed.json):
        found = plan_mixed(given(parsed), **_common(parsed))
    show(parsed, lambda: found.page, found.to_dict)
    return 0


def _common(parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        "exclude": parsed.exclude,
        "max_memory": parsed.max_memory,
        "min_global_batch": parsed.min_global_batch,
        "any_priced": parsed.any,
        "time_limit": parsed.time_limit,
    }


def _parser() -> Parser:
    parser = Parser("plan", "Finds the best way to split a training job, says why, and writes job.yaml.", _EXAMPLE)
    add_job_arguments(parser)
    search = parser.add_argument_group(
        "the search", "strategy flags constrain the search: --tp 8, --tp 2,4,8, --pp 1..16, --schedule 1f1b,zbv"
    )
    search.add_argument("--exclude", action="append", default=[], metavar="tp=8,pp=1", help="leave such strategies out")
    search.add_argument(
        "--max-memory",
        metavar="70GB",
        help="device memory that a plan may use, or a share: 90%% (default: all but the error bar of memory)",
    )
    search.add_argument("--min-global-batch", metavar="N", help="the smallest batch of at least N sequences")
    kinds = f"allow offload: any, or some of {', '.join(OFFLOADS)} (default: only if nothing else fits)"
    search.add_argument("--offload", nargs="?", const="any", metavar="KIND", help=kinds)
    search.add_argument("--no-offload", action="store_true", help="never offload")
    search.add_argument("--any", action="store_true", help="include strategies that this project's engine cannot run")
    search.add_argument("--for", dest="framework", metavar="NAME", help="only what this framework can express, or ddp")
    search.add_argument("--thorough", action="store_true", help="search the whole space, however long it takes")
    limit = "stop after this much processor time, with the best so far (default 1min; thorough: 1h)"
    search.add_argument("--time-limit", metavar="10min", help=limit)
    asked = parser.add_argument_group("questions")
    asked.add_argument(
        "--why-not", action="append", default=[], metavar="tp=8,pp=1", help="explain why this strategy does not win"
    )
    changes = "the plan on a changed machine: LEVEL=RATE, LEVEL-size=N, memory=192GB, device=b200, sm-free"
    asked.add_argument("--what-if", action="append", default=[], metavar="ib=800Gb/s", help=changes)
    asked.add_argument("--pareto", choices=("memory", "money"), help="time against memory, or against money")
    add_campaign_arguments(parser)
    parser.add_argument("--top", default="8", metavar="N", help="how many layouts to show (default 8)")
    parser.add_argument("--all", action="store_true", help="show near-duplicates of a layout as rows of their own")
    parser.add_argument("--output", default="job.yaml", metavar="FILE", help="job file to write; - for none")
    add_output_arguments(parser)
    return parser


def _offload(parsed: argparse.Namespace) -> bool | str | None:
    if parsed.no_offload and parsed.offload is not None:
        raise SpecError("--offload", "and --no-offload are mutually exclusive", "give one of them")
    return False if parsed.no_offload else parsed.offload


def _output(text: str) -> Path | None:
    """Where the job goes; a file that someone else wrote is not replaced."""
    if text == "-":
        return None
    path = Path(text)
    try:
        if path.is_dir():
            raise SpecError("--output", f"{shown(text)} is a folder", "name a file in it, or - for none")
        if path.exists() and not _is_a_plans(path):
            raise SpecError(
                "--output", f"{shown(text)} exists and was not written by plan", "give another name, or - for none"
            )
        if not path.parent.is_dir():
            raise SpecError(
                "--output", f"{shown(str(path.parent))} is not a directory", "make it, or give another name"
            )
    except SpecError:
        raise
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from None
    return path


def _is_a_plans(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEADER)).startswith(_HEADER.strip().encode())


def _written(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_written(path, error) from None


def _not_written(path: Path, error: Exception) -> SpecError:
    reason = getattr(error, "strerror", None) or "not a path"
    return SpecError("--output", f"{shown(str(path))} cannot be written ({reason})", "give another name")
