"""What ranks write for others to read: damage in it costs what it says, never who reads it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from shardwise.run.attempt import (
    FailureRecord,
    rank_file,
    read_failure,
    read_progress,
    reserve_failure,
    write_beat,
    write_failure,
    write_progress,
)
from shardwise.run.records import path_of, read_records
from shardwise.spec.errors import SpecError


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"rank": 0}', '{"strange": 1}'])
def test_a_failure_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    reserve_failure(tmp_path, 0)
    record = FailureRecord(0, 1.0, "step", 3, "OSError", "no disk", "at the end", mistake=False)
    write_failure(tmp_path, record)
    assert read_failure(tmp_path, 0) == record
    rank_file(tmp_path, 0, "failed.json").write_text(text)
    assert read_failure(tmp_path, 0) is None


def test_a_phase_that_there_is_none_of_is_no_progress(tmp_path: Path) -> None:
    file = os.open(rank_file(tmp_path, 0, "progress"), os.O_RDWR | os.O_CREAT)
    try:
        assert read_progress(file) is None
        write_progress(file, 1, "step", 7, 2.0, 0.0)
        write_beat(file, 3.0)
        found = read_progress(file)
        assert found is not None
        assert (found.phase, found.step) == ("step", 7)
        for phase in (-1, 77, 2**40):
            os.pwrite(file, struct.pack("=q", phase), 8)
            assert read_progress(file) is None
    finally:
        os.close(file)


HALF = '{"rank": 0, "node": 0, "device": "", "clock_error": 0, "groups": []}'


@pytest.mark.parametrize("content", ["[]", "{}", "{", HALF])
def test_a_profile_that_cannot_be_read_is_one_line(tmp_path: Path, content: str) -> None:
    path_of(tmp_path, 0).write_text(content)
    with pytest.raises(SpecError, match="is not a record of a rank"):
        read_records(tmp_path, 1)
