"""`shardwise lab`: theory beside measurement, on this machine; exits with 1 if they contradict each other."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from shardwise.api.quantities import require_writable, write_text
from shardwise.cli.arguments import require_torch
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.labs.registry import LABS, Lab, LabReport, lab_data, lab_named, lab_page, labs_data, labs_page, own_setup
from shardwise.launch.pool import told_in_one_line
from shardwise.report.console import versioned
from shardwise.report.progress import status
from shardwise.spec.errors import SpecError
from shardwise.spec.units import counted

_EXAMPLE = """
shardwise lab
shardwise lab primitives
shardwise lab pipeline --out pictures
"""

WHAT = tuple(lab.name for lab in LABS)


def run(arguments: list[str]) -> int:
    parser = _parser()
    parsed = parser.parse(arguments)
    if parsed.name is None:
        show(parsed, labs_page, labs_data)
        return 0
    lab = lab_named(parsed.name)
    require_torch("lab")
    if parsed.out is not None:
        _require_folder(Path(parsed.out))
    with (
        told_in_one_line("run it again"),
        status("starting", quiet=parsed.json) as update,
        own_setup(short=parsed.short, on_progress=update) as setup,
    ):
        report = lab.run(setup)
    return report_on(parsed, lab, report.planted() if parsed.contradict else report)


def _parser() -> Parser:
    parser = Parser(
        "lab",
        "Runs a lab: draws what a text book says, measures it on processes of this machine, and exits with 1 where the "
        f"measurement contradicts the theory. Without a name: what labs there are ({', '.join(WHAT)}).",
        _EXAMPLE,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the lab to run")
    parser.add_argument("--short", action="store_true", help="measure less, within seconds")
    parser.add_argument("--out", metavar="FOLDER", help="where to write the output; a folder for pictures and traces")
    parser.add_argument(
        "--contradict", action="store_true", help="judge by a theory that is off by a factor of ten: the lab must fail"
    )
    add_output_arguments(parser)
    return parser


def _require_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError("--out", f"{folder} cannot be a folder ({error.strerror})", "name another") from None
    require_writable(folder / "lab", "--out")


def report_on(parsed: Namespace, lab: Lab, report: LabReport) -> int:
    show(parsed, lambda: lab_page(lab, report), lambda: versioned("lab", lab_data(lab, report)))
    if parsed.out is not None:
        for name, text in report.files.items():
            write_text(Path(parsed.out) / name, text, "--out")
        written = ", ".join(report.files) or "nothing: this lab draws in the terminal alone"
        print(f"note: written to {parsed.out}: {written}", file=sys.stderr)
    wrong = report.contradictions
    if wrong:
        told = f"{counted(len(wrong), 'finding')} of {len(report.findings)} contradict the theory"
        print(f"shardwise: lab {lab.name}: {told}, the first: {wrong[0].what}", file=sys.stderr)
    return 1 if wrong else 0
