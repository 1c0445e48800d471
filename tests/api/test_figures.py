"""Figures of results are paths in words, which the type checker does not follow: each is read and has its type."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import shardwise
from shardwise.api.results import Figure

SMALL: dict[str, Any] = {"model": "tiny", "cluster": "laptop:2", "seq": 32, "global_batch": 4}


@pytest.mark.parametrize(
    ("verb", "keywords", "seconds"),
    [
        (shardwise.analyze, {**SMALL, "dp": 2}, {"predicted_seconds", "floor_seconds", "mfu", "memory_bytes"}),
        (shardwise.plan, SMALL, {"predicted_seconds", "mfu", "memory_bytes"}),
    ],
)
def test_every_figure_is_there(verb: Any, keywords: dict[str, Any], seconds: set[str]) -> None:
    result = verb(**keywords)
    figures = {name: getattr(result, name) for name, one in inspect.getmembers(type(result)) if isinstance(one, Figure)}
    assert seconds < set(figures)
    for name in seconds:
        assert isinstance(figures[name], float) and figures[name] > 0
    assert figures["predicted_seconds_low"] < figures["predicted_seconds"] < figures["predicted_seconds_high"]
    assert isinstance(figures["job"], shardwise.Job)
