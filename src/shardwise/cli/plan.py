"""`shardwise plan`: the best strategies for a model, a cluster and a batch."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.cli.arguments import Parser, add_job_arguments
from shardwise.cli.campaign import add_campaign_arguments, campaign_from, terms_from
from shardwise.cli.inputs import planning_job, whole
from shardwise.cli.plan_progress import Progress
from shardwise.planner.constraints import (
    FIELDS,
    OFFLOADS,
    Allowed,
    Constraints,
    allowed,
    parse_constraints,
)
from shardwise.planner.frameworks import check_framework, plan_for, request_for
from shardwise.planner.plan import Plan, plan, required
from shardwise.planner.request import Request
from shardwise.planner.supported import model_note
from shardwise.planner.what_if import changed
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.mixed import MixedCluster, parse_mixed
from shardwise.spec.units import parse, readable_duration

_EXAMPLE = """
shardwise plan --model llama3-405b --cluster dgx-h100:2048 --global-batch 16M-tokens --seq 8192
shardwise plan --model llama3-70b --cluster dgx-h100:16 --global-batch 512 --tp 2..8 --zero 1,3 --why-not tp=8,pp=1
"""
_HEADER = "# Written by `shardwise plan`; run it again to replace this file.\n"


def run(arguments: list[str]) -> int:
    parsed = _parser().parse(arguments)
    constraints = _constraints(parsed)
    mixed = None if parsed.cluster is None else parse_mixed(parsed.cluster)
    if mixed is not None:
        parsed.cluster = mixed.kinds[0]  # what is asked of one cluster is asked of the first kind
    framework = None if parsed.framework is None else check_framework(parsed.framework)
    job, notes = planning_job(parsed, None if framework == "ddp" else framework)
    notes += filter(None, [model_note(job)])
    if mixed is not None:
        return _plan_mixed(parsed, mixed, job, constraints, notes)
    request = Request(
        job,
        constraints,
        minimum_batch=None if parsed.min_global_batch is None else whole(parsed.min_global_batch, "--min-global-batch"),
        memory_bytes=_memory(parsed.max_memory, job.cluster.device.usable_memory),
        offload=_offload(parsed),
        any_priced=parsed.any,
        thorough=parsed.thorough,
        time_limit_seconds=_time_limit(parsed.time_limit),
    ).started()
    wishes = [(text, parse_constraints(text)) for text in parsed.why_not]
    # An error in a further question should not wait for the search.
    terms_from(parsed, job.training)
    for change in parsed.what_if:
        changed(job.cluster, change)
    output, top = _output(parsed.output), whole(parsed.top, "--top")
    with Progress(quiet=parsed.json) as progress:
        if framework:
            found = plan_for(request, framework)
        else:
            found = plan(request, progress.show)
        said = request_for(request, framework) if framework and not isinstance(found, Plan) else request
        answer = _answer(required(found, said), parsed, framework, wishes, notes, progress)
    if output is not None:
        _written(output, _HEADER + answer.plan.best.job.to_yaml())
    if parsed.json:
        from shardwise.report.plan_json import plan_data

        print(json.dumps(plan_data(answer), indent=2))
        return 0
    from shardwise.report.plan_text import print_plan

    print_plan(answer, written=output, top=top)
    return 0


def _plan_mixed(
    parsed: argparse.Namespace, mixed: MixedCluster, job: Job, constraints: Constraints, notes: list[str]
) -> int:
    """The plan for several kinds of nodes, which is priced only: nothing is written."""
    from shardwise.planner.mixed import plan_mixed
    from shardwise.report.mixed import mixed_data, print_mixed

    for flag in ("why_not", "what_if", "framework", "pareto", "offload", "tokens", "gpus", "gpus_per_node"):
        if getattr(parsed, flag):
            name = "--for" if flag == "framework" else "--" + flag.replace("_", "-")
            raise SpecError(name, "is not answered for several kinds of nodes", "leave it out, or plan one kind")
    minimum = None if parsed.min_global_batch is None else whole(parsed.min_global_batch, "--min-global-batch")
    least = min(kind.device.usable_memory for kind in mixed.kinds)
    with Progress(quiet=parsed.json):
        found = plan_mixed(
            job.model,
            mixed,
            job.training,
            job.stack,
            strategy=job.strategy,
            constraints=constraints,
            minimum_batch=minimum,
            memory_bytes=_memory(parsed.max_memory, least),
            any_priced=parsed.any,
            time_limit_seconds=_time_limit(parsed.time_limit),
        )
    if parsed.json:
        print(json.dumps(mixed_data(found), indent=2))
        return 0
    for note in notes:
        print(f"note: {note}")
    print_mixed(found)
    return 0


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
    parser.add_argument("--json", action="store_true", help="JSON output")
    return parser


@dataclass(frozen=True)
class Answer:
    """Everything that was asked for, for a report."""

    plan: Plan
    notes: list[str]
    framework: str | None
    explanation: Any
    textbook: Any
    runners: Any
    why_not: list[Any]
    what_if: list[Any]
    pareto: Any
    campaign: Any
    not_run: Any = None
    unfolded: bool = False


def _answer(
    found: Plan, parsed: argparse.Namespace, framework: str | None, wishes: list[Any], notes: list[str], progress: Any
) -> Answer:
    from shardwise.planner.explanation import explain
    from shardwise.planner.frameworks import who_can_run
    from shardwise.planner.not_run import not_run
    from shardwise.planner.sizes import sizes
    from shardwise.planner.textbook import textbook
    from shardwise.planner.what_if import what_if
    from shardwise.planner.why_not import judged, wish

    progress.say("explaining")
    # What is simulated to answer a question may be the best of its kind: all tables are about all that is known.
    deadline, left_out = found.request.deadline, []
    asked = []
    for text, wanted in wishes:
        if deadline.leaves_out():
            left_out.append(f"--why-not {text}")
        else:
            asked.append(wish(found, wanted))
    rule = textbook(found.request)
    found = found.joined([one for own in asked for one in own.candidates])
    if rule is not None and found.request.allows(rule.job.strategy):
        found = found.joined([rule])
    best = found.best
    pareto: Any = None
    if parsed.pareto == "memory":
        pareto = found.front
    elif parsed.pareto == "money":
        pareto = sizes(found)
    explanation, runners = explain(found), who_can_run(found, near=framework is None)
    others = []
    for change in parsed.what_if:
        if deadline.leaves_out():
            left_out.append(f"--what-if {change}")
        else:
            others.append(what_if(found.request, change))
    lacking = not_run(found)
    return Answer(
        found,
        [*notes, *_stopped_notes(found, left_out)],
        framework,
        explanation,
        rule,
        runners,
        [judged(found, one) for one in asked],
        others,
        pareto,
        campaign_from(parsed, best.job, best.step_seconds),
        lacking,
        parsed.all,
    )


def _constraints(parsed: argparse.Namespace) -> Constraints:
    """The strategy's flags as bounds; they are taken off, so that the job does not get them as values."""
    bounds: dict[str, Allowed] = {}
    for name in FIELDS:
        text = getattr(parsed, f"strategy.{name}", None)
        if text is not None:
            bounds[name] = allowed(name, text)
            setattr(parsed, f"strategy.{name}", None)
    if parsed.no_sp:
        bounds["sequence_parallel"] = Allowed((False,))
        parsed.no_sp = False
    kept = []
    for setting in parsed.set:
        path, _, text = setting.partition("=")
        name = path.strip().removeprefix("strategy.")
        if path.strip().startswith("strategy.") and name in FIELDS and text.strip():
            bounds[name] = allowed(name, text)
        else:
            kept.append(setting)
    parsed.set = kept
    if parsed.offload not in (None, "any"):
        bounds["offload"] = allowed("offload", parsed.offload)
    return Constraints(bounds, tuple(parse_constraints(text) for text in parsed.exclude))


def _offload(parsed: argparse.Namespace) -> bool | None:
    if parsed.no_offload and parsed.offload is not None:
        raise SpecError("--offload", "and --no-offload are mutually exclusive", "give one of them")
    return False if parsed.no_offload else True if parsed.offload is not None else None


def _time_limit(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = float(parse(text, "seconds", "--time-limit"))
    if seconds <= 0:
        raise SpecError("--time-limit", f"{shown(text)} is not a time", "give one such as 10min")
    return seconds


def _stopped_notes(found: Plan, left_out: list[str]) -> list[str]:
    """Notes that a search, or a further question, was cut short."""
    limit, priced = f"the time limit of {readable_duration(found.request.seconds)}", found.search.priced
    notes = []
    if found.search.was_stopped:
        notes.append(f"stopped at {limit} with {priced:,} strategies priced: this is the best so far (--time-limit)")
    elif found.request.deadline.was_hit:
        notes.append(f"some answers besides the plan were cut short by {limit} (--time-limit)")
    if left_out:
        notes.append(f"not answered within {limit}: {', '.join(left_out)}")
    return notes


def _memory(text: str | None, there: float) -> float | None:
    if text is None:
        return None
    if text.strip().endswith("%"):
        share = parse(text.strip()[:-1], "count", "--max-memory") / 100
        if not 0 < share <= 1:
            raise SpecError(
                "--max-memory", f"{shown(text)} is not a share or a size", "write 1% to 100%, or a size such as 70GB"
            )
        return share * there
    return float(parse(text, "bytes", "--max-memory"))


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
