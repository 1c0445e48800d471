"""What is being done, and how far it is: a line on a terminal's standard error, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def status(doing: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function that replaces the description of what is being done."""
    with _one_task(doing, None, (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()), quiet) as bar:
        yield lambda text: bar.update(bar.task_ids[0], description=text)


@contextmanager
def bytes_progress(doing: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the bytes read or written since the last call."""
    figures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _one_task(doing, total, (TextColumn("{task.description}"), BarColumn(), *figures), quiet) as bar:
        yield lambda size: bar.advance(bar.task_ids[0], size)


@contextmanager
def counted_progress(doing: str, what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with how many are done, and how many there are."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(what))
    with _one_task(doing, None, (*columns, TimeRemainingColumn()), quiet) as bar:
        yield lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total)


def _one_task(doing: str, total: int | None, columns: tuple[ProgressColumn, ...], quiet: bool) -> Progress:
    console = Console(stderr=True)
    console.quiet = quiet or not console.is_terminal
    bar = Progress(*columns, console=console, transient=True, disable=console.quiet)
    bar.add_task(doing, total=total)
    return bar
