"""An error names a setting in the words of who asked: a keyword of the API, a flag, a control of the page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise import api
from shardwise.spec.errors import SpecError, in_flags, in_python, shown
from shardwise.ui.given import error_data, job_of
from tables import table

_JOB: dict[str, Any] = {"cluster": "laptop:1", "model": "tiny", "seq": 32, "global_batch": 4, "precision": "fp32"}
_MIXED = {**_JOB, "cluster": "dgx-h100:1+dgx-a100:1", "model": "llama3-8b", "global_batch": 512}
_RUN = {"steps": 1, "run_folder": "run"}
_BASES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("analyze", "predict", "plan", "verify", "write_report"), _JOB),
    "plan_mixed": _MIXED,
    "train": {**_JOB, **_RUN},
    "calibrate": {"only": "storage"},
    "generate": {"source": "tiny", "prompt_tokens": [[1]]},
}
_BARE_MODEL = {"layers": 2, "hidden": 64, "heads": 4}
_BARE_CLUSTER = {"topology": "ring", "gpus": 2, "bandwidth": "1GB/s"}
_OF_MODEL = ("params", *_BARE_MODEL, "kv_heads", "ffn", "vocab")
_OF_CLUSTER = ("topology", "shape", "bandwidth", "latency", "device")
_WRONG = "no such thing"
# Wrong values of keywords for which any text is right, or is read later.
_OTHER_WRONG: dict[str, Any] = {
    "data": ["missing/shards"], "temperature": -1.0, "top_p": 2.0, "top_k": 0, "seed": 10**30, "tolerance": -1.0,
    "max_processes": 0, "steps": 0,
    "out": "missing/folder/cluster.yaml", "ray_address": "10.0.0.1:1",
    **{name: {"wrong": 1} for name in ("strategy", "training", "run", "overlap", "synchronise")},
}  # fmt: skip
# What is only true or false, is called, or is checked where the machine allows it.
_UNCHECKED = (
    "job", "scaling", "ranks", "memory_over_time", "compare_topologies", "any_priced", "thorough", "unfolded", "shrink",
    "go_on", "debug", "run_folder", "search", "cache", "on_progress", "on_text", "on_done", "note", "watch", "trace",
    "run_device", "pareto", "dtype", "stop", "tokenizer", "prompt", "prompt_tokens", "source", "tokens",
)  # fmt: skip


_READ_LATER = {("generate", "run_device"), ("generate", "model")}  # than the source, which is not there


def keywords_of(verb: Callable[..., Any]) -> list[str]:
    """Its own, and those of a job where it takes them."""
    own = dict(inspect.signature(verb).parameters)
    more = own.pop("keywords", None)
    if more is None:
        return [*own]
    typed_dict = more.annotation.removeprefix("Unpack[").removesuffix("]")
    return [*own, *getattr(inspect.getmodule(verb), typed_dict).__annotations__]


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


@table(
    ("mistake", "flags", "line", "line_of_python"),
    [
        ({"gpus": -3}, "--gpus -3", "--gpus: '-3' is not a positive whole number; write one like 64",
         "gpus: -3 is not a positive whole number; write one like 64"),
        ({"shape": "8x8"}, "--shape 8x8",
         "--shape: '8x8' is not used without --topology; add --topology, or leave --shape out",
         "shape: '8x8' is not used without topology; add topology, or leave shape out"),
        ({"model": None}, "",
         "model: is missing; name one: --model llama3-8b (`shardwise list models`), or --params ...",
         'model: is missing; name one: model="llama3-8b" (`shardwise list models`), or params=...'),
        ({"heads": 3, "hidden": 64, "layers": 2, "model": None}, "--heads 3 --hidden 64 --layers 2",
         "--heads: 3 does not divide --hidden 64; use a divisor", "heads: 3 does not divide hidden=64; use a divisor"),
    ],
)  # fmt: skip
def test_each_surface_names_the_setting_in_its_own_words(
    mistake: dict[str, Any], flags: str, line: str, line_of_python: str
) -> None:
    given = {name: value for name, value in {**_JOB, **mistake}.items() if value is not None}
    others = [f"--{name.replace('_', '-')}={value}" for name, value in _JOB.items() if name not in mistake]
    assert error_line(run("analyze", *others, *flags.split())) == line
    with pytest.raises(SpecError) as error:
        api.analyze(**given)
    assert str(error.value) == line_of_python
    with pytest.raises(SpecError) as error:
        job_of(given)
    data = error_data(error.value)["error"]
    assert data["text"] == line_of_python and data["field"] in (*mistake, "model")


@table(
    ("text", "flags", "keywords"),
    [
        ("⟨max_memory⟩", "--max-memory", "max_memory"),
        ("⟨gpus=64⟩, ⟨tp=2,4⟩", "--gpus 64, --tp 2,4", 'gpus=64, tp="2,4"'),
        ("⟨on=ray⟩ or ⟨out=FILE⟩", "--on ray or --out FILE", 'on="ray" or out=FILE'),
        ("⟨search=false⟩ and ⟨any_priced=true⟩", "--no-search and --any", "search=False and any_priced=True"),
        ("⟨framework=megatron⟩, ⟨unfolded=true⟩", "--for megatron, --all", 'framework="megatron", unfolded=True'),
        ("⟨run.start_from=runs/a⟩", "--set run.start_from=runs/a", 'run.start_from="runs/a"'),
        ("⟨cluster⟩.device", "--cluster.device", "cluster.device"),
        ("`srun --gpus 2` < ⟨ x ⟩", "`srun --gpus 2` < ⟨ x ⟩", "`srun --gpus 2` < ⟨ x ⟩"),
    ],
)
def test_a_setting_has_words_on_the_command_line_and_in_python(text: str, flags: str, keywords: str) -> None:
    assert in_flags(text) == flags and in_python(text) == str(SpecError("", text)) == keywords


def test_text_of_a_user_names_no_setting() -> None:
    assert in_python(shown("⟨gpus⟩")) == "'\\u27e8gpus⟩'" and in_flags(shown({"⟨gpus⟩": 1})) == "{'\\u27e8gpus⟩': 1}"
    assert "gpus⟩" in error_line(run("analyze", "--model", "⟨gpus⟩", "--cluster", "laptop:1"))
