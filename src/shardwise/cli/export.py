"""`shardwise export`: a job as another framework's configuration, with what that cannot express."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardwise.cli.arguments import add_job_arguments, job_from
from shardwise.cli.parser import Parser
from shardwise.interop.frameworks import TARGETS, Exported, target
from shardwise.planner.advice.exported import PricedExport, priced_export
from shardwise.planner.candidate import Candidate
from shardwise.report.console import versioned
from shardwise.report.plan_data import export_data
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.units import readable_bytes, readable_seconds

_EXAMPLE = """
shardwise export --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --zero 1 --global-batch 1024 --to megatron
"""

_FIRST = "--to --out --model --cluster --tp --pp --dp --zero --global-batch --strict"


def run(arguments: list[str]) -> int:
    parser = Parser("export", "Writes a job as the configuration of another training framework.", _EXAMPLE, _FIRST)
    add_job_arguments(parser)
    parser.add_argument("--to", help="format to write; a framework's: " + ", ".join(TARGETS))
    parser.add_argument("--out", metavar="PATH", help="where to write the output (default: standard output)")
    parser.add_argument("--strict", action="store_true", help="refuse a job that the framework cannot run as it is")
    parser.add_argument(
        "--anyway", action="store_true", help="also write a job that does not fit in memory under that framework"
    )
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    if parsed.to is None:
        raise SpecError("--to", "is missing", "choose one of " + ", ".join(TARGETS))
    chosen = target(parsed.to)
    job = job_from(parsed)
    exported, priced = chosen.export(job), priced_export(job, chosen.name)
    if parsed.strict:
        exported.strict()
    if priced.no_longer_fits and not parsed.anyway:
        remedy = f"plan with --for {chosen.name}, or write it with --anyway"
        raise SpecError("--to", f"as {chosen.name} runs it, the job does not fit: {_prices(priced)}", remedy)
    if parsed.out is not None:
        _write(exported, Path(parsed.out))
    if parsed.json:
        print(json.dumps(versioned("export", export_data(exported, priced)), indent=2))
        return 0
    if parsed.out is None:
        for text in exported.files.values():
            sys.stdout.write(text)
    _report(exported)
    if priced.changed:
        print(f"priced: {_prices(priced)}", file=sys.stderr)
    return 0


def _write(exported: Exported, out: Path) -> None:
    """Writes into ``out`` if it is a folder or there are several files, else to that path."""
    try:
        for name, text in exported.files.items():
            path = out / name if out.is_dir() or len(exported.files) > 1 else out
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError("--out", f"{shown(str(out))} cannot be written ({error.strerror})", "choose another") from None


def _report(exported: Exported) -> None:
    """Prints what the configuration cannot express to standard error: standard output may be the configuration."""
    groups = (
        (f"{exported.target} cannot express, or does differently:", exported.missing),
        ("to set in the training script or the launcher:", exported.elsewhere),
        ("notes:", exported.notes),
    )
    for title, lines in groups:
        if lines:
            print(title, *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)


def _prices(priced: PricedExport) -> str:
    """The price of the exported job and of the job here, and what differs."""
    here, there = priced.here, priced.there
    if there is None:
        return f"{_price(here)} here; the exported configuration cannot be priced"
    return f"{_price(there)} ({', '.join(priced.differs) or 'as exported'}), where this job takes {_price(here)}"


def _price(candidate: Candidate) -> str:
    return f"{readable_seconds(candidate.step_seconds)} a step and {readable_bytes(candidate.memory.total)}"
