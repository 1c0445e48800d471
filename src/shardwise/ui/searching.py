"""The search of the page, in a process of its own (`ui/children.py`).

Its events: ``progress``, a ``picture`` of time against memory if that was asked for, then ``result`` or ``refused``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from shardwise.api.planning import plan, plan_mixed
from shardwise.report.charts.plan import pareto_chart
from shardwise.report.console import versioned
from shardwise.report.plan_data import plan_data
from shardwise.spec.clusters import parse_mixed
from shardwise.spec.errors import SpecError
from shardwise.ui.children import write_event, write_refusal
from shardwise.ui.given import arguments_from, document

# Options of `plan` besides the job, first those that mixed clusters support; the others take long, or read files.
OF_MIXED = ("exclude", "max_memory", "min_global_batch", "any_priced")
OPTIONS = (*OF_MIXED, "framework", "pareto", "why_not")
_EVERY_SECONDS = 0.1  # between two lines of progress


def plan_request(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The job and the options of a search, after the quick checks."""
    arguments = arguments_from({name: value for name, value in given.items() if name not in OPTIONS})
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    if parse_mixed(given.get("cluster")) is not None:
        for name in options.keys() - set(OF_MIXED):
            raise SpecError(name, "is not answered for several kinds of nodes", "leave it out")
    return arguments, options


def main() -> int:
    shown_at = 0.0

    def progress(words: str) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at > _EVERY_SECONDS:
            shown_at = time.monotonic()
            write_event("progress", {"words": words})

    try:
        given = document(sys.stdin.buffer.read())
        arguments, options = plan_request(given)
        if parse_mixed(given.get("cluster")) is not None:
            progress("searching over several kinds of nodes: a minute at most")
            write_event("result", plan_mixed(arguments, **options).to_dict())
            return 0
        answer = plan(arguments, **options, on_progress=progress).answer
        if answer.memory_front is not None:
            write_event("picture", pareto_chart(answer.plan, answer.memory_front).to_dict())
        write_event("result", versioned("plan", plan_data(answer)))
    except SpecError as error:
        write_refusal(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
