"""Metrics of a run: lines that are cut and followed, and TensorBoard's files read back by their format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from shardwise.train.metrics.lines import Follower, MetricLines, cut_after, read_lines
from shardwise.train.metrics.summary import summarise
from shardwise.train.metrics.tensorboard import EventFile, _checksum


def steps(folder: Path) -> list[int]:
    return [one["step"] for one in read_lines(folder / "metrics.jsonl")]


def test_no_step_is_twice_in_the_file_after_a_restart(tmp_path: Path) -> None:
    lines = MetricLines(tmp_path, 0)
    for step in range(1, 6):
        lines.write({"step": step, "loss": 1.0 / step})
    lines.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')  # the process was killed here
    again = MetricLines(tmp_path, 3)
    again.write({"step": 4, "loss": float("nan")})
    again.close()
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert list(read_lines(tmp_path / "metrics.jsonl"))[-1]["loss"] is None


def test_who_follows_a_file_sees_every_record_and_after_a_cut_the_last_ones_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.new() == []
    lines = MetricLines(tmp_path, 0)
    lines.write({"step": 1})
    lines.write({"step": 2})
    assert [one["step"] for one in follower.new()] == [1, 2]
    assert follower.new() == []
    cut_after(path, 1)
    assert follower.new() == [{"step": 1}]
    lines.write({"step": 2, "again": 1})
    assert follower.new() == [{"step": 2, "again": 1}]


def messages(path: Path) -> list[bytes]:
    """The records of an event file; every checksum is compared."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = data[12 : 12 + length]
        assert data[8:12] == _checksum(data[:8])
        assert data[12 + length : 16 + length] == _checksum(event)
        found.append(event)
        data = data[16 + length :]
    return found


def test_event_files_have_the_format_of_tensorboard(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    events.forget_after(299)
    events.scalars(301, {"loss": 2.5})
    events.close()
    (path,) = tmp_path.iterdir()
    version, restart, scalars = messages(path)
    assert version.endswith(b"brain.Event:2")
    assert restart[9:] == b"\x10\xac\x02" + b"\x3a\x02\x08\x01"  # step 300; session_log {status: START}
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 2.5)
    assert scalars[9:] == b"\x10\xad\x02" + b"\x2a\x0d" + b"\x0a\x0b" + value
    # RFC 3720, appendix B.4: CRC-32C of 32 zeros is 0x8a9136aa, masked as TFRecord does
    crc = 0x8A9136AA
    assert _checksum(bytes(32)) == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_a_summary_leaves_out_what_is_slow_for_other_reasons() -> None:
    def record(step: int, seconds: float, **more: Any) -> dict[str, Any]:
        return {"step": step, "loss": 5 - step / 10, "seconds": seconds, "tokens_per_second": 8 / seconds, "mfu": 0.1,
                "data_wait_seconds": 0.0, "predicted_seconds": 0.5, **more}  # fmt: skip

    counted = {"memory_bytes": 100, "memory_bytes_of_ranks": [100, 90]}
    slow, quick = [record(step, 9.0) for step in (1, 2, 3)], [record(step, 1.0) for step in (5, 6)]
    evaluated = [{"step": 0, "validation_loss": 6.0}, {"step": 6, "validation_loss": 3.0}]
    records = [evaluated[0], *slow, record(4, 7.0, **counted), *quick, evaluated[1]]
    found = summarise(records)
    assert found.step_seconds == pytest.approx(1.0)
    assert (found.memory_bytes, found.predicted_seconds) == (100, 0.5)
    assert (found.first_validation, found.last_validation) == (6.0, 3.0)
    assert summarise([]).step_seconds is None
