"""The parameters of published models are those of the networks that transformers builds from the same configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interop.published_configs import CATALOGUE, COUNTED, DEFAULTS
from models.families import CASES, transformers
from shardwise.interop.families import FAMILIES
from shardwise.interop.huggingface import hf_config_from_model, model_from_hf_config
from shardwise.spec import presets
from shardwise.spec.layers import DELTA_CHUNK, DeltaNet
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count

CONFIGS: dict[str, dict[str, Any]] = {name: config for name, (_, config) in (*CATALOGUE.items(), *COUNTED.items())}
CONFIGS |= {name: {"model_type": name} for name in DEFAULTS}
LEFT_OUT = {"opt": 2 * 768, "apertus": 2 * 32}  # two spare positions; two constants of each layer, kept as buffers


def _has_a_network(model_type: str) -> bool:
    """The library has no language model of those that read pictures by itself."""
    return model_type != "kimi_k2" and "_vl" not in model_type


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if _has_a_network(config["model_type"])])
def test_parameters_are_those_of_transformers(name: str) -> None:
    assert_counted(CONFIGS[name], parameter_count(model_from_hf_config(CONFIGS[name])))


@pytest.mark.quick(3)
@pytest.mark.parametrize("entry", [name for name in presets.names("model") if name not in ("bert-large", "palm-540b")])
def test_parameters_of_the_catalogue_are_those_of_transformers(entry: str) -> None:
    model = presets.load("model", Model, entry)
    assert_counted(hf_config_from_model(model), parameter_count(model))


def assert_counted(written: dict[str, Any], parameters: int) -> None:
    config = dict(written)
    model_type = config.pop("model_type")
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))
    kept = network.state_dict()  # with the balancing biases of routers, which are buffers
    tensors = [*network.parameters(), *(buffer for part, buffer in network.named_buffers() if part in kept)]
    assert parameters == sum(tensor.numel() for tensor in tensors) - LEFT_OUT.get(model_type, 0)


def test_delta_nets_in_any_order_and_shape() -> None:
    """Dense layers first, keys shared by three value heads, biases, a convolution of three tokens."""
    layers = ["full_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"]
    config = {
        "model_type": "qwen3_next", "num_hidden_layers": 5, "layer_types": layers, "mlp_only_layers": [0, 1],
        "linear_num_value_heads": 48, "linear_conv_kernel_dim": 3, "attention_bias": True, "num_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    model = model_from_hf_config(config)
    assert_counted(config, parameter_count(model))
    again = model_from_hf_config(hf_config_from_model(model))
    assert again.every_layer == model.every_layer and again.delta == model.delta


def test_products_of_a_delta_net_are_those_of_transformers() -> None:
    """FLOPs of its chunks as PyTorch counts them, which leaves out the two triangular systems of each."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    net, seq = DeltaNet(key_heads=2, value_heads=2, key_dim=48, value_dim=96), 4 * DELTA_CHUNK
    query, key, value = (torch.zeros(1, seq, 2, size, device="meta") for size in (48, 48, 96))
    rates = torch.zeros(1, seq, 2, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch_chunk_gated_delta_rule(query, key, value, rates, rates, chunk_size=DELTA_CHUNK)
    systems = 2 * DELTA_CHUNK * (48 + 96)
    assert counter.get_total_flops() == seq * net.value_heads * (net.head_flops - systems)


def test_every_family_with_weights_is_compared_with_transformers() -> None:
    """As docs/models.md says of them; the cases are those of logits, gradients, adapters and generated tokens."""
    compared = set()
    for name, settings in CASES.values():
        config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
        compared.add(config(**settings).model_type)
    assert {name for name, family in FAMILIES.items() if family.tensors} <= compared
