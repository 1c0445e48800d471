"""How many of the bytes to read or write are done, as a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bytes_progress(doing: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the bytes done; nothing is shown without a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda size: None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda size: bar.advance(task, size)
