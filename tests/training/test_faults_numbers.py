"""Bad data and bad numbers: one line and exit status 2, or what the policy says, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cli.running import error_line
from training.faults import STEPS, final_state, small_job, train
from training.faulty_worker import Fault
from training.runs import VOCAB, write_shards


@pytest.mark.parametrize(
    ("suffix", "spoil", "said"),
    [
        (
            ".idx",
            lambda raw: b"MMIDIDY" + raw[7:],
            "is not an index of token shards (its first bytes differ); build it again",
        ),
        (".idx", lambda raw: raw[:-9], "bytes, its header says"),
        (".bin", lambda raw: raw[:-2], "bytes, its index says"),
    ],
    ids=["magic", "short index", "short tokens"],
)
def test_a_bad_shard_is_named_before_anything_starts(tmp_path: Path, suffix: str, spoil: Any, said: str) -> None:
    shards = write_shards(tmp_path / "words")
    path = Path(shards + suffix)
    path.write_bytes(spoil(path.read_bytes()))
    line = error_line(train(small_job(shards), tmp_path / "run").result)
    assert line.startswith(f"{path}: ")
    assert said in line
    assert not (tmp_path / "run").exists()


def test_a_token_beyond_the_vocabulary_ends_a_run(tmp_path: Path) -> None:
    """It is met by one rank in the middle of the run; no restart is tried, and what was committed stays."""
    shards = write_shards(tmp_path / "words")
    tokens = np.memmap(f"{shards}.bin", np.uint16, "r+")
    tokens[len(tokens) // 2] = VOCAB + 7
    tokens.flush()
    long = {"steps": 100, "checkpoints": {"steps": 50, "seconds": None}}
    with mock.patch(
        "shardwise.run.data.run_data._PROBED_TOKENS", 64
    ):  # of a large shard only its beginning is looked at
        ended = train(small_job(shards, run=long), tmp_path / "run")
    ended.require(
        2, f"{shards}.bin: token {len(tokens) // 2:,} is {VOCAB + 7}, the vocabulary ends at {VOCAB}; use the"
    )
    assert ended.said.count("started:") == 1
    assert "Traceback" not in ended.said
    ended.require_whole()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "roll-back", "stop"])
def test_gradients_of_one_rank_that_are_not_finite(tmp_path: Path, policy: str) -> None:
    """No weight moves on any rank. To leave a batch out is to train on the others: as in a run that never met it."""
    shards = write_shards(tmp_path / "words")
    job = small_job(shards, run={"non_finite": {"policy": policy}})
    ended = train(job, tmp_path / "run", Fault("nan", "backward", 3, rank=1))
    ended.require_whole()
    bad = [one["step"] for one in ended.lines() if one.get("bad")]
    if policy == "stop":
        ended.require(2, "run.non_finite.policy: stop: step 4: its gradients are not finite; look at the data")
        assert bad == [4]
        again = train(small_job(shards), tmp_path / "run")  # the policy is another now
        again.require(0)
        assert final_state(again.folder)[1]["optimizer_steps"] == STEPS - 1
        return
    ended.require(0, "step 4: bad, left out" if policy == "skip" else "step 4: bad, roll back")
    numbers = final_state(ended.folder)[1]
    assert numbers["optimizer_steps"] == (STEPS - 1 if policy == "skip" else STEPS)
    assert numbers["data"]["left_out"] == ([] if policy == "skip" else [3])
    same = train(job, tmp_path / "again", Fault("nan", "backward", 3, rank=0))  # whichever rank it was
    assert final_state(same.folder) == final_state(ended.folder)
