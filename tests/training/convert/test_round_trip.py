"""What comes in from a Hugging Face folder goes out again: family, special tokens, tokenizer, how text is generated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.running import error_line, run
from models.families import CASES, SMALL, build, transformers
from shardwise.interop.companions import KEPT_IN, TOOLS_TEMPLATE, config_for
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.launch.preflight import preflight
from shardwise.launch.run import prepare
from shardwise.models.huggingface import open_folder, write_folder
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.training.convert.sources import open_weights
from training.runs import job_of, write_shards

IDS = {"bos_token_id": 1, "eos_token_id": [3, 4], "pad_token_id": 0}
WITHOUT_WINDOW = ("Mistral", {**SMALL, "sliding_window": None, "vocab_size": 512})
GENERATED = ["mistral", "llama3-rope", "deepseek-v3", "gpt2"]
GENERATED += [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in GENERATED]  # type: ignore[misc]


@pytest.fixture(autouse=True)
def mistral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "mistral", WITHOUT_WINDOW)


def saved(case: str, folder: Path) -> Any:
    """A model as it is published: ids of special tokens, a generation that is not the default, a tokenizer."""
    model = build(case)
    for name, value in IDS.items():
        setattr(model.config, name, value)
        setattr(model.generation_config, name, value)
    model.generation_config.max_new_tokens, model.generation_config.repetition_penalty = 12, 1.3
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / TOOLS_TEMPLATE).parent.mkdir()
    (folder / TOOLS_TEMPLATE).write_text("{{ tools }}")
    (folder / "modeling_theirs.py").write_text("raise SystemExit")
    return model


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def converted(source: Path, to: str, out: Path, *flags: str) -> Path:
    result = run("convert", str(source), "--to", to, "--out", str(out), *flags)
    assert result.status == 0, result.err
    return out


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", ["mistral", *CASES])
def test_the_config_of_every_family_is_the_same_in_every_key(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "theirs")
    tensors, model = open_folder(tmp_path / "theirs").tensors(), open_folder(tmp_path / "theirs").model
    write_folder(tmp_path / "again", model, tensors, source=tmp_path / "theirs")
    assert config(tmp_path / "again") == config(tmp_path / "theirs")


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", GENERATED)
@torch.no_grad()
def test_a_text_is_generated_as_before_after_a_checkpoint_of_ours(case: str, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path / "theirs")
    ours = converted(tmp_path / "theirs", "checkpoint", tmp_path / "ours")
    shared = tmp_path / "shared"
    result = run("checkpoint", "reshard", str(ours), "--shards", "2", "--out", str(shared))
    assert result.status == 0, result.err
    again = converted(shared, "huggingface", tmp_path / "again")
    assert config(again) == config(tmp_path / "theirs")
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja", TOOLS_TEMPLATE):
        assert (again / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert not (again / "modeling_theirs.py").exists()
    kept = theirs.config._attn_implementation  # not in the folder; older releases choose one without the soft cap
    loaded = transformers.AutoModelForCausalLM.from_pretrained(again, attn_implementation=kept)
    assert type(loaded) is type(theirs)
    prompt = torch.arange(5, 12)[None]
    assert torch.equal(loaded.generate(prompt, do_sample=False), theirs.generate(prompt, do_sample=False))


def test_the_stored_type_is_told_under_the_names_that_were_there(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    said = {**config(tmp_path / "theirs"), "torch_dtype": "float32", "auto_map": {"AutoModel": "modeling_theirs.X"}}
    del said["dtype"]
    path.write_text(json.dumps(said))
    found = config(converted(tmp_path / "theirs", "huggingface", tmp_path / "half", "--dtype", "bf16"))
    assert found == {**{key: value for key, value in said.items() if key != "auto_map"}, "torch_dtype": "bfloat16"}


def test_weights_of_a_file_take_what_is_beside_them_or_beside_the_named_config(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    model = saved("mistral", theirs)
    (tmp_path / "elsewhere").mkdir()
    torch.save(model.state_dict(), tmp_path / "elsewhere/weights.pt")
    shutil.copy(tmp_path / "elsewhere/weights.pt", theirs / "weights.pt")
    for number, flags in enumerate([[], ["--model", str(theirs)], ["--model", str(theirs / "config.json")]]):
        source = theirs / "weights.pt" if not flags else tmp_path / "elsewhere/weights.pt"
        out = converted(source, "huggingface", tmp_path / f"out{number}", *flags)
        assert config(out) == config(theirs)
        assert (out / "tokenizer.json").is_file()


def test_only_what_changed_of_the_model_changes_in_the_config(tmp_path: Path) -> None:
    saved("llama3-rope", tmp_path)
    model, said = open_folder(tmp_path).model, config(tmp_path)
    longer = replace(model, max_seq=128)
    assert config_for(longer, tmp_path) == {**said, "max_position_embeddings": 128}
    turned = config_for(replace(model, numerics=replace(model.numerics, rope_theta=7.0)), tmp_path)
    assert model_from_hf_config(turned).numerics == replace(model.numerics, rope_theta=7.0)
    assert turned["eos_token_id"] == [3, 4] and "rope_parameters" not in turned
    other = config_for(replace(model, qk_norm=True), tmp_path)  # no Llama has these
    assert other["model_type"] == "qwen3" and other["eos_token_id"] == [3, 4]


def test_modules_of_multi_token_prediction_that_are_not_written_are_not_promised(tmp_path: Path) -> None:
    saved("deepseek-v3", tmp_path)
    said = {**config(tmp_path), "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert config_for(open_folder(tmp_path).model, tmp_path) == {**said, "num_nextn_predict_layers": 0}


# -- through a run -----------------------------------------------------------------------------------------


def started_from(source: Path, folder: Path, tmp_path: Path, model_folder: Path | None = None) -> Path:
    """Where a run that is made ready to start keeps the small files."""
    job = job_of(write_shards(tmp_path / "words"), run={"start_from": str(source)} if source != tmp_path else {})
    job = replace(job, model=open_folder(tmp_path / "theirs").model)
    found = RunFolder(folder)
    prepare(job, found, preflight(job), model_folder)
    return found.checkpoints.path / KEPT_IN


def test_a_run_keeps_what_came_with_its_first_weights(tmp_path: Path) -> None:
    saved("mistral", tmp_path / "theirs")
    ours = converted(tmp_path / "theirs", "checkpoint", tmp_path / "ours")
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", TOOLS_TEMPLATE}
    for number, source in enumerate((tmp_path / "theirs", ours, ours / "step-00000000")):
        kept = started_from(source, tmp_path / f"run{number}", tmp_path)
        assert {str(path.relative_to(kept)) for path in filter(Path.is_file, kept.rglob("*"))} == wanted
    kept = started_from(tmp_path, tmp_path / "new", tmp_path, tmp_path / "theirs")  # --model theirs
    assert {str(path.relative_to(kept)) for path in filter(Path.is_file, kept.rglob("*"))} == wanted
    assert not started_from(tmp_path, tmp_path / "new", tmp_path).exists()  # begun anew, as another model
    run_of_one = tmp_path / "run0"  # a run whose only checkpoint is that one
    shutil.copytree(ours / "step-00000000", run_of_one / "checkpoints/step-00000000")
    assert config(converted(run_of_one, "huggingface", tmp_path / "out")) == config(tmp_path / "theirs")


def test_a_start_that_is_not_there_is_told_before_a_process_starts(tmp_path: Path) -> None:
    job: Job = job_of(write_shards(tmp_path / "words"), run={"start_from": str(tmp_path / "no")})
    with pytest.raises(SpecError, match=r"^run\.start_from: .* is not a folder; name a Hugging Face folder"):
        preflight(job)


def test_a_start_of_another_shape_is_told_before_a_process_starts(tmp_path: Path) -> None:
    saved("mistral", tmp_path / "theirs")
    for source in (tmp_path / "theirs", converted(tmp_path / "theirs", "checkpoint", tmp_path / "ours")):
        job = job_of(write_shards(tmp_path / "words"), run={"start_from": str(source)})
        with pytest.raises(SpecError, match=r"^run\.start_from: .* has layers 3, the job's model has 4; "):
            preflight(job)


# -- folders of strangers ----------------------------------------------------------------------------------


def test_a_link_that_leads_out_is_refused_and_one_of_the_cache_is_not(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    cached = tmp_path / "hub/models--a--b"
    saved("llama", cached / "snapshots/123")
    (cached / "blobs").mkdir()
    file = cached / "snapshots/123/tokenizer.json"
    file.rename(cached / "blobs/abc")
    file.symlink_to("../../blobs/abc")
    out = converted(file.parent, "huggingface", tmp_path / "out")
    assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert not (out / "tokenizer.json").is_symlink()
    (file.parent / "merges.txt").symlink_to(tmp_path / "secret")
    for to in ("huggingface", "checkpoint"):
        line = error_line(run("convert", str(file.parent), "--to", to, "--out", str(tmp_path / "bad")))
        assert "merges.txt: is a link that leads out of its folder" in line
        assert not (tmp_path / "bad").exists()


def test_checkpoints_of_two_models_are_not_put_in_one_folder(tmp_path: Path) -> None:
    saved("llama", tmp_path / "one")
    saved("mistral", tmp_path / "two")
    converted(tmp_path / "one", "checkpoint", tmp_path / "ours")
    line = error_line(run("convert", str(tmp_path / "two"), "--to", "checkpoint", "--out", str(tmp_path / "ours")))
    assert "belongs to a different model than" in line
    assert open_weights(tmp_path / "ours").companions == tmp_path / "ours" / KEPT_IN
