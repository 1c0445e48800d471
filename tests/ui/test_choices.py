"""The values of the controls: what may be chosen is a job, and what may not is refused by the job's own rules."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.planner.search.supported import findings_of
from shardwise.spec.errors import SpecError
from shardwise.ui.choices import choices
from shardwise.ui.given import job_of
from ui.serving import JOB

JOBS: dict[str, dict[str, Any]] = {
    "dense": JOB,
    "experts": {"model": "mixtral-8x7b", "cluster": "dgx-h100:4", "ep": 8, "global_batch": 64, "seq": 4096, "zero": 1},
    "stages": {**JOB, "schedule": "interleaved", "interleave": 4, "pp": 4, "stage_layers": [5] * 16},
    "one device": {"model": "gpt2", "cluster": "workstation-4090", "global_batch": 8, "seq": 1024},
    "torus": {"model": "llama3-8b", "cluster": "tpu-v5p:4x4x4", "global_batch": 128, "seq": 8192, "zero": 3, "cp": 2},
}


def changed(given: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    """As the page applies a choice: null takes a keyword out."""
    return {name: value for name, value in {**given, **by}.items() if value is not None}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", JOBS)
def test_every_value_does_what_the_page_says_of_it(name: str) -> None:
    given = JOBS[name]
    job, _ = job_of(given)
    offered = refused = 0
    for field, values in choices(job).items():
        assert sum(one.get("chosen", False) for one in values) <= 1
        for one in values:
            try:
                other, _ = job_of(changed(given, one["set"]))
                reasons = [
                    f"{found.reason}; {found.remedy}" for found in findings_of(other) if found.status == "refused"
                ]
            except SpecError as error:
                reasons = [f"{error.problem}; {error.remedy}" if error.remedy else error.problem]
            if "refused" in one:
                refused += 1
                assert one["refused"] in reasons or not one["set"], (field, one, reasons)
            else:
                offered += 1
                assert reasons == [], (field, one)
                if one.get("chosen"):
                    assert other == job, (field, one)
    assert offered > 20 and refused > 0


def test_an_impossible_degree_names_its_reason() -> None:
    job, _ = job_of({**JOB, "model": "llama3-8b", "cluster": "dgx-h100:3", "pp": 1, "tp": 2, "global_batch": 480})
    values = {one["value"]: one for one in choices(job)["tp"]}
    assert "3 does not divide 32 query heads" in values[3]["refused"]
    assert "refused" not in values[4]
    assert "no experts" in choices(job)["ep"][1]["refused"]


def test_more_replicas_are_more_nodes() -> None:
    job, _ = job_of(JOB)
    values = {one["value"]: one for one in choices(job)["dp"]}
    assert values[4]["chosen"] and values[4]["set"] == {}
    assert values[8]["set"] == {"cluster": "dgx-h100:16", "gpus": None, "dp": None}
    assert job_of(changed(JOB, values[8]["set"]))[0].strategy.data_parallel == 8


def test_a_part_of_a_node_can_grow_again() -> None:
    small = {"model": "llama3-8b", "cluster": "dgx-h100:2", "global_batch": 32, "seq": 4096, "tp": 2, "zero": 1}
    values = {one["value"]: one for one in choices(job_of(small)[0])["dp"]}
    part = changed(small, values[2]["set"])
    assert (part["cluster"], part["gpus"]) == ("dgx-h100", 4)
    again = {one["value"]: one for one in choices(job_of(part)[0])["dp"]}
    assert again[2]["chosen"] and changed(part, again[8]["set"]) == {**small, "cluster": "dgx-h100:2"}


def test_what_is_only_priced_says_so_and_can_be_chosen() -> None:
    job, _ = job_of(JOB)
    one = next(one for one in choices(job)["schedule"] if one["value"] == "dualpipe")
    assert "two copies" in one["priced_only"] and "refused" not in one


def test_stages_that_layers_do_not_divide_into_are_balanced() -> None:
    """94 layers on 4 ranks: what choosing it sets makes it possible."""
    given = {"model": "qwen3-235b-a22b", "cluster": "dgx-h100:32", "ep": 8, "global_batch": 1024, "seq": 4096}
    values = {one["value"]: one for one in choices(job_of(given)[0])["pp"]}
    assert values[2]["set"] == {"pp": 2, "dp": None}
    assert values[4]["set"] == {"pp": 4, "dp": None, "stage_layers": "balanced"}
    assert job_of(changed(given, values[4]["set"]))[0].strategy.pp == 4
