"""An error of the API names the keyword that was given, and no flag."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise import api
from shardwise.api.given import JobKeywords, keyword_path
from shardwise.api.words import in_keywords, keywords_of
from shardwise.spec.errors import SpecError

_JOB: dict[str, Any] = {"cluster": "laptop:1", "model": "tiny", "seq": 32, "global_batch": 4, "precision": "fp32"}
_MIXED = {**_JOB, "cluster": "dgx-h100:1+dgx-a100:1", "model": "llama3-8b", "global_batch": 512}
_RUN = {"steps": 1, "run_folder": "run"}
_BASES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("analyze", "predict", "plan", "verify", "write_report"), _JOB),
    "plan_mixed": _MIXED,
    "train": {**_JOB, **_RUN},
    "calibrate": {"only": "storage"},
    "generate": {"source": "tiny", "tokens": [[1]]},
}
_BARE_MODEL = {"layers": 2, "hidden": 64, "heads": 4}
_BARE_CLUSTER = {"topology": "ring", "gpus": 2, "bandwidth": "1GB/s"}
_OF_MODEL = ("params", *_BARE_MODEL, "kv_heads", "ffn", "vocab")
_OF_CLUSTER = ("topology", "shape", "bandwidth", "latency", "device")
_WRONG = "no such thing"
# Wrong values of keywords for which any text is right, or is read later.
_OTHER_WRONG: dict[str, Any] = {
    "data": ["missing/shards"], "temperature": -1.0, "top_p": 2.0, "top_k": 0, "seed": 10**30, "tolerance": -1.0,
    "max_processes": 0, "steps": 0, "output": "missing/folder/report.html",
    "out": "missing/folder/cluster.yaml", "ray_address": "10.0.0.1:1",
    **{name: {"wrong": 1} for name in ("strategy", "training", "run", "overlap", "synchronise")},
}  # fmt: skip
# What is only true or false, is called, or is checked where the machine allows it.
_UNCHECKED = (
    "job", "scaling", "ranks", "memory_over_time", "compare_topologies", "any_priced", "thorough", "unfolded", "shrink",
    "go_on", "debug", "run_folder", "search", "cache", "on_progress", "on_text", "on_done", "note", "watch", "trace",
    "run_device", "pareto", "dtype", "stop", "tokenizer", "prompt", "source", "tokens",
)  # fmt: skip


_READ_LATER = {("generate", "device"), ("generate", "model")}  # than the source, which is not there


def _call(verb: str, name: str) -> dict[str, Any]:
    base = dict(_BASES[verb])
    if verb in ("generate", "calibrate") or name not in (*_OF_MODEL, *_OF_CLUSTER):
        pass
    elif name in _OF_MODEL:
        base = {**base, **_BARE_MODEL}
        del base["model"]
    elif verb != "plan_mixed":  # which is for nodes that are named
        base = {**base, **_BARE_CLUSTER}
        del base["cluster"]
    return {**base, name: _OTHER_WRONG.get(name, _WRONG)}


@pytest.mark.parametrize("verb", _BASES)
def test_a_wrong_value_is_told_by_its_keyword(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    called = getattr(api, verb)
    for name in keywords_of(called):
        if name in _UNCHECKED or (verb, name) in _READ_LATER:
            continue
        with pytest.raises(SpecError) as error:
            called(**_call(verb, name))
        text = str(error.value)
        assert re.search(rf"(?<![\w.]){name}\b", text), (verb, name, text)
        assert "--" not in text, (verb, name, text)
        wrong = set(re.findall(r"^([a-z_]+)[.: \[]", text)) - {*keywords_of(called)}
        assert not wrong, (verb, name, text)


def test_only_flags_of_keywords_are_rewritten() -> None:
    error = SpecError("training.global_batch", "'--zero' is not --zero", "`train --zero`, --no-search or --shm-size=1g")
    told = in_keywords(error, ("batch", "zero", "search"), ("batch",))
    assert str(told) == "batch: '--zero' is not zero; `train --zero`, search=False or --shm-size=1g"
    assert in_keywords(error, JobKeywords.__annotations__).field == "training.global_batch"  # in a file
    assert {keyword_path(name).count(".") for name in JobKeywords.__annotations__} == {0, 1}
