"""Weights in MXFP4, as gpt-oss is published: the numbers that transformers makes of them, whole and in slices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.families import GPT_OSS, transformers
from models.shapes import tokens
from shardwise.models import Decoder
from shardwise.models.huggingface import write_folder
from shardwise.models.huggingface.folder import SINGLE, open_folder
from shardwise.spec.errors import SpecError

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A folder with random blocks and scales, and the experts that they stand for."""
    config = transformers.GptOssConfig(**{**GPT_OSS, "intermediate_size": 64})
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    files, experts = load_file(tmp_path / SINGLE), {}
    generator = torch.Generator().manual_seed(5)
    for name in [one for one in files if one.endswith(("gate_up_proj", "down_proj"))]:
        number, inputs, outputs = files.pop(name).shape
        blocks = torch.randint(0, 256, (number, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        experts[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert experts[name].shape == (number, inputs, outputs)
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    (tmp_path / SINGLE).unlink()
    save_file(files, tmp_path / SINGLE)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    return tmp_path, experts


def test_the_numbers_are_those_of_transformers(folder: tuple[Path, dict[str, Tensor]]) -> None:
    path, experts = folder
    opened = open_folder(path)
    for layer in range(3):
        both, down = (experts[f"model.layers.{layer}.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
        for part, expected in (("gate", both[..., 0::2]), ("up", both[..., 1::2]), ("down", down)):
            name = f"layers.{layer}.mlp.experts.{part}"
            whole = opened.slice(name, ())
            assert whole.dtype == opened.dtype(name) == torch.bfloat16  # which holds every one of them exactly
            assert torch.equal(whole.float(), expected)
            for slices in ((slice(1, 3), slice(5, 31), slice(2, 7)), (slice(0, 1), slice(30, 32), slice(3, None))):
                assert torch.equal(opened.slice(name, slices), whole[slices])


@torch.no_grad()
def test_they_are_written_as_plain_numbers(folder: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    opened = open_folder(folder[0])
    decoder = Decoder(opened.model).eval()
    decoder.load_state_dict(dict(opened.tensors()))
    again = tmp_path / "again"
    write_folder(again, opened.model, opened.tensors(), source=folder[0])
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(again, dtype=torch.float32).eval()
    torch.testing.assert_close(decoder(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-5)


def test_blocks_of_another_size_are_one_line(folder: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = folder
    files = load_file(path / SINGLE)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    files[name] = files[name][..., :8].contiguous()
    (path / SINGLE).unlink()
    save_file(files, path / SINGLE)
    with pytest.raises(SpecError, match=r"^model\.layers\.1\S*_blocks: is not MXFP4") as caught:
        open_folder(path).slice("layers.1.mlp.experts.down", ())
    assert "\n" not in str(caught.value)
