"""Folders of PyTorch's distributed checkpoint: TorchTitan's, Megatron-LM's with torch_dist, anybody's."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cli.running import error_line, run, run_json
from engine.workers import on_ranks
from shardwise.models.attention import rope_frequencies, rotate, rotation_of
from shardwise.spec.model import Model
from training.convert.foreign_folders import write_megatron_distributed
from training.convert.test_convert import (
    DENSE,
    EVEN,
    GPT,
    as_huggingface,
    converted,
    equal,
    model_file,
    refused,
    tensors_of,
)
from training.convert.test_torch_file import Calls

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
META = {
    "embedding": "tok_embeddings", "norm": "norm", "head": "output", "attention_norm": "attention_norm",
    "mlp_norm": "ffn_norm", "attention.query": "attention.wq", "attention.key": "attention.wk",
    "attention.value": "attention.wv", "attention.output": "attention.wo", "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2",
}  # fmt: skip


def save_sharded(folder: str, tensors: dict[str, Tensor]) -> None:
    """Rows over the ranks, unevenly where they do not divide, as `fully_shard` leaves them; norms cut as well."""
    mesh = init_device_mesh("cpu", (2,))
    sharded: dict[str, Any] = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in tensors.items()}
    moments = {name: torch.zeros(3) for name in tensors}
    checkpoint.save({"model": sharded, "optimizer": {"state": moments}, "step": 7}, checkpoint_id=folder)


@pytest.mark.parametrize("names", ["ours", "huggingface"])
def test_shards_of_two_ranks(names: str, tmp_path: Path) -> None:
    expected = tensors_of(DENSE)
    stored = expected
    if names == "huggingface":
        from safetensors.torch import load_file

        (path,) = as_huggingface(DENSE, expected, tmp_path / "hf").glob("*.safetensors")
        stored = load_file(path)
    on_ranks(2, save_sharded, str(tmp_path / "dcp"), stored)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    assert equal(converted(tmp_path / "dcp", tmp_path, "--model", model_file(DENSE, tmp_path)), expected)


def as_meta(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By Meta's names; a pair that rope turns stands side by side."""
    found = {}
    for name, one in tensors.items():
        module = name.removesuffix(".weight")
        before, inner = "", module
        if module.startswith("layers."):
            _, number, inner = module.split(".", 2)
            before = f"layers.{number}."
        if inner in ("attention.query", "attention.key"):
            one = one.unflatten(0, (-1, 2, model.head_size // 2)).transpose(1, 2).flatten(0, 2)
        found[f"{before}{META[inner]}.weight"] = one
    return found


def turned_as_pairs(heads: Tensor, frequencies: Tensor) -> Tensor:
    """Rope as Meta's code has it: neighbouring numbers are one complex number. ``heads``: position × features."""
    angles = torch.outer(torch.arange(len(heads)).float(), frequencies)
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def test_names_of_meta_and_torchtitan(tmp_path: Path) -> None:
    """The scores of attention are the same, computed as they do with their weights and as we do with ours."""
    expected = tensors_of(DENSE)
    theirs = as_meta(DENSE, expected)
    checkpoint.save({"model": theirs}, checkpoint_id=tmp_path / "titan", no_dist=True)
    named = ("--model", model_file(DENSE, tmp_path))
    found = converted(tmp_path / "titan", tmp_path, *named)
    assert equal(found, expected)
    torch.save({**theirs, "rope.freqs": torch.zeros(4)}, tmp_path / "consolidated.00.pth")
    (tmp_path / "full.safetensors").unlink()
    assert equal(converted(tmp_path / "consolidated.00.pth", tmp_path, *named), expected)
    hidden, size = torch.randn(6, DENSE.hidden), DENSE.head_size
    rotation = rotation_of(DENSE, torch.arange(6)[None])

    def ours(name: str) -> Tensor:
        heads = hidden @ found[f"layers.0.attention.{name}.weight"][:size].T
        return rotate(heads[None, :, None], rotation)[0, :, 0]

    def as_they_do(name: str) -> Tensor:
        frequencies = rope_frequencies(size, DENSE.numerics.rope_theta, None, torch.arange(1))
        return turned_as_pairs(hidden @ theirs[f"layers.0.attention.{name}.weight"][:size].T, frequencies)

    torch.testing.assert_close(ours("query") @ ours("key").T, as_they_do("wq") @ as_they_do("wk").T)


@pytest.mark.parametrize("model", [EVEN, GPT], ids=["gated", "gpt"])
def test_megatron(model: Model, tmp_path: Path) -> None:
    expected = {name: one.bfloat16() for name, one in tensors_of(model).items()}
    source = write_megatron_distributed(tmp_path / "meg", model, expected)
    assert equal(converted(source, tmp_path), expected)
    found = run_json("convert", str(source / "iter_0000012"), "--to", "checkpoint", "--out", str(tmp_path / "c"),
                     "--model", model_file(model, tmp_path))  # fmt: skip
    assert found["path"].endswith("step-00000012")


# -- what is refused ----------------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    """The metadata with something else in it; pickled as PyTorch does."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    good, bad, model = tmp_path / "good", tmp_path / "bad", ("--model", model_file(DENSE, tmp_path))
    checkpoint.save(tensors_of(DENSE), checkpoint_id=good, no_dist=True)
    assert "--model: is missing" in refused(good, tmp_path)

    def line(spoil: Callable[[Path], Any]) -> str:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        spoil(bad)
        return refused(bad, tmp_path, *model)

    def data(folder: Path) -> Path:
        (path,) = folder.glob("*.distcp")
        return path

    def every_place(name: str, value: Any) -> Callable[[Path], None]:
        def change(metadata: Any) -> None:
            for place in metadata.storage_data.values():
                setattr(place, name, value)

        return lambda folder: changed(folder, change)

    def flip(folder: Path) -> None:
        raw = bytearray(data(folder).read_bytes())
        raw[len(raw) // 2] ^= 1
        data(folder).write_bytes(raw)

    def chunk_elsewhere(metadata: Any) -> None:
        metadata.state_dict_metadata["embedding.weight"].chunks[0].sizes = torch.Size((3, 3))

    assert ".metadata: is missing" in line(lambda folder: (folder / ".metadata").unlink())
    assert "distcp: is missing" in line(lambda folder: data(folder).unlink())
    assert "is too short to hold" in line(lambda folder: data(folder).write_bytes(data(folder).read_bytes()[:-5000]))
    assert "is outside the folder" in line(every_place("relative_path", "../good/x.distcp"))
    assert "compressed" in line(every_place("transform_descriptors", ["zstd"]))
    assert "is too short to hold" in line(every_place("offset", -4))
    assert "is not whole" in line(lambda folder: changed(folder, chunk_elsewhere))
    assert "cannot be read as a pickle" in line(lambda folder: (folder / ".metadata").write_bytes(b"no pickle"))
    shutil.rmtree(bad)
    shutil.copytree(good, bad)
    flip(bad)  # which is seen when the numbers are read
    out = tmp_path / "late" / "x"
    assert "damaged" in error_line(run("convert", str(bad), "--to", "full", "--out", str(out), *model))
    assert not list(out.parent.glob("*"))
    marker = tmp_path / "marker"
    hostile = pickle.dumps(Calls(os.system, f"touch {marker}"))
    assert "none of it was executed" in line(lambda folder: (folder / ".metadata").write_bytes(hostile))
    assert not marker.exists()


def test_megatron_of_another_model(tmp_path: Path) -> None:
    source = write_megatron_distributed(tmp_path / "meg", EVEN, tensors_of(EVEN))
    deeper = Model(**{**EVEN.to_dict(), "layers": 6, "name": "deeper"})
    assert "has 4 layers, deeper has 6" in refused(source, tmp_path, "--model", model_file(deeper, tmp_path))
    (source / "iter_0000012" / "common.pt").unlink()
    assert "name it: --model" in refused(source, tmp_path)
