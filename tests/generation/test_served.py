"""A model on two ranks that stay: the tokens of one process, batch after batch; nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from generation.cases import PROMPTS, folder_of, model_of, tokens_of
from launch.running import alive, wait_until
from shardwise.generation.request import GenerationRequest
from shardwise.generation.served import RankGone, ServedModel
from shardwise.spec.errors import SpecError


@pytest.fixture(scope="module")
def request_of(tmp_path_factory: pytest.TempPathFactory) -> GenerationRequest:
    return replace(folder_of("llama", tmp_path_factory.mktemp("weights"))[1], tp=2)


def test_two_ranks_serve_batches_until_one_is_lost(request_of: GenerationRequest) -> None:
    expected = tokens_of(model_of(replace(request_of, tp=1)), replace(request_of, tp=1))
    with contextlib.closing(ServedModel(request_of)) as model:
        for _ in range(2):
            found, times = model.run_batch(PROMPTS, 0)
            assert [list(one.tokens) for one in found] == expected
            assert times.tokens == sum(map(len, expected)) and times.load_seconds > 0
        first, second = (process.pid for process in model._processes)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RankGone):
            model.run_batch(PROMPTS, 0)
    assert not alive(first)


@pytest.mark.slow
def test_what_ranks_refuse_is_raised(request_of: GenerationRequest, tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        ServedModel(replace(request_of, source=str(tmp_path)))


OWNER = """
import sys, time
from shardwise.generation.request import GenerationRequest
from shardwise.generation.served import ServedModel
model = ServedModel(GenerationRequest(sys.argv[1], tp=2))
print(*(process.pid for process in model._processes), flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def owner(source: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OWNER, source]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, [int(one) for one in process.stdout.readline().split()]


@pytest.mark.slow
def test_ranks_end_with_who_started_them(request_of: GenerationRequest) -> None:
    with owner(request_of.source) as (process, ranks):
        process.kill()
    assert len(ranks) == 2
    wait_until(lambda: not any(map(alive, ranks)), 30)
