"""The JSON Schema of a job file: it takes what we read, and refuses what we refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardwise.cli.main import main
from shardwise.interop.jobs import read_job
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.schema import job_schema

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
JOB: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100:2"}
NOUNS = {"model": "Model", "device": "Device", "link": "Link", "cluster": "Cluster", "stack": "Stack"}


def errors(data: object, noun: str = "") -> list[str]:
    schema = job_schema()
    if noun:
        schema = {**schema["$defs"][noun], "$defs": schema["$defs"]}
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(data)]


def test_the_schema_is_one_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == json.loads(json.dumps(job_schema()))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_takes_the_examples_as_they_are_and_as_they_are_written_back(path: Path) -> None:
    assert errors(read_yaml(path, "job")) == []
    assert errors(json.loads(json.dumps(read_job(path).to_dict()))) == []


@pytest.mark.parametrize("kind", presets.KINDS)
def test_it_takes_every_preset_spelled_out(kind: str) -> None:
    folder = Path(presets.__file__).parent / "catalogue" / f"{kind}s"
    wrong = {}
    if kind == "model":  # families share fields: each member as it is written out
        for name in presets.names(kind):
            found = errors(presets.load(kind, Model, name).to_dict(), NOUNS[kind])
            wrong |= {name: found} if found else {}
    for path in folder.glob("*.yaml") if kind != "model" else ():
        fields = dict(read_yaml(path, kind))
        changed = [{}, *(version.get("changed", {}) for version in fields.pop("versions", []))]
        each = [{name: value for name, value in {**fields, **own}.items() if value is not None} for own in changed]
        for found in (errors(spelled_out, NOUNS[kind]) for spelled_out in each):
            wrong |= {path.name: found} if found else {}
    assert wrong == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": "dgx-h100:1+dgx-a100:1"},
        {"cluster": {"kinds": ["dgx-h100:1", "dgx-a100:1"], "link": "infiniband-ndr"}},
        {"strategy": {"microbatch": "auto", "offload": "auto"}},
        {"strategy": {"zero": 2, "offload": {"optimizer": "auto", "gradients": "50%", "target": "cpu"}}},
        {"strategy": {"compression": "powersgd", "synchronise": {"method": "diloco", "inner_steps": 16}}},
        {"strategy": {"order": ["tp", "dp", "cp", "pp"], "dp": None, "stage_layers": "balanced", "bucket": "25MiB"}},
        {
            "training": {
                "global_batch": "4M-tokens",
                "graphs": True,
                "tokens": "15T",
                "optimization": {"clip_norm": None},
            }
        },
        {"run": {"restarts": 3, "emulate": "2x8,1Gbit,1ms", "checkpoints": {"seconds": "10min"}}},
        {"run": {"restarts": {"most": 2, "wait": "1min"}, "data": {"shards": ["a"], "held_out": "2%"}}},
    ],
)
def test_it_takes_what_we_read(changes: dict[str, Any]) -> None:
    assert errors(JOB | changes) == []
    Job.from_dict(JOB | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategie": {}},
        {"strategy": {"tensor_parallel": 8}},
        {"strategy": {"overlap": {"xp": True}}},
        {"strategy": {"zero": 4}},
        {"strategy": {"tp": 0}},
        {"strategy": {"tp": "many"}},
        {"strategy": {"schedule": "2f2b"}},
        {"strategy": {"offload": {"optimizer": 2}}},
        {"strategy": {"compression": {"method": "zip"}}},
        {"training": {"precision": "fp12"}},
        {"training": {"dropout": "yes"}},
        {"run": {"data": {"shards": "a"}}},
        {"run": {"profile": {"first": 2}}},
        {"model": {"layers": 2}},
    ],
)
def test_it_refuses_what_we_refuse(changes: dict[str, Any]) -> None:
    assert errors(JOB | changes)
    with pytest.raises(SpecError):
        Job.from_dict(JOB | changes)
