"""The search of the page, in a process of its own: controls are answered meanwhile, and it can be cancelled.

`python -m shardwise.ui.searching` reads a request from standard input and writes a line of JSON for every event:
``progress``, a ``picture`` of time against memory if that was asked for, then ``result`` or ``refused``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.api.planning import plan, plan_mixed
from shardwise.report.charts.plan import pareto_chart
from shardwise.report.console import versioned
from shardwise.report.plan_data import plan_data
from shardwise.spec.clusters import parse_mixed
from shardwise.spec.errors import SpecError
from shardwise.ui.given import arguments_from, document, error_data

# Options of `plan` besides the job, first those that mixed clusters support; the others take long, or read files.
OF_MIXED = ("exclude", "max_memory", "min_global_batch", "any_priced")
OPTIONS = (*OF_MIXED, "framework", "pareto", "why_not")
_EVERY_SECONDS = 0.1  # between two lines of progress
_TICK_SECONDS = 0.5
TICK: dict[str, Any] = {"event": "tick", "data": None}
_MOST_AT_ONCE = 2
_LONGEST_LINE = 64 * 2**20


def plan_request(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The job and the options of a search, after the quick checks."""
    arguments = arguments_from({name: value for name, value in given.items() if name not in OPTIONS})
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    if parse_mixed(given.get("cluster")) is not None:
        for name in options.keys() - set(OF_MIXED):
            raise SpecError(name, "is not answered for several kinds of nodes", "leave it out")
    return arguments, options


# -- in the process of the search --------------------------------------------------------------------------------


def main() -> int:
    shown_at = 0.0

    def progress(words: str) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at > _EVERY_SECONDS:
            shown_at = time.monotonic()
            _write("progress", {"words": words})

    try:
        given = document(sys.stdin.buffer.read())
        arguments, options = plan_request(given)
        if parse_mixed(given.get("cluster")) is not None:
            progress("searching over several kinds of nodes: a minute at most")
            _write("result", plan_mixed(arguments, **options).to_dict())
            return 0
        answer = plan(arguments, **options, on_progress=progress).answer
        if answer.memory_front is not None:
            _write("picture", pareto_chart(answer.plan, answer.memory_front).to_dict())
        _write("result", versioned("plan", plan_data(answer)))
    except SpecError as error:
        _write(**_refused(error))
    return 0


def _write(event: str, data: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, "data": data}, allow_nan=False) + "\n")
    sys.stdout.flush()


def _refused(error: SpecError) -> dict[str, Any]:
    return {"event": "refused", "data": error_data(error)}


# -- in the server -------------------------------------------------------------------------------------------------


@dataclass
class Searches:
    """The searches of a server, of which only a few run at a time."""

    running: int = 0

    async def events(self, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """What a search reports; its process is ended when the iteration ends, for whatever reason."""
        if self.running >= _MOST_AT_ONCE:
            problem = f"{self.running} searches are running"
            raise SpecError("plan", problem, "wait for one of them, or cancel it")
        self.running += 1
        try:
            async for event in _events(body):
                yield event
        finally:
            self.running -= 1


async def _events(body: bytes) -> AsyncGenerator[dict[str, Any], None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shardwise.ui.searching",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LONGEST_LINE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(body)
        process.stdin.close()
        while True:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), _TICK_SECONDS)
            except TimeoutError:
                yield TICK  # lets the server check that the client is still connected
                continue
            if not line:
                break
            yield json.loads(line)
        if await process.wait():
            yield _refused(SpecError("plan", "the search ended without an answer", "the server's terminal says why"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
