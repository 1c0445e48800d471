"""What the page has done in processes of their own: controls are answered meanwhile, and it can be cancelled.

`python -m` such a module reads a request from standard input and writes a line of JSON for every event; the last one is
``result`` or ``refused``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from shardwise.spec.errors import SpecError
from shardwise.ui.given import error_data

Event = dict[str, Any]
TICK: Event = {"event": "tick", "data": None}
_TICK_SECONDS = 0.5
_LONGEST_LINE = 64 * 2**20

# -- in the process ----------------------------------------------------------------------------------------------------


def write_event(event: str, data: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, "data": data}, allow_nan=False) + "\n")
    sys.stdout.flush()


def write_refusal(error: SpecError) -> None:
    write_event(**_refused(error))


def _refused(error: SpecError) -> Event:
    return {"event": "refused", "data": error_data(error)}


# -- in the server -----------------------------------------------------------------------------------------------------


@dataclass
class Children:
    """The processes of one module, of which only a few run at a time."""

    module: str
    named: tuple[str, str]
    """What one does, as the field of a refusal and in words."""
    most_at_once: int
    running: int = 0

    async def events(self, body: bytes) -> AsyncGenerator[Event, None]:
        """What a process reports; it and all that it started end with the iteration, for whatever reason."""
        field, words = self.named
        if self.running >= self.most_at_once:
            busy = f"{self.running} {words}s are running" if self.running > 1 else f"a {words} is running"
            raise SpecError(field, busy, "wait for one of them, or cancel it" if self.running > 1 else "wait for it")
        self.running += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self.module, start_new_session=True,
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
                yield _refused(
                    SpecError(field, f"the {words} ended without an answer", "the server's terminal says why")
                )
        finally:
            self.running -= 1
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
