"""Models in the local cache of Hugging Face: every surface finds them, or says in one line how to get them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise.api import analyze, finetune
from shardwise.interop.hub_cache import cached_model
from shardwise.interop.jobs import model_from, read_job
from shardwise.spec.errors import SpecError
from shardwise.ui.given import job_of

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip
ID = "acme/Thing-7B"
JOB: dict[str, Any] = {"cluster": "dgx-h100", "tp": 8}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(
    cache: Path, commit: str, named: str = ID, *, main: bool = False, age_seconds: float = 0, **changes: Any
) -> Path:
    """A commit of a model as the hub's library keeps it."""
    model = cache / f"models--{named.replace('/', '--')}"
    folder = model / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    os.utime(folder, (1e9 - age_seconds, 1e9 - age_seconds))
    if main:
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(commit)
    return folder


def test_the_commit_of_the_main_branch_or_else_the_newest(cache: Path) -> None:
    old, new = kept(cache, "aa", age_seconds=100), kept(cache, "bb")
    assert cached_model(ID) == new
    (cache / "models--acme--Thing-7B" / "refs").mkdir()
    (cache / "models--acme--Thing-7B" / "refs" / "main").write_text("aa\n")
    assert cached_model(ID) == old
    (old / "config.json").unlink()  # only the tokenizer was downloaded
    assert cached_model(ID) == new


def test_its_name_is_that_of_the_model(cache: Path) -> None:
    kept(cache, "aa", main=True)
    assert model_from("ACME/thing-7b").name == "Thing-7B"
    kept(cache, "cc", "acme/other", _name_or_path="acme/trained-from-this")
    assert model_from("acme/other").name == "trained-from-this"


@pytest.mark.parametrize(
    ("variable", "inside"),
    [("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub"),
     ("HOME", ".cache/huggingface/hub")],
)  # fmt: skip
def test_variables_of_the_hub_name_the_cache(
    variable: str, inside: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv(variable, str(tmp_path / "here"))
    folder = kept(tmp_path / "here" / inside, "aa")
    assert cached_model(ID) == folder


@pytest.mark.parametrize("named", ["../x", "acme/..", "a/b/c", "acme", "", "acme/Thing-7B.json"])
def test_only_an_id_is_looked_for(named: str, cache: Path) -> None:
    kept(cache, "aa")
    (cache / "config.json").write_text(json.dumps(CONFIG))
    assert cached_model(named) is None


def test_a_preset_comes_before_the_cache_and_a_folder_before_both(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(cache, "aa", "Qwen/Qwen2.5-32B")
    monkeypatch.chdir(tmp_path)
    assert model_from("Qwen/Qwen2.5-32B").layers == 64
    own = tmp_path / "Qwen" / "Qwen2.5-32B"
    own.mkdir(parents=True)
    (own / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    assert model_from("Qwen/Qwen2.5-32B").layers == 3


def test_every_surface_takes_an_id_and_says_what_it_means(cache: Path, tmp_path: Path) -> None:
    kept(cache, "aa", main=True)
    job = tmp_path / "job.yaml"
    for named, said in ((ID, "config.json of the Hugging Face cache"), ("qwen/Qwen3-8B-Base", "preset qwen3-8b")):
        job.write_text(f"model: {named}\ncluster: dgx-h100\nstrategy: {{tp: 8}}\n")
        layers = model_from(named).layers
        result = analyze(model=named, **JOB)
        assert result.job.model.layers == layers and any(f"{named}: {said}" in note for note in result.notes)
        assert analyze(str(job)).job.model.layers == read_job(job).model.layers == layers
        on_page, notes = job_of({"model": named, **JOB})
        assert on_page.model.layers == layers and any(f"{named}: {said}" in note for note in notes)
        printed = run("plan", "--model", named, "--cluster", "dgx-h100", "--gpus", "8", "--tp", "8", "--pp", "1")
        assert printed.status == 0 and f"{named}: {said}" in " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize("verb", ["plan", "analyze", "train", "verify", "dryrun"])
def test_what_is_nowhere_is_one_line_with_the_way_to_get_it(verb: str, cache: Path) -> None:
    result = run(verb, "--model", ID, "--cluster", "dgx-h100")
    assert f"`hf download {ID} config.json`" in error_line(result) and "--model FOLDER" in error_line(result)
    assert f"https://huggingface.co/{ID}/blob/main/config.json" in error_line(result)


def test_the_page_and_a_job_say_so_too(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"model: {ID}\ncluster: dgx-h100\n")
    for refused in (lambda: job_of({"model": ID, **JOB}), lambda: analyze(str(tmp_path / "job.yaml"))):
        with pytest.raises(SpecError, match=f"^model: .*hf download {ID} config.json"):
            refused()


def test_fine_tuning_needs_the_whole_folder(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("")
    kept(cache, "aa")
    for named in (ID, "Qwen/Qwen3-8B"):
        with pytest.raises(SpecError, match=f"^model: .*run `hf download {named}`, or name the folder of a model"):
            finetune(named, tmp_path / "chats.jsonl", plan_only=True)
