"""Sequences beyond what a model has positions for: refused where they are learned, a note where they go on."""

from __future__ import annotations

import json

import pytest

from cli.running import run
from shardwise.api.given import arguments_of
from shardwise.api.inputs import job_from
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.spec.rules import sequence_note


def job(model: str, seq: int) -> Job:
    return Job.from_dict({"model": model, "cluster": "laptop:1", "training": {"seq": seq, "global_batch": 1}})


@pytest.mark.parametrize(("model", "most"), [("gpt2", 1024), ("bert-large", 512), ("gpt3-175b", 2048)])
def test_learned_positions_end(model: str, most: int) -> None:
    assert job(model, most).training.seq == most
    with pytest.raises(SpecError, match=f"learned positions; use {most} or fewer") as caught:
        job(model, most + 1)
    assert caught.value.field == "training.seq"


def test_rotary_positions_go_on_with_a_note() -> None:
    long, short = job("llama2-7b", 8192), job("llama2-7b", 4096)
    assert "longer than the 4,096 of llama2-7b" in (sequence_note(long.model, long.training) or "")
    assert sequence_note(short.model, short.training) is None


@pytest.mark.parametrize("verb", ["plan --out -", "analyze", "verify", "dryrun"])
def test_every_verb_refuses_them_in_one_line(verb: str) -> None:
    command = f"{verb} --model gpt2 --cluster laptop:2 --seq 2048 --global-batch 2"
    found = run(*command.split())
    assert found.status == 2 and found.err.count("\n") == 1
    assert "--seq: 2,048 tokens, but gpt2 has 1,024 learned positions; use 1024 or fewer" in found.err


def test_the_note_is_in_the_json() -> None:
    command = "analyze --model llama2-7b --cluster dgx-h100:1 --zero 3 --seq 8192 --global-batch 8 --json"
    found = run(*command.split())
    assert any("longer than the 4,096" in note for note in json.loads(found.out)["notes"])


def test_without_a_length_a_model_gets_no_more_than_it_has() -> None:
    command = "analyze --model gpt2 --cluster laptop:2 --json"
    found = run(*command.split())
    assert found.status in (0, 1) and json.loads(found.out)["job"]["training"]["seq"] == 1024


def test_the_tokens_of_a_run_are_counted_in_such_sequences() -> None:
    given = {"model": "gpt2", "cluster": "laptop:1", "training.tokens": 1_000_000, "training.global_batch": 8}
    trained, _ = job_from(arguments_of(given), trains=True)
    assert (trained.training.seq, trained.run.steps) == (1024, 123)
