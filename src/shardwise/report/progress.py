"""What is being done, and how far it is: a line on a terminal's standard error, nothing elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from shardwise.report.tables import Bar
from shardwise.run.metrics.lines import Follower, RecentSteps
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_seconds,
    readable_share,
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


# -- a run in progress: a bar with the remaining time on a terminal, an occasional line elsewhere ----
# It follows the metrics that rank 0 writes; the processes that train have no terminal.

POLL_SECONDS = 0.3
LINE_SECONDS = 10.0  # between two lines where there is no terminal
LONG_SECONDS = 60.0  # a longer run announces its duration: predicted before it starts, and
MEASURED_STEPS = 3  # measured after this many steps
_EVENTS = {"checkpoint_damaged": "skipped a damaged checkpoint: ", "checkpoint_failed": "no checkpoint: ",
           "bad": "bad, ", "steps_missing": "metrics.jsonl has no line for step "}  # fmt: skip
_BAR, _LEAST_BAR = 40, 8


class TrainingProgress:
    """Follows ``path`` (metrics.jsonl) while its context is open; `print` prints a line above the bar."""

    def __init__(self, path: Path, steps: int, *, quiet: bool = False) -> None:
        self._follower, self._steps, self._quiet = Follower(path), steps, quiet
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = OneLine(console=self._console, transient=True)
            self._task = self._bar.add_task("", total=steps, words=("starting",))
        self._recent = RecentSteps()
        self._last_line = time.monotonic()
        self._timed = 0  # steps
        self._printed: set[str] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        self._show_new()
        if self._bar is not None:
            self._bar.stop()

    def print(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, soft_wrap=True, markup=False)

    def _print_once(self, text: str) -> None:
        """Prints a line unless it was printed before: records repeat after a roll-back."""
        if text not in self._printed:
            self._printed.add(text)
            self.print(text)

    def _follow(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            self._show_new()

    def _show_new(self) -> None:
        """Shows the newest of the new records; after a restart the file is read from its start again."""
        records = self._follower.new()
        if self._follower.truncated:
            self._recent = RecentSteps()
        for record in records:
            self._recent.add(record)
            self._show_event(record)
        timed = [record["step"] for record in records if record.get("seconds") is not None]
        if timed:
            self._show_step(timed[-1])
        if self._timed < MEASURED_STEPS <= self._timed + len(timed):
            self._say_how_long()
        self._timed += len(timed)

    def _show_event(self, record: Mapping[str, Any]) -> None:
        for name, meaning in _EVENTS.items():
            if record.get(name):
                step = record.get(f"{name}_step", record["step"])
                self._print_once(f"step {step:,}: {meaning}{record[name]}")
        if record.get("rolled_back_from"):  # the record of the step itself is soon gone
            self._print_once(f"step {record['rolled_back_from']:,}: bad, roll back")

    def _show_step(self, step: int) -> None:
        words = figures_in_words(self._recent, self._steps)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, words=words)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self.print(f"step {step:,} of {self._steps:,}: {', '.join(words)}")

    def _say_how_long(self) -> None:
        left, seconds, predicted = self._recent.left_seconds(self._steps), self._recent.step_seconds, ""
        if left is None or seconds is None or left < LONG_SECONDS:
            return
        if self._recent.predicted_seconds:
            predicted = f" (predicted {readable_seconds(self._recent.predicted_seconds)})"
        steps = counted(self._steps - self._recent.step, "more step")
        self.print(f"a step takes {readable_seconds(seconds)}{predicted}: {readable_duration(left)} for {steps}")


def figures_in_words(recent: RecentSteps, steps: int) -> tuple[str, ...]:
    """The figures of a step, the most important first: a narrow terminal cuts off the rest."""
    words = ["loss –" if recent.loss is None else f"loss {recent.loss:.3f}"]
    left = recent.left_seconds(steps)
    if left is not None:
        words.append(f"{readable_duration(left)} left")
    if recent.validation_loss is not None:
        words.append(f"held out {recent.validation_loss:.3f}")
    if recent.tokens_per_second is not None:
        words.append(f"{readable_count(recent.tokens_per_second)} tokens/s")
    if recent.step_seconds is not None:
        predicted = recent.predicted_seconds
        beside = f" (predicted {readable_seconds(predicted)})" if predicted else ""
        words.append(f"{readable_seconds(recent.step_seconds)} a step{beside}")
    if recent.mfu is not None:
        words.append(f"MFU {readable_share(recent.mfu)}")
    if recent.memory_bytes:
        words.append(readable_bytes(recent.memory_bytes))
    return tuple(words)


def fitted(head: str, words: Sequence[str], width: int) -> str:
    """``head`` and as many of the words after it as ``width`` has room for, in their order."""
    line = head
    for word in words:
        longer = f"{line}{', ' if line != head else ': '}{word}"
        if cell_len(longer) > width:
            break
        line = longer
    return line


class OneLine(Progress):
    """The step, its figures, and a bar in the remaining width."""

    def get_renderables(self) -> Iterable[RenderableType]:
        return map(_Drawn, self.tasks)


class _Drawn:
    """Measures the terminal whenever it is drawn: it may have been resized."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done, steps = int(self._task.completed), int(self._task.total or 0)
        line = fitted(f"step {done:,} of {steps:,}", self._task.fields["words"], options.max_width)
        room = min(_BAR, options.max_width - cell_len(line) - 2)
        if room >= _LEAST_BAR:
            line += "  " + Bar(done / steps if steps else 0.0, room).drawn()
        yield Text(line, no_wrap=True, overflow="crop")
