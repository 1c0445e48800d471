"""`shardwise convert`: the same weights, bit for bit, whatever they come from and go to; one line for what is wrong."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cli.running import error_line, run, run_json
from engine.workers import on_ranks
from models.families import transformers
from models.shapes import SHAPES, decoder_of, tokens
from shardwise.engine.engine import Engine
from shardwise.models.huggingface import open_folder, write_folder
from shardwise.spec import Job
from shardwise.spec.files import dump_yaml
from shardwise.spec.model import Model
from shardwise.training.checkpoint.full_tensors import LazyTensor
from shardwise.training.checkpointing import start_from
from shardwise.training.convert.sources import open_weights, write_file
from shardwise.training.convert.weights import complete
from training.convert.foreign_folders import write_deepspeed, write_megatron
from training.runs import boxes, whole

DENSE = SHAPES["dense"]
EVEN = Model(**{**DENSE.to_dict(), "layers": 4, "name": "even"})
GPT = Model(**{**SHAPES["gpt"].to_dict(), "layers": 4, "lm_head_bias": False, "name": "gpt"})


def tensors_of(model: Model, seed: int = 1) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in decoder_of(model, seed).named_tensors()}


def model_file(model: Model, folder: Path) -> str:
    path = folder / f"{model.name}.yaml"
    path.write_text(dump_yaml(model.to_dict()), encoding="utf-8")
    return str(path)


def converted(source: Path, tmp_path: Path, *flags: str) -> dict[str, Tensor]:
    """The tensors of a source by our names, through the command line."""
    out = tmp_path / "full.safetensors"
    result = run("convert", str(source), "--to", "full", "--out", str(out), *flags)
    assert result.status == 0, result.err
    return load_file(out)


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], one) for name, one in expected.items())


def as_huggingface(model: Model, tensors: dict[str, Tensor], folder: Path) -> Path:
    write_folder(folder, model, tensors.items())
    return folder


# -- between our own and Hugging Face's --------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", ["dense", "gpt", "mla"])
def test_from_huggingface_to_ours_and_back(shape: str, tmp_path: Path) -> None:
    """GPT-2's fused and transposed maps, DeepSeek's turned rows and its routers' bias among them."""
    model = GPT if shape == "gpt" else SHAPES[shape]
    expected = tensors_of(model)
    source = as_huggingface(model, expected, tmp_path / "theirs")
    checkpoint, again = tmp_path / "ours", tmp_path / "again"
    assert run("convert", str(source), "--to", "checkpoint", "--out", str(checkpoint)).status == 0
    assert run("checkpoint", "verify", str(checkpoint)).status == 0
    assert run("convert", str(checkpoint), "--to", "huggingface", "--out", str(again)).status == 0
    for name in sorted(path.name for path in source.glob("*.safetensors")):
        assert equal(load_file(again / name), load_file(source / name))
    assert equal(converted(again, tmp_path), expected)


@torch.no_grad()
def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    model = EVEN
    decoder = decoder_of(model, 1).eval()
    source = as_huggingface(model, tensors_of(model), tmp_path / "first")
    run("convert", str(source), "--to", "checkpoint", "--out", str(tmp_path / "ours"))
    result = run("convert", str(tmp_path / "ours"), "--to", "huggingface", "--out", str(tmp_path / "theirs"))
    assert result.status == 0, result.err
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    ids = tokens()
    torch.testing.assert_close(theirs(ids).logits, decoder(ids), rtol=0, atol=1e-5)
    job = {"model": model.to_dict(), "cluster": "laptop:1", "training": {"global_batch": 2, "seq": 16}}
    job["training"]["precision"] = "fp32"  # type: ignore[index]
    for name in ("theirs", "ours"):
        (found,) = on_ranks(1, logits_from, Job.from_dict(job), str(tmp_path / name), ids.tolist())
        assert np.array_equal(found, decoder(ids).numpy())


def logits_from(job: Job, source: str, ids: list[list[int]]) -> Any:
    engine = Engine(job, seed=9)
    start_from(engine, Path(source))
    (stage,) = engine.stages.values()
    with torch.no_grad():
        return stage.eval()(torch.tensor(ids)).numpy()


def boxes_from(job: Job, source: str) -> dict[str, Any]:
    engine = Engine(job, seed=9)
    start_from(engine, Path(source))
    return {"boxes": boxes(engine)}


@pytest.mark.slow
def test_a_run_of_another_layout_starts_from_what_was_converted(tmp_path: Path) -> None:
    """The routers' bias too, from a checkpoint as from a Hugging Face folder."""
    job = {"model": "tiny-mla", "cluster": "laptop:2", "strategy": {"ep": 2}, "training": {"global_batch": 2}}
    job["training"].update({"seq": 16, "precision": "fp32"})  # type: ignore[attr-defined]
    one = Job.from_dict(job)
    expected = tensors_of(one.model)
    for name in expected:
        if name.endswith("router.bias"):
            expected[name] = torch.rand(expected[name].shape)
    source = as_huggingface(one.model, expected, tmp_path / "theirs")
    assert run("convert", str(source), "--to", "checkpoint", "--out", str(tmp_path / "ours")).status == 0
    for place in ("theirs", "ours"):
        found = whole(on_ranks(2, boxes_from, one, str(tmp_path / place)))
        for name, tensor in expected.items():
            kind = "buffer" if name.endswith("router.bias") else "weight"
            assert np.array_equal(found[f"{kind}/{name}"], tensor.numpy()), name


def test_prediction_modules_come_along_or_stay_behind_whole() -> None:
    """Of a checkpoint that has trained some, and of one from a tool that has left some of them out."""
    model = replace(DENSE, mtp_layers=1)
    stored = {name: LazyTensor(tuple(one.shape), one.dtype, one.clone) for name, one in tensors_of(model).items()}
    found = complete(model, stored, "here")
    assert found.model.mtp_layers == 1 and found.tensors.keys() == stored.keys()
    del stored[f"layers.{DENSE.layers}.joined.weight"]
    found = complete(model, stored, "here")
    assert found.model.mtp_layers == 0 and found.tensors.keys() == tensors_of(DENSE).keys() < stored.keys()


def test_prediction_modules_are_written_where_a_family_names_them(tmp_path: Path) -> None:
    """As deepseek-ai/DeepSeek-V3 has them: behind the last layer, each with a copy of embedding and head."""
    model = replace(SHAPES["mla"], mtp_layers=2)
    expected = tensors_of(model)
    folder = as_huggingface(model, expected, tmp_path / "theirs")
    again = open_folder(folder)
    said = json.loads((folder / "config.json").read_text())
    assert again.model.mtp_layers == said["num_nextn_predict_layers"] == 2
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.tensors())
    copied = [name for name in again.files if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))]
    assert len(copied) == 1 + 2 * 2
    other = as_huggingface(replace(DENSE, mtp_layers=1), tensors_of(replace(DENSE, mtp_layers=1)), tmp_path / "llama")
    assert open_folder(other).model.mtp_layers == 0  # no place in this family


def test_one_file_under_both_names(tmp_path: Path) -> None:
    expected = tensors_of(GPT)
    source = as_huggingface(GPT, expected, tmp_path / "theirs")
    full = tmp_path / "full.safetensors"
    assert equal(converted(source, tmp_path), expected)
    named = tmp_path / "named.safetensors"
    flags = ("--to", "full", "--names", "huggingface", "--out", str(named))
    assert run("convert", str(full), *flags).status == 0  # the file says of which model it is
    stored = {key: one for file in source.glob("*.safetensors") for key, one in load_file(file).items()}
    assert equal(load_file(named), stored)
    (tmp_path / "full.safetensors").rename(tmp_path / "old.safetensors")
    assert equal(converted(named, tmp_path, "--model", model_file(GPT, tmp_path)), expected)


def test_types(tmp_path: Path) -> None:
    expected = tensors_of(SHAPES["mla"])
    source = as_huggingface(SHAPES["mla"], expected, tmp_path / "theirs")
    found = converted(source, tmp_path, "--dtype", "bf16")
    for name, tensor in expected.items():
        kept = name.endswith("router.bias")
        assert torch.equal(found[name], tensor if kept else tensor.bfloat16()), name
    expected = tensors_of(DENSE)
    expected["embedding.weight"][0, 0] = 1e6
    source = as_huggingface(DENSE, expected, tmp_path / "large")
    line = error_line(run("convert", str(source), "--to", "full", "--out", str(tmp_path / "x"), "--dtype", "fp16"))
    assert "embedding.weight: holds numbers that are too large for fp16" in line
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("family_names", [False, True])
def test_tensors_are_in_memory_one_after_the_other(tmp_path: Path, family_names: bool) -> None:
    """While one is written the next may be read; never more."""
    source = as_huggingface(EVEN, tensors_of(EVEN), tmp_path / "theirs")
    weights, alive, most = open_weights(source), set[int](), [0]

    def counted(name: str, one: LazyTensor) -> LazyTensor:
        def read() -> Tensor:
            tensor = one.read()
            alive.add(id(tensor))
            weakref.finalize(tensor, alive.discard, id(tensor))
            most[0] = max(most[0], len(alive))
            return tensor

        return replace(one, read=read)

    watched = replace(weights, tensors={name: counted(name, one) for name, one in weights.tensors.items()})
    write_file(watched, tmp_path / "full.safetensors", lambda size: None, family_names=family_names)
    assert len(weights.tensors) > 20
    assert most[0] <= 3


# -- torch, DeepSpeed, Megatron-LM --------------------------------------------------------------------------


@pytest.mark.parametrize("within", [(), ("model",), ("state_dict",), ("checkpoint", "module")])
@pytest.mark.parametrize("names", ["ours", "theirs"])
def test_torch_files(names: str, within: tuple[str, ...], tmp_path: Path) -> None:
    expected = tensors_of(DENSE)
    content: Any = expected
    if names == "theirs":
        folder = as_huggingface(DENSE, expected, tmp_path / "hf")
        content = {key: one for file in folder.glob("*.safetensors") for key, one in load_file(file).items()}
    content = {f"module.{name}": one for name, one in content.items()} if within else content
    for key in reversed(within[-1:]):
        content = {key: content, "epoch": 3}
    torch.save(content, tmp_path / "weights.pt")
    assert equal(converted(tmp_path / "weights.pt", tmp_path, "--model", model_file(DENSE, tmp_path)), expected)


def test_a_huggingface_folder_of_torch_files(tmp_path: Path) -> None:
    expected = tensors_of(DENSE)
    folder = as_huggingface(DENSE, expected, tmp_path / "hf")
    (file,) = folder.glob("*.safetensors")
    stored = load_file(file)
    half = len(stored) // 2
    files = {"a.bin": dict(list(stored.items())[:half]), "b.bin": dict(list(stored.items())[half:])}
    for name, tensors in files.items():
        torch.save(tensors, folder / name)
    index = {"weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert equal(converted(folder, tmp_path), expected)
    index["weight_map"][next(iter(stored))] = "../a.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    line = error_line(run("convert", str(folder), "--to", "full", "--out", str(tmp_path / "x")))
    assert "leads out of it" in line


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_deepspeed(stage: int, ranks: int, tmp_path: Path) -> None:
    expected = tensors_of(DENSE)
    folder = as_huggingface(DENSE, expected, tmp_path / "hf")
    (file,) = folder.glob("*.safetensors")
    source = write_deepspeed(tmp_path / "ds", load_file(file), stage, ranks)
    shutil.copy(folder / "config.json", source)  # as the trainer of transformers leaves it there
    assert equal(converted(source, tmp_path), expected)
    found = run_json("convert", str(source / "global_step7"), "--to", "checkpoint", "--out", str(tmp_path / "c"),
                     "--model", str(folder))  # fmt: skip
    assert found["path"].endswith("step-00000007")
    assert f"ZeRO-{stage}, {ranks} ranks" in found["source"]


def test_deepspeed_with_a_shared_parameter(tmp_path: Path) -> None:
    expected = tensors_of(GPT)
    source = write_deepspeed(tmp_path / "ds", expected, 2, 2, shared={"head.weight": "embedding.weight"})
    assert equal(converted(source, tmp_path, "--model", model_file(GPT, tmp_path)), expected)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (EVEN, {"tp": 2, "pp": 2}),
        (EVEN, {"tp": 1, "pp": 1, "fused": False}),
        (EVEN, {"tp": 2, "pp": 2, "chunks": 2}),
        (GPT, {"tp": 4, "pp": 2, "fused": False}),
    ],
    ids=["tp2-pp2", "alone", "chunks", "gpt"],
)
def test_megatron(model: Model, layout: dict[str, Any], tmp_path: Path) -> None:
    expected = {name: one.bfloat16() for name, one in tensors_of(model).items()}
    source = write_megatron(tmp_path / "meg", model, expected, **layout)
    assert equal(converted(source, tmp_path), expected)
    found = run_json("convert", str(source / "iter_0000012"), "--to", "checkpoint", "--out", str(tmp_path / "c"),
                     "--model", model_file(model, tmp_path))  # fmt: skip
    assert found["path"].endswith("step-00000012")


# -- what is refused ----------------------------------------------------------------------------------------


def refused(source: Path, tmp_path: Path, *flags: str) -> str:
    """The one line, after checking that nothing was written."""
    out = tmp_path / "out"
    line = error_line(run("convert", str(source), "--to", "full", "--out", str(out / "x"), *flags))
    assert not out.exists()
    return line


def test_deepspeed_that_is_not_whole(tmp_path: Path) -> None:
    expected = tensors_of(DENSE)
    model = ("--model", model_file(DENSE, tmp_path))
    source = write_deepspeed(tmp_path / "ds", expected, 2, 3)
    step = source / "global_step7"
    last = step / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    raw = last.read_bytes()
    assert "--model: is missing" in refused(source, tmp_path)
    last.unlink()
    assert "is one of 3, and 2 are there" in refused(source, tmp_path, *model)
    last.write_bytes(raw[: len(raw) // 2])
    assert "cut off" in refused(source, tmp_path, *model)
    flipped = bytearray(raw)
    flipped[len(raw) // 2] ^= 1
    last.write_bytes(flipped)
    assert "damaged" in refused(source, tmp_path, *model)
    last.write_bytes(raw)
    (step / "mp_rank_01_model_states.pt").write_bytes(b"")
    assert "tensor parallelism" in refused(source, tmp_path, *model)
    (step / "mp_rank_01_model_states.pt").unlink()
    (step / "layer_03-model_00-model_states.pt").write_bytes(b"")
    assert "pipeline" in refused(source, tmp_path, *model)
    (step / "layer_03-model_00-model_states.pt").unlink()
    for tag in ("../ds", "/etc", "..", "", "global_step8"):
        (source / "latest").write_text(tag)
        assert "which is not a folder beside it" in refused(source, tmp_path, *model)
    (source / "latest").write_text("global_step7")
    narrow = Model(**{**DENSE.to_dict(), "ffn": 40, "name": "narrow"})
    assert "narrow makes it [40, 32]" in refused(source, tmp_path, "--model", model_file(narrow, tmp_path))
    deeper = Model(**{**DENSE.to_dict(), "layers": 5, "name": "deeper"})
    assert "of deeper is missing" in refused(source, tmp_path, "--model", model_file(deeper, tmp_path))
    shorter = Model(**{**DENSE.to_dict(), "layers": 2, "name": "shorter"})
    assert "belongs to no part of shorter" in refused(source, tmp_path, "--model", model_file(shorter, tmp_path))


def test_megatron_that_is_not_whole(tmp_path: Path) -> None:
    expected = tensors_of(EVEN)
    source = write_megatron(tmp_path / "meg", EVEN, expected, tp=2, pp=2)
    rank = source / "iter_0000012" / "mp_rank_01_001" / "model_optim_rng.pt"
    wide = Model(**{**EVEN.to_dict(), "ffn": 64, "name": "wide"})
    assert "wide makes it" in refused(source, tmp_path, "--model", model_file(wide, tmp_path))
    deeper = Model(**{**EVEN.to_dict(), "layers": 6, "name": "deeper"})
    assert "has 4 layers, deeper has 6" in refused(source, tmp_path, "--model", model_file(deeper, tmp_path))
    torch.save({"model": {"decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(2)}}, rank)
    assert "that differ" in refused(source, tmp_path)
    rank.unlink()
    assert "tensor rank 1, pipeline rank 1" in refused(source, tmp_path)
    for text in ("../x", "13", "-1", "twelve", ""):
        (source / "latest_checkpointed_iteration.txt").write_text(text)
        assert "not an iteration" in refused(source, tmp_path) or text == "13"
    (source / "latest_checkpointed_iteration.txt").write_text("12")


def test_other_mistakes(tmp_path: Path) -> None:
    expected = tensors_of(DENSE)
    folder = as_huggingface(DENSE, expected, tmp_path / "hf")
    existing = tmp_path / "there.safetensors"
    existing.write_bytes(b"mine")
    for to in ("full", "huggingface"):
        line = error_line(run("convert", str(folder), "--to", to, "--out", str(existing)))
        assert "is already there" in line
    assert existing.read_bytes() == b"mine"
    assert run("convert", str(folder), "--to", "checkpoint", "--out", str(tmp_path / "c")).status == 0
    line = error_line(run("convert", str(folder), "--to", "checkpoint", "--out", str(tmp_path / "c")))
    assert "step-00000000: is already there" in line
    assert "is not there" in refused(tmp_path / "absent", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "holds no weights" in refused(tmp_path / "empty", tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "suffix" in refused(tmp_path / "notes.txt", tmp_path)
    torch.save({"epoch": 3}, tmp_path / "nothing.pt")
    assert "holds no state dict" in refused(tmp_path / "nothing.pt", tmp_path, "--model", "tiny")
    torch.save({"a": torch.zeros(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "is not a zip archive" in refused(tmp_path / "old.pt", tmp_path, "--model", "tiny")
    expected["norm.weight"] = expected["norm.weight"].to(torch.int32)
    torch.save(expected, tmp_path / "whole.pt")
    line = refused(tmp_path / "whole.pt", tmp_path, "--model", model_file(DENSE, tmp_path))
    assert "norm.weight: is stored as torch.int32" in line
    shard = tmp_path / "c" / "step-00000000" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert "its checksum differs" in refused(tmp_path / "c", tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of-00001", "../model-00001-of-00001"))
    assert "leads out of it" in refused(folder, tmp_path)
