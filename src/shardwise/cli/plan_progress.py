"""What `shardwise plan` shows while it searches."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """A line on a terminal's standard error while the search runs; nothing elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet or not sys.stderr.isatty()
        self._status: Any = None

    def __enter__(self) -> Progress:
        if not self._quiet:
            from rich.console import Console

            self._status = Console(stderr=True).status("searching")
            self._status.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.__exit__(*error)

    def say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
