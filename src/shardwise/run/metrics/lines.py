"""The metrics of a run as lines of JSON, one file for all its starts, and a summary of the run from them.

A line that cannot be written waits for space. A broken line stays in the file; readers skip it, and `missing_steps`
lists the gaps.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from shardwise.spec.errors import SpecError
from shardwise.spec.files import bounded_lines, parse_json

NAME = "metrics.jsonl"
REPEATED_BYTES = 16_384
_ALL_BYTES = 2**62
_MARK_BYTES = 256
MOST_LINE_BYTES = 2**22  # a line may list thousands of ranks
MOST_WAITING = 10_000  # lines held back while the disk is full
# Fields that readers compute with; a line in which one is not a number is broken.
_AMOUNTS = (
    *("loss", "validation_loss", "seconds", "tokens_per_second", "mfu", "data_wait_seconds"),
    *("memory_bytes", "predicted_seconds", "predicted_memory_bytes", "interval", "checkpoint"),
)
RECENT_LOSSES = 10
WARM_UP = 3  # steps after a start, which take longer than later ones


class MetricLines:
    """Appends to ``folder``/metrics.jsonl, after truncating what an earlier attempt wrote beyond ``step``."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / NAME
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=MOST_WAITING)
        self._file = open_lines(self.path)
        cut_after(self.path, step or -1)  # a run from step 0 writes everything again

    def cut_after(self, step: int) -> None:
        """Drops later steps: the run has rolled back."""
        cut_after(self.path, step)
        self._waiting = deque((entry for entry in self._waiting if entry[0] <= step), maxlen=MOST_WAITING)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one line; on a full disk it waits, and never stops the run."""
        # JSON has no NaN and no infinity.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        line = json.dumps(finite).encode() + b"\n"
        self._waiting.append((record["step"], line))
        self._write_waiting()

    def close(self) -> None:
        self._write_waiting()
        self._file.close()

    def _write_waiting(self) -> None:
        while self._waiting and self._written(self._waiting[0][1]):
            self._waiting.popleft()

    def _written(self, line: bytes) -> bool:
        try:
            written = self._file.write(line)
            if written == len(line):
                return True
            self._file.truncate(self._file.tell() - written)  # half a line would spoil the next one
        except OSError:
            pass
        return False


def open_lines(path: Path) -> FileIO:
    """The file to append to; raises SpecError if it cannot be written."""
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise SpecError(str(path), problem, "make room, or choose another folder") from None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete records of a file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        yield from (record for line in bounded_lines(file, MOST_LINE_BYTES) if (record := _record(line)) is not None)


class Follower:
    """`new` returns the records since its last call, or since the follower was made.

    After the file was truncated (``truncated``) it returns the last records again; a follower `of_all` returns all.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._repeats = path, REPEATED_BYTES
        self._at = path.stat().st_size if path.is_file() else 0
        self._before: bytes | None = None  # the bytes before: the file may shrink and grow again between two calls
        self.truncated = False

    @classmethod
    def of_all(cls, path: Path) -> Follower:
        """A follower that begins with the records that exist."""
        follower = cls(path)
        follower._at, follower._repeats = 0, _ALL_BYTES
        return follower

    def new(self) -> list[dict[str, Any]]:
        self.truncated = False
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._at or (self._before is not None and self._stands_before(file) != self._before):
                self.truncated = True
                self._at = max(0, size - self._repeats)
            file.seek(self._at)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            self._before = self._stands_before(file)
        records = (_record(line) for line in whole.splitlines(keepends=True))
        return [record for record in records if record is not None]

    def _stands_before(self, file: BufferedReader) -> bytes:
        first = max(0, self._at - _MARK_BYTES)
        file.seek(first)
        return file.read(self._at - first)


def cut_after(path: Path, step: int) -> None:
    """Cuts off the lines of later steps and an incomplete last line; followers can continue."""
    if not path.is_file():
        return
    end = at = 0
    gone_by = False  # a line of a later step was seen after the last one kept
    with path.open("r+b") as file:
        for line in file:
            at += len(line)
            record = _record(line)
            if record is not None and record["step"] > step:
                gone_by = True
            elif record is not None or (line.endswith(b"\n") and not gone_by):
                end, gone_by = at, False
        file.truncate(end)


def missing_steps(records: Iterable[Mapping[str, Any]], reached: float | None = None) -> list[tuple[int, int]]:
    """Ranges of steps (first, last) that are done but have no line; ``reached`` is the last step done.

    A line's ``interval`` is the number of steps between two lines, if more than one.
    """
    gaps = []
    last, apart = 0, 1
    for record in records:
        if "loss" not in record:
            continue
        step, interval = record["step"], int(record.get("interval") or 1)
        if step - last > (max(apart, interval) if last else interval):
            gaps.append((last + 1, step - 1))
        last, apart = max(last, step), interval
    if reached is not None and reached - last >= apart:
        gaps.append((last + 1, int(reached)))
    return gaps


def spelled_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Such as "7, 11 to 14"."""
    return ", ".join(f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in ranges)


def _record(line: bytes | None) -> dict[str, Any] | None:
    """None for a line that is incomplete (its writer was killed) or not written by `MetricLines`."""
    try:
        record = parse_json(line) if line is not None and line.endswith(b"\n") else None
    except SpecError:
        return None
    if not isinstance(record, dict) or not all(_is_amount(record.get(name)) for name in ("step", *_AMOUNTS)):
        return None
    return record if isinstance(record.get("step"), int) and record["step"] >= 0 else None


def _is_amount(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


@dataclass(frozen=True)
class RunSummary:
    """Medians over the steps of a run; None if nothing is known."""

    steps: int
    first_loss: float | None
    last_loss: float | None
    recent_loss: float | None  # median of the last `RECENT_LOSSES` steps
    first_validation: float | None
    last_validation: float | None
    step_seconds: float | None
    predicted_seconds: float | None
    memory_bytes: float | None
    predicted_memory_bytes: float | None
    tokens_per_second: float | None
    mfu: float | None
    data_wait_share: float | None
    missing_steps: str = ""  # steps without a line in metrics.jsonl, such as "11 to 14"


def summarise(records: Iterable[Mapping[str, Any]]) -> RunSummary:
    """From the records of metrics.jsonl; steps whose memory was counted, which is slow on a CPU, are not timed."""
    everything = list(records)
    steps = [record for record in everything if record.get("seconds") is not None]
    timed = [record for record in steps[WARM_UP:] if "memory_bytes_of_ranks" not in record] or steps
    losses = [record["loss"] for record in steps if record.get("loss") is not None and not record.get("bad")]
    validation = [record["validation_loss"] for record in everything if record.get("validation_loss") is not None]
    seconds = _median(record["seconds"] for record in timed)
    waited = sum(record.get("data_wait_seconds") or 0.0 for record in timed)
    return RunSummary(
        steps=max((record["step"] for record in everything), default=0),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        recent_loss=_median(losses[-RECENT_LOSSES:]),
        first_validation=validation[0] if validation else None,
        last_validation=validation[-1] if validation else None,
        step_seconds=seconds,
        predicted_seconds=_last(steps, "predicted_seconds"),
        memory_bytes=max(
            (record["memory_bytes"] for record in steps if record.get("memory_bytes") is not None), default=None
        ),
        predicted_memory_bytes=_last(steps, "predicted_memory_bytes"),
        tokens_per_second=_median_of(timed, "tokens_per_second"),
        mfu=_median_of(timed, "mfu"),
        data_wait_share=waited / sum(record["seconds"] for record in timed) if timed else None,
        missing_steps=spelled_ranges(missing_steps(everything, _last(everything, "checkpoint"))),
    )


def _median(values: Iterable[float]) -> float | None:
    some = list(values)
    return statistics.median(some) if some else None


def _median_of(records: list[Mapping[str, Any]], name: str) -> float | None:
    return _median(record[name] for record in records if record.get(name) is not None)


def _last(records: list[Mapping[str, Any]], name: str) -> float | None:
    return next((record[name] for record in reversed(records) if record.get(name) is not None), None)


# -- the newest figures: for the progress bar, `status` and Prometheus -------------------------------

RECENT = 20  # steps whose median is the pace


class RecentSteps:
    """Figures from records of metrics.jsonl, given to `add` in turn; None until a record has one."""

    def __init__(self) -> None:
        self.step = 0
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.tokens_per_second: float | None = None
        self.mfu: float | None = None
        self.predicted_seconds: float | None = None
        self.predicted_memory_bytes: float | None = None
        self.memory_bytes: float | None = None
        self.memory_bytes_of_ranks: tuple[float, ...] = ()
        self.interval = 1  # steps between two records
        self.useful_seconds = 0.0  # of steps that were not bad
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._last_seconds: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        self.step = record["step"]
        if record.get("validation_loss") is not None:
            self.validation_loss = record["validation_loss"]
        seconds = record.get("seconds")
        if seconds is None:
            return
        self.loss = record.get("loss")
        for name in ("tokens_per_second", "mfu", "predicted_seconds", "predicted_memory_bytes", "memory_bytes"):
            if record.get(name) is not None:
                setattr(self, name, record[name])
        of_ranks = record.get("memory_bytes_of_ranks")
        if of_ranks is None:  # otherwise counting slowed the step down
            self._recent.append(seconds)
        elif isinstance(of_ranks, list):
            self.memory_bytes_of_ranks = tuple(of_ranks)
        self._last_seconds = seconds
        self.interval = int(record.get("interval") or 1)
        if not record.get("bad"):
            self.useful_seconds += seconds * self.interval

    @property
    def step_seconds(self) -> float | None:
        """Median of the newest steps."""
        return statistics.median(self._recent) if self._recent else self._last_seconds

    def left_seconds(self, steps: int) -> float | None:
        """Time until ``steps`` are done, at the pace of the newest."""
        seconds = self.step_seconds
        return None if seconds is None else max(0, steps - self.step) * seconds
