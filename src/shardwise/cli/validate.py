"""`shardwise validate`: score the cost model on a table of published runs, or on runs of one's own."""

from __future__ import annotations

from shardwise.accuracy.table import SCORED, TRAINING_RUNS
from shardwise.api.validation import validate
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser

_DEFAULT = " and ".join(TRAINING_RUNS)


def run(arguments: list[str]) -> int:
    parser = Parser(
        "validate",
        "Scores the cost model on a table of training runs, collectives or pipeline bubbles, or on your own runs.",
        "shardwise validate\nshardwise validate collectives\nshardwise validate my_runs.csv\nshardwise validate runs",
    )
    names = f"{', '.join(SCORED)} (which come with the package), a CSV in the layout of one, or a folder of runs"
    names += f"; default: {_DEFAULT}"
    parser.add_argument("table", nargs="?", help=names)
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    result = validate(parsed.table)
    show(parsed, lambda: result.page, result.to_dict)
    return 0
