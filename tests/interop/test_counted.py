"""Models that no table describes: counted of the code of transformers, exact in parameters, never a traceback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.running import error_line, run
from shardwise.api import analyze
from shardwise.cost.analysis import analyze as priced
from shardwise.interop import counted
from shardwise.interop.counted import Counts, described_or_counted, fitted
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.models.huggingface import counting
from shardwise.spec.bare_model import BareModel
from shardwise.spec.counted import CodeCounts
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count
from shardwise.spec.support import verdict
from shardwise.ui.given import job_of
from shardwise.uncertainty.residuals import error_bar
from tables import table

transformers = pytest.importorskip("transformers")
FAMILIES = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
QUICK = ("qwen3_next", "mamba2", "deepseek_v32", "gemma3n_text", "zamba2")
INDEXER = {"indexer_budget": 2048, "indexer_compress_ratio": 4, "indexer_n_heads": 16, "indexer_kv_heads": 1,
           "indexer_head_dim": 256}  # fmt: skip
# What the published configurations of these families say, and defaults alone do not.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4},
                                                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": {"model_type": "qwen4_exp_text", **INDEXER}},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True},
}  # fmt: skip
# Not decoders of text alone, or without defaults that make one.
REFUSED = {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen",
           "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "whisper"}  # fmt: skip


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, **NEEDED.get(family, {})}


def parameters_of(config: Mapping[str, Any]) -> int:
    """Those of the decoder that transformers itself builds."""
    auto = transformers.AutoModelForCausalLM
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[config["model_type"]]
    described = kind(**{name: value for name, value in config.items() if name != "model_type"})
    with torch.device("meta"):
        try:
            network = auto.from_config(described.get_text_config(decoder=True))
        except ValueError:
            network = auto.from_config(described)
    return int(network.num_parameters())


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in FAMILIES]
)
def test_every_decoder_of_transformers_is_counted_to_the_digit_or_refused_in_words(family: str) -> None:
    config = config_of(family)
    if family in REFUSED:
        with pytest.raises(counting.NotCounted, match=r"decoder"):
            counting.counts(config)
        return
    counts = Counts.of(json.loads(json.dumps(counting.counts(config))))
    model = fitted(counts)
    assert parameter_count(model) == counts.parameters == parameters_of(config)
    assert Model.from_dict(model.to_dict()) == model
    assert model.counted is not None and model.counted.layer_parameters < 0.03 * counts.parameters


def counts_of(family: str, **changes: Any) -> Counts:
    return Counts.of(counting.counts({**config_of(family), **changes}))


def test_what_a_table_describes_too_is_found_in_the_code() -> None:
    """Sizes, attention, windows and experts are recognised, and so are FLOPs: nothing is left over."""
    qwen = fitted(counts_of("qwen3_moe", head_dim=128))
    assert (qwen.heads, qwen.kv_heads, qwen.head_dim, qwen.activation) == (32, 4, 128, "swiglu")
    assert qwen.moe is not None and (qwen.moe.experts, qwen.moe.top_k, qwen.moe.ffn) == (128, 8, 768)
    gemma = fitted(counts_of("gemma3_text"))
    assert gemma.ffn == 9216 and gemma.sliding_window == 4096
    assert [count for _, count in gemma.layers_of_kinds] == [22, 4]
    latent = fitted(counts_of("deepseek_v3"))
    assert latent.mla is not None and latent.mla.kv_rank == 512
    assert latent.moe is not None and latent.moe_layers == 58 and latent.moe.shared_ffn == 2048
    for model in (qwen, gemma, latent):
        assert model.counted is not None and model.counted.layer_flops < 1e6
        assert model.counted.layer_parameters < 1e6 and abs(model.counted.end_parameters) < 1e6


@table("family", ["llama", "qwen3", "olmo2", "qwen3_moe"])
def test_the_price_is_that_of_the_description(family: str) -> None:
    described, code = model_from_hf_config({"model_type": family}), fitted(counts_of(family))
    job = {"cluster": "dgx-h100:8", "strategy": {"tp": 8, "dp": 8, "zero": 1}, "training": {"global_batch": 64}}
    prices = [priced(Job.from_dict({**job, "model": model})) for model in (described, code)]
    assert code.counted is not None and prices[1].predicted_seconds == pytest.approx(prices[0].predicted_seconds, 1e-3)
    assert prices[1].memories[0].total == pytest.approx(prices[0].memories[0].total, 1e-3)


def test_weights_that_are_used_again_are_computed_again() -> None:
    """Zamba 2 has one block of attention and MLP behind several layers."""
    model = fitted(counts_of("zamba2"))
    assert model.counted is not None
    assert model.counted.layer_flops * model.layers > 0.5 * 2 * parameter_count(model)


def test_a_network_whose_code_asks_for_values_is_counted_by_its_weights() -> None:
    counts = counts_of("jetmoe")
    assert counts.flops is None
    assert "not traced" in " ".join(fitted(counts).counted.notes)  # type: ignore[union-attr]


# -- as a model of a job ---------------------------------------------------------------------------------------------

SMALL = {
    "model_type": "smollm3", "_name_or_path": "somebody/small", "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "pad_token_id": 1,
    "strange_new_key": {"of": "nobody"},
}  # fmt: skip
STRANGE = {
    "model_type": "falcon_h1", "_name_or_path": "somebody/strange", "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1000,
    "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32,
}  # fmt: skip


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """CodeCounts here: a process of its own imports transformers for some seconds."""
    counted._fitted.cache_clear()
    monkeypatch.setattr(counted, "_answer", lambda config: counting.counts(json.loads(config)))


def test_a_folder_is_priced_and_not_run(in_this_process: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(STRANGE))
    model = described_or_counted(tmp_path)
    assert model.name == "strange" and model.counted is not None
    result = run("analyze", "--model", str(tmp_path), "--cluster", "laptop", "--global-batch", "8")
    assert result.status == 0 and result.err.count("priced from its code (FalconH1ForCausalLM of transformers") == 1
    plan = run("plan", "--model", str(tmp_path), "--cluster", "laptop", "--global-batch", "8", "--seq", "512")
    assert plan.status == 0 and "priced from its code" in plan.out + plan.err
    for verb in ("train", "verify"):
        line = error_line(run(verb, "--model", str(tmp_path), "--cluster", "laptop", "--global-batch", "8"))
        assert "its code was counted" in line and "shardwise.parallelize" in line


def test_the_page_prices_a_pasted_config(in_this_process: None) -> None:
    job, notes = job_of({"model": STRANGE, "cluster": "laptop", "global_batch": 8})
    assert job.model.counted is not None
    assert len([note for note in notes if "priced from its code" in note]) == 1
    again = Job.from_dict(job.to_dict())
    assert again.model == job.model and analyze(again).job.model == job.model


def test_its_bar_is_that_of_a_stranger() -> None:
    known = Job.from_dict({"model": "llama3-8b", "cluster": "dgx-h100:8", "strategy": {"dp": 64, "zero": 3},
                           "training": {"global_batch": 64}})  # fmt: skip
    unknown = replace(known, model=replace(known.model, counted=CodeCounts(code="somebody's")))
    narrow, wide = error_bar(known), error_bar(unknown)
    assert wide.time_high - wide.time_low > narrow.time_high - narrow.time_low
    assert "framework not seen" in wide.time_of
    assert verdict(known).status == "runs" and verdict(unknown).status == "priced only"


# -- mistakes --------------------------------------------------------------------------------------------------------


@table(
    ("changes", "field"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 1e300}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_local_experts": 10**9}, "num_local_experts"),
        ({"layer_types": ["mamba"] * 90_000}, "layer_types"),
        ({"text_config": {"model_type": "falcon_h1", "hidden_size": -4}}, "text_config.hidden_size"),
    ],
)  # fmt: skip
def test_a_hostile_config_is_one_line_before_anything_starts(
    changes: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(SpecError) as caught:
        described_or_counted({**STRANGE, **changes})
    assert caught.value.field == field and len(str(caught.value)) < 200 and "\n" not in str(caught.value)


@pytest.mark.slow
@table(
    "config",
    [
        {**STRANGE, "mamba_d_conv": -3},
        {**STRANGE, "mamba_n_heads": "many"},
        {**STRANGE, "rope_parameters": [[[]]]},
        {"model_type": "t5", "num_layers": 2},
        {"model_type": "vit"},
    ],
)
def test_what_the_code_does_not_take_is_one_line(config: dict[str, Any]) -> None:
    """In the process of its own, as for a user."""
    with pytest.raises(SpecError) as caught:
        described_or_counted(config)
    assert caught.value.field == "model_type" and "cannot be counted" in str(caught.value)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.slow
def test_the_process_of_its_own_counts_the_same() -> None:
    counted._fitted.cache_clear()
    own = described_or_counted(STRANGE)
    assert parameter_count(own) == parameters_of({**STRANGE, "_name_or_path": ""})


def test_code_of_a_publisher_is_not_run() -> None:
    with pytest.raises(SpecError, match=r"not supported and its own code \(auto_map\) is not run; .*give params="):
        described_or_counted({"model_type": "unheard_of", "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}})


def test_without_transformers_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "is_installed", lambda name: name != "transformers")
    with pytest.raises(SpecError, match=r"pip install torch transformers, or give params=.*layers=.*hidden="):
        described_or_counted(STRANGE)


# -- a few numbers alone ---------------------------------------------------------------------------------------------


def test_parameters_layers_and_hidden_size_make_a_model(tmp_path: Path) -> None:
    numbers = {"params": "13B", "layers": 40, "hidden": 5120}
    (tmp_path / "job.yaml").write_text(f"model: {json.dumps(numbers)}\ncluster: dgx-h100:1\n"
                                       "strategy: {dp: 8, zero: 3}\ntraining: {global_batch: 8}\n")  # fmt: skip
    result = run("analyze", str(tmp_path / "job.yaml"))
    assert result.status == 0 and "assumed: 40 heads of 128 features" in result.err and "13.0B" in result.out
    flags = run("analyze", "--params", "13B", "--layers", "40", "--hidden", "5120", "--cluster", "dgx-h100:1",
                "--dp", "8", "--zero", "3", "--global-batch", "8")  # fmt: skip
    assert flags.status == 0 and "assumed: 40 heads of 128 features" in flags.err
    model = BareModel.from_dict(numbers).model
    assert abs(parameter_count(model) - 13e9) < 13e9 / 100
    assert analyze(model=numbers, cluster="dgx-h100:1", dp=8, zero=3, global_batch=8).job.model == model


@table(
    ("numbers", "part"),
    [
        ({"params": "13B", "layers": 40}, "model.hidden: is missing"),
        ({"params": "1M", "layers": 40, "hidden": 5120}, "model.params: 1,000,000 is too few"),
        ({"params": "13B", "layers": 40, "hidden": 5120, "ffn": 8}, "model.ffn: unknown field"),
        ({"params": "lots", "layers": 40, "hidden": 5120}, "model.params: 'lots'"),
    ],
)
def test_a_mistake_in_few_numbers_names_its_field(numbers: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError) as caught:
        analyze(model=numbers, cluster="dgx-h100:1", dp=8)
    assert part in str(caught.value)
