"""Another model, cluster or size never ends in an error: the nearest layout that can be priced takes its place."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardwise.spec.errors import SpecError
from shardwise.ui.adapting import adapted
from shardwise.ui.answer import answer
from shardwise.ui.choices import catalogue
from shardwise.ui.given import job_of
from ui.serving import JOB
from ui.test_choices import JOBS, changed

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 64)
STARTS: dict[str, dict[str, Any]] = {
    **JOBS,
    "experts far apart": {"model": "deepseek-v3", "cluster": "dgx-h100:32", "pp": 8, "stage_layers": "balanced",
                          "ep": 32, "global_batch": 2048, "seq": 4096, "zero": 1},
    "own stages": {**JOB, "stage_layers": [41, 39], "microbatch": 2},
    "long": {"model": "llama3-8b", "cluster": "dgx-h100:4", "cp": 8, "global_batch": 32, "seq": 131072, "zero": 3},
    "zero bubble": {**JOB, "pp": 4, "schedule": "zb-h1"},
    "sharded in groups": {"model": "llama3-8b", "cluster": "dgx-h100:8", "zero": 3, "shard_group": 8,
                          "global_batch": 64, "seq": 8192},
}  # fmt: skip


@pytest.mark.parametrize(
    "by, words",
    [
        ({"model": "deepseek-v3"}, "2 does not divide 61 layers: stage layers default → balanced"),
        ({"cluster": "workstation-4090:1"}, "does not divide the cluster's 4 devices: tp 8 → 4, pp 2 → 1"),
        ({"model": "gpt2"}, "8 does not divide 12 query heads: seq 8192 → 1024, tp 8 → 4"),
        ({"cluster": "dgx-h100:64", "tp": 1, "pp": 1, "global_batch": 64}, "global batch 64 → 512"),
    ],
)
def test_the_least_change_is_taken_and_told(by: dict[str, Any], words: str) -> None:
    near = adapted({"job": {**JOB, **by}, "keep": ["model", "cluster"]})
    assert words in near["words"]
    job_of(changed({**JOB, **by}, near["set"]))


def test_what_was_asked_for_stays_and_what_is_no_layout_is_an_error() -> None:
    for by in ({"seq": 200_000, "model": "gpt2"}, {"model": "nothing"}, {"cluster": "dgx-h100:0"}, {"seq": 0}, {}):
        assert adapted({"job": {**JOB, **by}, "keep": ["seq", "model"]}) == {"set": None, "words": ""}
    for given in ({}, {"job": 1}, {"job": JOB, "keep": "seq"}):
        with pytest.raises(SpecError):
            adapted(given)


def moves(rng: random.Random, controls: dict[str, Any]) -> dict[str, Any]:
    """What somebody may click or type next: another model or cluster, a size, a value that is offered."""
    known = catalogue()
    kind = rng.choice(["model", "cluster", "size", "value", "value", "batch"])
    if kind == "model":
        return {"model": rng.choice(known["models"])["name"]}
    if kind == "cluster":
        return {"cluster": rng.choice(known["clusters"])["name"], "gpus": None, "dp": None}
    if kind == "size":
        return {"cluster": f"dgx-h100:{rng.choice(SIZES)}", "gpus": None, "dp": None}
    if kind == "batch":
        return {"global_batch": 2 ** rng.randrange(14)}
    offered = [one["set"] for values in controls.values() for one in values if "refused" not in one and one["set"]]
    return dict(rng.choice(offered)) if offered else {}


def walk(name: str, steps: int) -> None:
    rng, given = random.Random(name), STARTS[name]
    shown = answer(given)
    for _ in range(steps):
        by = moves(rng, shown["controls"])
        after = changed(given, by)
        try:
            shown = answer(after)
        except SpecError as error:
            near = adapted({"job": after, "keep": list(by)})
            if near["set"] is None and by.keys() <= {"global_batch"}:
                assert "global_batch" in error.field, (given, by, error)  # beside the field that was typed into
                continue
            assert near["set"], (given, by, str(error))
            assert near["set"].keys().isdisjoint(by), (given, by, near)
            after = changed(after, near["set"])
            shown = answer(after)
        assert shown["verdict"]["fit_words"]
        given = after


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_few_changes_of_controls_end_in_a_verdict(name: str) -> None:
    walk(name, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_thirty_changes_of_controls_end_in_a_verdict(name: str) -> None:
    walk(name, 30)
