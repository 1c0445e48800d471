"""`shardwise analyze`: price one job."""

from __future__ import annotations

import argparse
import json
import sys

from shardwise.api.analysis import AnalysisResult, analyze, require_few_passes
from shardwise.api.quantities import write_text
from shardwise.cli.arguments import add_campaign_arguments, add_job_arguments, job_arguments, job_from, keywords
from shardwise.cli.output import add_details_argument, add_output_arguments, add_plot_argument, form_of, page_of, show
from shardwise.cli.parser import Parser
from shardwise.spec.errors import SpecError

_EXAMPLE = """
shardwise analyze --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --dp 16 --zero 1 --global-batch 1024 --seq 8192
"""


def run(arguments: list[str]) -> int:
    parser = Parser(
        "analyze",
        "Prices one job: communication, memory, FLOPs, what bounds it. The exit status is 1 if it does not fit.",
        _EXAMPLE,
        "--model --cluster --gpus --tp --pp --dp --zero --global-batch --seq --details",
    )
    add_job_arguments(parser)
    add_campaign_arguments(parser)
    inside = parser.add_argument_group("questions")
    inside.add_argument(
        "--trace", metavar="FILE.json", help="trace to write, for ui.perfetto.dev; of the predicted step"
    )
    inside.add_argument("--memory-over-time", action="store_true", help="peak of every pipeline rank: when, and what")
    inside.add_argument("--memory-picture", metavar="FILE.svg", help="draw what every pipeline rank holds over time")
    inside.add_argument("--scaling", action="store_true", help="strong and weak scaling tables")
    others = "the same devices and links as a ring, tree, hierarchy, switch, mesh and torus, side by side"
    inside.add_argument("--compare-topologies", action="store_true", help=others)
    inside.add_argument("--ranks", action="store_true", help="node, local rank and groups of every rank")
    own = "what to change in another framework's file, in its own settings: up to three changes, each priced"
    inside.add_argument("--advise", action="store_true", help=own)
    inside.add_argument("--write", metavar="NEW_FILE", help="the file with these changes, comments and order kept")
    add_details_argument(parser)
    add_plot_argument(add_output_arguments(parser))
    parsed = parser.parse(arguments)
    job = job_from(parsed)
    for flag in ("--trace", "--memory-picture", "--memory-over-time"):
        if getattr(parsed, flag[2:].replace("-", "_")):
            require_few_passes(job, flag)
    if parsed.write and not parsed.advise:
        raise SpecError("--write", "is for what ⟨advise⟩ changes", "give both")
    # Advice is of the file, from which a job is made once more.
    result = analyze(job_arguments(parsed) if parsed.advise else job, **keywords(analyze, parsed))
    written = _write_files(parsed, result)
    show(parsed, lambda: result.plots if parsed.plot else page_of(parsed, result), result.to_dict)
    for line in written:
        print(line, file=sys.stdout if form_of(parsed) == "text" and not parsed.json else sys.stderr)
    return 0 if result.fits else 1


def _write_files(parsed: argparse.Namespace, result: AnalysisResult) -> list[str]:
    """Writes the trace, the picture and the changed file that are asked for; returns the lines that say so."""
    lines, job, advice = [], result.job, result.assessment.advice
    if parsed.write and advice is not None:
        write_text(parsed.write, advice.text, "--write")
        lines.append(f"wrote {parsed.write}: {advice.file} with these changes")
    if parsed.trace is not None:
        from shardwise.cost.step.trace import step_trace

        write_text(parsed.trace, json.dumps(step_trace(job), separators=(",", ":")), "--trace")
        lines.append(f"wrote {parsed.trace}: open in ui.perfetto.dev")
    if parsed.memory_picture is not None:
        from shardwise.cost.memory.timeline import memory_over_time
        from shardwise.report.memory_timeline import memory_picture

        write_text(parsed.memory_picture, memory_picture(memory_over_time(job)), "--memory-picture")
        lines.append(f"wrote {parsed.memory_picture}")
    return lines
