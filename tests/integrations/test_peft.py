"""PEFT's models, frozen layers and quantised bases under other frameworks' loops are priced as what they train."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from integrations.test_layout import SEQUENCES, state
from integrations.tiny import network
from shardwise.integrations.accelerate import layout_of
from shardwise.integrations.layout import job_of
from shardwise.integrations.module import NotPriced, module_facts
from shardwise.interop.jobs import read_job
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.parameters import trained_parameters
from tables import table


def adapted(base: Any = None, **changes: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return get_peft_model(base or network(num_key_value_heads=4), LoraConfig(**{**settings, **changes}))


def job(module: Any) -> Job:
    layout = layout_of(state("MULTI_GPU"), module, None, 2, 1)
    facts = module_facts(module)
    optimizer = torch.optim.AdamW([parameter for parameter in module.parameters() if parameter.requires_grad])
    return job_of(layout, facts, SEQUENCES, optimizer, cluster_from("dgx-h100:1"))[0]


@table(
    ("changes", "fields"),
    [
        ({}, {"rank": 4, "alpha": 8.0, "targets": ("q_proj", "v_proj")}),
        ({"target_modules": "all-linear", "use_dora": True}, {"method": "dora"}),
        ({"use_rslora": True, "lora_dropout": 0.1}, {"scaling": "rank-stabilised", "dropout": 0.1}),
        ({"layers_to_transform": [1]}, {"layers": (1,)}),
    ],
)
def test_an_adapter_is_priced_as_it_is(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    module = adapted(**changes)
    made = job(module)
    adapters = made.training.adapters
    assert adapters is not None
    assert {name: getattr(adapters, name) for name in fields} == fields
    counted = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert trained_parameters(made.model, made.training.tuning) == counted


def test_whole_modules_beside_an_adapter_are_trained() -> None:
    module = adapted(modules_to_save=["lm_head", "norm"])
    assert job(module).training.trained == ("head", "norms")


def test_frozen_parts_are_priced_as_frozen() -> None:
    module = network()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name or "lm_head" in name)
    assert job(module).training.trained == ("head", "norms")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".layers.1." in name)
    assert job(module).training.trained == ("layers.1.attention", "layers.1.mlp", "layers.1.norms")


def test_a_base_of_16_bits_stays_so_beside_fp32_adapters() -> None:
    made = job(adapted(network(num_key_value_heads=4).to(torch.bfloat16)))
    assert made.training.base_precision == "bf16"
    assert made.training.optimizer == "adamw" and not made.autocasts


@table(
    ("settings", "base"),
    [
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4-double"),
        ({"load_in_4bit": True}, "nf4"),
        ({"load_in_8bit": True}, "int8"),
    ],
)
def test_bitsandbytes_formats_are_known(settings: dict[str, Any], base: str) -> None:
    module = adapted()
    module.config.quantization_config = {"quant_method": "bitsandbytes", **settings}
    assert module_facts(module).tuning["training.base_precision"] == base


def test_what_has_no_price_is_said() -> None:
    half = network()
    next(p for name, p in half.named_parameters() if name.endswith("layers.0.self_attn.q_proj.weight")).requires_grad_(
        False
    )
    with pytest.raises(NotPriced, match="other parameters of its attention are trained"):
        module_facts(half)
    quantised = network()
    quantised.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(NotPriced, match="only by adapters"):
        module_facts(quantised)
    quantised.config.quantization_config = {"quant_method": "hqq"}
    with pytest.raises(NotPriced, match="quantised by hqq"):
        module_facts(quantised)
    ranked = adapted(rank_pattern={"q_proj": 8})
    with pytest.raises(NotPriced, match="rank_pattern"):
        module_facts(ranked)
    other = adapted()
    other.peft_config["default"] = SimpleNamespace(peft_type="IA3")
    with pytest.raises(NotPriced, match="IA3"):
        module_facts(other)


def test_a_trainer_of_an_adapter_is_priced_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from integrations.test_huggingface import trainer
    from shardwise.integrations.huggingface import ShardwiseCallback

    watched = trainer(tmp_path, model=adapted(), max_steps=2)
    watched.add_callback(ShardwiseCallback(cluster="laptop:1"))
    watched.train()
    made = read_job(tmp_path / "shardwise" / "job.yaml")
    assert made.training.adapters is not None and made.training.adapters.rank == 4
    assert "not priced" not in capsys.readouterr().out
