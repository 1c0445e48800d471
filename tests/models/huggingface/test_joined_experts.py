"""Mixtures saved as `transformers` 5 has them in memory: all gates and ups in one tensor, all downs in another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from shardwise.models.huggingface.folder import open_folder
from shardwise.spec.errors import SpecError

TINY = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS = {
    "mixtral": transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=4
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_both_forms_are_read_alike(family: str, tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_config(CONFIGS[family])
    network.save_pretrained(tmp_path / "apart")
    joined = tmp_path / "joined"
    joined.mkdir()
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    save_file(state, joined / "model.safetensors", metadata={"format": "pt"})
    (joined / "config.json").write_text((tmp_path / "apart" / "config.json").read_text())
    one, other = open_folder(tmp_path / "apart"), open_folder(joined)
    assert one.naming.places.keys() == other.naming.places.keys()
    for name in one.naming.places:
        assert torch.equal(one.slice(name, ()), other.slice(name, ())), name
    part = (slice(1, 3), slice(4, 9), slice(2, 7))
    for matrix in ("gate", "up"):
        name = f"layers.1.mlp.experts.{matrix}"
        assert torch.equal(one.slice(name, part), other.slice(name, part))


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_config(CONFIGS["mixtral"])
    state = {
        name: tensor.contiguous() for name, tensor in network.state_dict().items() if "1.mlp.experts.down" not in name
    }
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    network.config.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"model\.layers\.1\.mlp\.experts\.down_proj.*missing"):
        open_folder(tmp_path)
