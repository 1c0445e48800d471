"""What a run records: events of its starts and ends, and a line per step."""

from __future__ import annotations

import importlib
import json
import math
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from socket import gethostname
from typing import Any

from shardwise.cost.compute.flops import flops_per_token
from shardwise.run.metrics.lines import (
    MOST_LINE_BYTES,
    NAME,
    MetricLines,
    missing_steps,
    open_lines,
    read_lines,
    spelled_ranges,
)
from shardwise.spec.errors import SpecError
from shardwise.spec.files import bounded_lines, parse_json, read_json
from shardwise.spec.job import Job

# -- events, as lines of JSON ------------------------------------------------------------------------
# The launcher writes them, or rank 0 if another program started the ranks. A run without an end was killed, or is still
# running.

STARTED, FAILED, ENDED = "started", "failed", "ended"


@dataclass(frozen=True)
class RunEvent:
    at: float  # seconds since the epoch
    kind: str
    attempt: int  # counted from 0 within one command
    text: str = ""
    folder: str | None = None  # where the ranks of the attempt report
    host: str = ""  # that wrote it
    status: int | None = None  # exit status, of an end
    stopped: bool = False  # by request


class EventLog:
    """Appends to events.jsonl, even after its folder is moved; a full disk loses an event, never the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def write(self, kind: str, attempt: int, text: str = "", **more: Any) -> None:
        line = json.dumps(
            {"at": time.time(), "kind": kind, "attempt": attempt, "text": text, "host": gethostname(), **more}
        )
        with suppress(OSError):
            self._file = self._file or self._path.open("ab", buffering=0)
            self._file.write(f"{line}\n".encode())

    def ended(self, attempt: int, status: int, *, stopped: bool = False, why: str = "") -> None:
        self.write(ENDED, attempt, why, status=status, stopped=stopped)


@contextmanager
def ends_recorded(log: EventLog, attempt: int) -> Iterator[None]:
    """Records the run's end if the block raises."""
    try:
        yield
    except BaseException as error:
        log.ended(attempt, getattr(error, "status", 1), why=str(error))
        raise


def read_events(path: Path) -> list[RunEvent]:
    """The complete events, oldest first."""
    events = []
    with suppress(OSError), path.open("rb") as file:
        for line in bounded_lines(file, MOST_LINE_BYTES):
            with suppress(ValueError, TypeError):
                event = RunEvent(**parse_json(line or b""))
                if isinstance(event.at, (int, float)) and isinstance(event.attempt, int):
                    events.append(event)
    return events


# -- what rank 0 records: a line per step, with the prediction, to every sink that the run asks for ---

PREDICTION = "prediction.json"
TENSORBOARD = "tensorboard"


def write_prediction(folder: Path, step_seconds: float, memory_bytes: float) -> None:
    content = {"predicted_seconds": step_seconds, "predicted_memory_bytes": memory_bytes}
    (folder / PREDICTION).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_prediction(folder: Path) -> dict[str, float]:
    """Empty if the job was not priced, or the file is damaged."""
    try:
        prediction = read_json(folder / PREDICTION, "prediction")
        return {name: float(prediction[name]) for name in ("predicted_seconds", "predicted_memory_bytes")}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


class Recorder:
    """Writes the records of rank 0 to all sinks; ``step`` is where the run resumes."""

    def __init__(self, job: Job, folder: Path, step: int) -> None:
        self.job = job
        self.lines = MetricLines(folder, step)
        self.sinks: list[EventFile | _WeightsAndBiases] = []
        if job.run.logging.tensorboard:
            self.sinks.append(EventFile(folder / TENSORBOARD))
            if step:
                self.sinks[-1].forget_after(step)
        if job.run.logging.wandb is not None:
            self.sinks.append(_WeightsAndBiases(job, job.run.logging.wandb, folder))
        self.predicted = read_prediction(folder)
        peak = job.peak_flops
        self._least_seconds = (
            flops_per_token(job.model, job.training.seq, tuning=job.training.tuning) * job.tokens_per_step / peak
        )
        missing = spelled_ranges(missing_steps(read_lines(self.lines.path), step))
        if missing and not any(record.get("steps_missing") == missing for record in read_lines(self.lines.path)):
            self.write({"step": step, "steps_missing": missing})

    def step(self, step: int, seconds: float, figures: Mapping[str, Any]) -> None:
        speed = {
            "seconds": seconds,
            "tokens_per_second": self.job.tokens_per_step / seconds,
            "mfu": self._least_seconds / seconds,
        }
        interval = self.job.run.logging.interval
        every = {"interval": interval} if interval > 1 else {}
        self.write({"step": step, **figures, **every, **speed, **self.predicted})

    def write(self, record: Mapping[str, Any]) -> None:
        self.lines.write(record)
        scalars = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
        }
        for sink in self.sinks:
            sink.scalars(record["step"], scalars)

    def rolled_back(self, step: int) -> None:
        self.lines.cut_after(step)
        for sink in self.sinks:
            sink.forget_after(step)

    def close(self) -> None:
        self.lines.close()
        for sink in self.sinks:
            sink.close()


def require_writable(job: Job, folder: Path) -> None:
    """Raises SpecError, before a process starts, if rank 0 could not record."""
    open_lines(folder / NAME).close()
    if job.run.logging.tensorboard:
        make_folder(folder / TENSORBOARD)


class _WeightsAndBiases:
    def __init__(self, job: Job, project: str, folder: Path) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise SpecError("run.logging.wandb", "the package is not installed", "pip install wandb") from None
        # The same identity after a restart, so that curves continue.
        identity = folder.resolve().as_posix().strip("/").replace("/", "-")[-64:]
        self._run: Any = wandb.init(project=project, id=identity, resume="allow", dir=str(folder), config=job.to_dict())

    def forget_after(self, step: int) -> None:
        """Weights & Biases keeps the first record of every step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


# -- TensorBoard event files ---------------------------------------------------------------------------


_START = 1  # SessionLog.START: readers forget what they have of this step and later ones


@contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise SpecError(str(folder), problem, "make room, or run.logging.tensorboard: false") from None


def make_folder(folder: Path) -> None:
    """The folder for event files; raises SpecError if it cannot be made."""
    with _guarded(folder):
        folder.mkdir(parents=True, exist_ok=True)


class EventFile:
    """Scalars in a new TensorBoard event file of ``folder``, written without TensorBoard's dozen packages.

    A file is records of length, checksum, message, checksum (tensorflow/core/lib/io/record_writer.h); a message is a
    protocol buffer `Event` (tensorflow/core/util/event.proto). Readers take all files of a folder together.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        name = f"events.out.tfevents.{int(time.time())}.{gethostname()}.{os.getpid()}"
        with _guarded(folder):
            self._file = (folder / name).open("ab", buffering=0)
        self._write(_bytes(3, b"brain.Event:2"))

    def forget_after(self, step: int) -> None:
        """Makes readers drop what they have of later steps, which will be written again."""
        self._write(_number(2, step + 1) + _bytes(7, _number(1, _START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in values.items())
        self._write(_number(2, step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, message: bytes) -> None:
        event = struct.pack("<Bd", 1 << 3 | 1, time.time()) + message
        length = struct.pack("<Q", len(event))
        record = length + _checksum(length) + event + _checksum(event)
        with suppress(OSError):  # a full disk loses the record, never the run
            written = self._file.write(record)
            if written < len(record):  # readers would stop at half a record
                self._file.truncate(self._file.tell() - written)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


@cache
def _table() -> tuple[int, ...]:
    """CRC-32C, one entry for each byte."""
    entries = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        entries.append(number)
    return tuple(entries)


def _checksum(data: bytes) -> bytes:
    table, value = _table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
