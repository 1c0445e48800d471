"""Folders that bitsandbytes has quantised, as transformers saves them, are read as the numbers they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.families import saved
from models.shapes import tokens
from shardwise.models import Decoder
from shardwise.models.huggingface.folder import SINGLE, open_folder
from shardwise.models.weight_formats import NF4_CODE, dynamic_code, encode
from shardwise.spec.errors import SpecError


def quantised(name: str, weight: Tensor, double: bool) -> dict[str, Tensor]:
    """What transformers 5.22 and bitsandbytes 0.50 save of a linear layer's weight."""
    encoded = encode("nf4-double" if double else "nf4", weight.reshape(-1, 64))
    about: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {name: encoded["codes"].view(-1, 1), f"{name}.quant_map": torch.tensor(NF4_CODE)}
    if double:
        about |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(encoded["offset"])}
        tensors |= {f"{name}.nested_absmax": encoded["nested"], f"{name}.absmax": encoded["scales"].flatten()}
        tensors[f"{name}.nested_quant_map"] = torch.tensor(dynamic_code())
    else:
        tensors[f"{name}.absmax"] = encoded["scales"].view(torch.float32).flatten()
    state = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    return {**tensors, f"{name}.quant_state.bitsandbytes__nf4": state}


def of_base(folder: Path, double: bool) -> dict[str, Tensor]:
    """Replaces the weights of a folder by quantised ones; those that it had."""
    weights = load_file(folder / SINGLE)
    linear = [name for name in weights if "_proj" in name]
    changed = {name: tensor for name, tensor in weights.items() if name not in linear}
    for name in linear:
        changed |= quantised(name, weights[name], double)
    save_file(changed, folder / SINGLE, metadata={"format": "pt"})
    return {name: weights[name] for name in linear}


@pytest.mark.parametrize("double", [False, True], ids=["nf4", "nf4-double"])
def test_weights_are_what_their_codes_stand_for(double: bool, tmp_path: Path) -> None:
    theirs: Any = saved("llama", tmp_path)
    plain = of_base(tmp_path, double)
    folder = open_folder(tmp_path)
    found = dict(folder.tensors())
    down, name = found["layers.1.mlp.down.weight"], "model.layers.1.mlp.down_proj.weight"
    assert (down - plain[name]).abs().max() < 0.2 * plain[name].abs().max()
    assert not torch.equal(down, plain[name]) and len(down.unique()) <= 16 * down.numel() // 64
    if not double:  # the largest of a block stands for itself, so that quantising again changes nothing
        assert torch.equal(
            encode("nf4", down.reshape(-1, 64))["codes"].flatten(), load_file(tmp_path / SINGLE)[name].flatten()
        )
    for rows, columns in ((slice(3, 9), slice(10, 20)), (slice(0, 1), slice(None)), (slice(20, 32), slice(0, 5))):
        assert torch.equal(folder.slice("layers.1.mlp.down.weight", (rows, columns)), down[rows, columns])
    decoder = Decoder(folder.model).eval()
    decoder.load_state_dict(found)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "_proj" in name:
                parameter.copy_(found_under(name, found))
        torch.testing.assert_close(decoder(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-4)


def found_under(name: str, found: dict[str, Tensor]) -> Tensor:
    ours = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
    _, _, layer, part, linear, _ = name.split(".")
    inside = "attention" if part == "self_attn" else "mlp"
    return found[f"layers.{layer}.{inside}.{ours.get(linear, linear.removesuffix('_proj'))}.weight"]


def test_what_describes_no_weight_gets_one_line(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    of_base(tmp_path, False)
    tensors = load_file(tmp_path / SINGLE)
    name = next(name for name in tensors if "quant_state" in name)
    tensors[name] = torch.zeros(3, dtype=torch.uint8)
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(SpecError, match="does not describe a quantised weight"):
        dict(open_folder(tmp_path).tensors())
