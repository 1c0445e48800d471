"""Training across virtual nodes: it learns the same to the last bit, sits out a cut link, and names one that stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from required import require
from shardwise.launch.emulate.network import Network, why_not, wired
from shardwise.run.metrics.lines import read_lines
from shardwise.spec.emulation import Emulation
from shardwise.spec.files import read_yaml
from shardwise.spec.wiring import Wiring
from training.faults import Ended, final_state, small_job, train
from training.runs import write_shards

LINK = ("--emulate", "2x1,1Gbit,1ms")
CUT_SECONDS = 3.0


@pytest.fixture(autouse=True, scope="module")
def machine() -> None:
    require("emulate", why_not())


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory: pytest.TempPathFactory, shards: str) -> tuple[Any, ...]:
    ended = train(small_job(shards, run={"steps": 4}), tmp_path_factory.mktemp("undisturbed") / "run")
    ended.require(0)
    return final_state(ended.folder, 4)


@contextmanager
def disturbed(folder: Path, step: int, disturb: Callable[[Network], None]) -> Iterator[None]:
    """``disturb`` happens to the network of a run once it has told of ``step``."""

    def after_step(network: Network, ended: threading.Event) -> None:
        while not ended.is_set() and not any(one["step"] >= step for one in read_lines(folder / "metrics.jsonl")):
            time.sleep(0.02)
        if not ended.is_set():
            disturb(network)

    @contextmanager
    def own(emulation: Emulation, wiring: Wiring | None) -> Iterator[Network]:
        ended = threading.Event()
        with wired(emulation, wiring) as network:
            thread = threading.Thread(target=after_step, args=(network, ended))
            thread.start()
            try:
                yield network
            finally:
                ended.set()
                thread.join()

    with mock.patch("shardwise.launch.run.wired", own):
        yield


def cut_for_a_while(network: Network) -> None:
    network.partition(0, 1)
    time.sleep(CUT_SECONDS)
    network.heal()


@pytest.mark.slow
def test_a_run_sits_out_a_short_cut_and_ends_with_the_same_bits(
    tmp_path: Path, shards: str, on_one_machine: tuple[Any, ...]
) -> None:
    folder = tmp_path / "run"
    with disturbed(folder, 1, cut_for_a_while):
        ended = train(small_job(shards, run={"steps": 4}), folder, arguments=LINK)
    ended.require(0)
    assert "failed" not in ended.said
    assert "the prediction is not for 2x1,1Gbit,1ms" in ended.said
    assert final_state(folder, 4) == on_one_machine
    assert slowest_step(ended) > CUT_SECONDS
    assert read_yaml(folder / "job.yaml", "job file")["run"]["emulate"] == "2x1,1Gbit,1ms"


def slowest_step(ended: Ended) -> float:
    return max(one["seconds"] for one in ended.lines() if "seconds" in one)


@pytest.mark.slow
def test_a_cut_that_stays_is_named(tmp_path: Path, shards: str) -> None:
    folder = tmp_path / "run"
    timeouts = {"start": 100, "step": 6, "checkpoint": 60}
    with disturbed(folder, 2, lambda network: network.partition(0, 1)):
        ended = train(small_job(shards, run={"restarts": 0, "timeouts": timeouts}), folder, arguments=LINK)
    ended.require(1, "no answer between 10.77.0.1 (rank 0) and 10.77.0.2 (rank 1)")
