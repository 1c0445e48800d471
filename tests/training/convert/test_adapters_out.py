"""What a run with adapters leaves: a folder of PEFT's, the merged model, and text from either."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli import running
from cli.running import error_line, run_json
from engine.workers import on_ranks
from shardwise.models.huggingface.adapters import Added, LoadedAdapter
from shardwise.spec.errors import SpecError
from shardwise.training.convert.adapters import with_adapter
from shardwise.training.convert.sources import open_weights, write_as_adapter
from training.checkpoint.test_adapter_checkpoints import DORA, base, job, train


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a run that trained adapters and the head beside it on two ranks."""
    folder = tmp_path_factory.mktemp("tuned")
    base(folder / "base", 1)
    one = job(folder / "base", devices=2, tp=2, trained=("head",), adapters=replace(DORA, rank=2))
    fast = replace(one.training, optimization=replace(one.training.optimization, learning_rate=0.05))
    on_ranks(2, train, replace(one, training=fast), str(folder / "run"), 3, False)
    return folder / "base", folder / "run"


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) % 50
    with torch.no_grad():
        found: torch.Tensor = model.eval()(ids).logits
    return found


def test_peft_and_the_merged_folder_have_the_same_logits(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    folder, run = tuned
    run_json("convert", str(run), "--to", "adapter", "--out", str(tmp_path / "adapter"))
    run_json("convert", str(run), "--to", "huggingface", "--out", str(tmp_path / "merged"))
    run_json("convert", str(folder), "--adapter", str(tmp_path / "adapter"), "--to", "huggingface",
         "--out", str(tmp_path / "again"))  # fmt: skip
    fresh = transformers.AutoModelForCausalLM.from_pretrained
    plain = logits(fresh(folder, dtype=torch.float32))
    expected = logits(fresh(tmp_path / "merged", dtype=torch.float32))
    assert (plain - expected).abs().max() > 0.1
    theirs = peft.PeftModel.from_pretrained(fresh(folder, dtype=torch.float32), tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-5)
    again = logits(fresh(tmp_path / "again", dtype=torch.float32))
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-6)
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["modules_to_save"] == ["lm_head"] and about["use_dora"] and about["r"] == 2
    assert sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir()) < 0.5 * sum(
        file.stat().st_size for file in folder.iterdir()
    )


def test_an_adapter_is_added_to_what_was_trained(tuned: tuple[Path, Path]) -> None:
    weights = open_weights(tuned[0])
    name, rank = "layers.0.attention.query.weight", 2
    outputs, inputs = weights.tensors[name].shape
    trained, added = torch.ones(outputs, inputs), Added(torch.ones(rank, inputs), torch.ones(outputs, rank), 0.5)
    made = with_adapter(weights, LoadedAdapter({name: added}, {name: trained}), "it")
    assert (made.tensors[name].read() == 2).all()


def test_text_is_generated_with_an_adapter(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    folder, run = tuned
    write_as_adapter(run, tmp_path / "adapter")
    texts = []
    for arguments in ((folder,), (run,), (folder, "--adapter", run), (folder, "--adapter", tmp_path / "adapter")):
        given = ("generate", *map(str, arguments), "--prompt-tokens", "1,2,3", "--max-new-tokens", "8", "--json")
        texts.append(json.loads(running.run(*given).out)["results"][0]["tokens"])
    assert texts[0] != texts[1] and texts[1] == texts[2] == texts[3]


def test_an_adapter_alone_or_beside_another_model_is_refused(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    folder, run = tuned
    write_as_adapter(run, tmp_path / "adapter")
    with pytest.raises(SpecError, match="is an adapter, which needs its base"):
        open_weights(tmp_path / "adapter")
    with pytest.raises(SpecError, match="holds no adapter"):
        open_weights(folder, None, [tmp_path])
    with pytest.raises(SpecError, match="is not a run or checkpoint of ours"):
        write_as_adapter(folder, tmp_path / "other")
    for option in (("--dtype", "bf16"), ("--adapter", str(run)), ("--model", "tiny")):
        refused = running.run("convert", str(run), "--to", "adapter", "--out", str(tmp_path / "x"), *option)
        assert f"{option[0]}: is not for --to adapter" in error_line(refused)
    moved = tmp_path / "moved"
    folder.rename(moved)
    try:
        with pytest.raises(SpecError, match="is not there"):
            open_weights(run)
        assert open_weights(moved, None, [run]).tensors
    finally:
        moved.rename(folder)


def test_an_adapter_of_another_base_is_refused(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    """Of the same shapes; a copy of its base in 16 bits is its base, and so is one with an adapter merged before it."""
    folder, run = tuned
    write_as_adapter(run, tmp_path / "adapter")
    base(tmp_path / "other", 2)
    for adapter in (run, tmp_path / "adapter"):
        with pytest.raises(SpecError, match="was trained beside other weights than those of"):
            open_weights(tmp_path / "other", None, [adapter])
    refused = running.run("generate", str(tmp_path / "other"), "--adapter", str(run), "--prompt-tokens", "1")
    assert "use its own base" in error_line(refused)
    run_json("convert", str(folder), "--to", "huggingface", "--dtype", "bf16", "--out", str(tmp_path / "narrow"))
    assert open_weights(tmp_path / "narrow", None, [tmp_path / "adapter", run]).tensors


def test_the_base_of_a_tied_head_is_known(tmp_path: Path) -> None:
    base(tmp_path / "base", 1, tied_embeddings=True)
    one = job(tmp_path / "base", adapters=replace(DORA, rank=2))
    on_ranks(1, train, replace(one, model=replace(one.model, tied_embeddings=True)), str(tmp_path / "run"), 1, False)
    write_as_adapter(tmp_path / "run", tmp_path / "adapter")
    assert open_weights(tmp_path / "base", None, [tmp_path / "adapter"]).tensors
