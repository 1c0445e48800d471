"""`shardwise validate`: score the cost model on a table of published or measured runs."""

from __future__ import annotations

from shardwise.api.validation import validate
from shardwise.cli.arguments import Parser
from shardwise.cli.output import add_output_arguments, show
from shardwise.cost.accuracy.table import SCORED, TRAINING_RUNS

_DEFAULT = " and ".join(TRAINING_RUNS)


def run(arguments: list[str]) -> int:
    parser = Parser(
        "validate",
        "Scores the cost model on a table of training runs, of collectives, or of pipeline bubbles.",
        "shardwise validate\nshardwise validate collectives\nshardwise validate my_runs.csv",
    )
    names = f"{', '.join(SCORED)} (which come with the package), or a CSV in the layout of one; default: {_DEFAULT}"
    parser.add_argument("table", nargs="?", help=names)
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    found = validate(parsed.table)
    show(parsed, lambda: found.page, found.to_dict)
    return 0
