"""A rank finds its place in the world that torchrun has started, or says in a line what is missing."""

from __future__ import annotations

import pytest

from shardwise.run.environment.reader import Started, started
from shardwise.spec import SpecError

THERE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "host-0", "MASTER_PORT": "29400"}


def test_a_place_among_hosts() -> None:
    assert started({}) is None
    here = started(THERE)
    assert here == Started(5, 8, 4, "host-0", 29400)
    assert here is not None and here.hosts == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": None}, "RANK: is not set; start all ranks by torchrun, srun or mpirun"),
        ({"RANK": "first"}, "RANK: 'first' is not a number"),
        ({"RANK": "8"}, "RANK: 8 of a world of 8"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE: is not set"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE: 8 ranks do not fill hosts of 3"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: 8 ranks do not fill hosts of 0"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: 'http' is not a number"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(change: dict[str, str | None], said: str) -> None:
    with pytest.raises(SpecError) as error:
        started({name: value for name, value in {**THERE, **change}.items() if value is not None})
    assert said in str(error.value)
