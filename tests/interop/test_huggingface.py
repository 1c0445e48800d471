"""Hugging Face configs: published ones give the catalogue's models, mistakes give one line with the key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interop.published_configs import CATALOGUE, COUNTED, DEFAULTS
from shardwise.interop.families import ALIASES, FAMILIES
from shardwise.interop.huggingface import hf_config_from_model, left_out, model_from_hf_config
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.spec.numerics import Numerics
from shardwise.spec.parameters import parameter_count
from tables import table

LLAMA = CATALOGUE["meta-llama/Meta-Llama-3-8B"][1]


def shape(model: Model) -> Model:
    return replace(model, name="", source="", published_parameters=None, numerics=Numerics())


@table("repository", CATALOGUE)
def test_published_config_is_the_catalogue_model(repository: str) -> None:
    entry, config = CATALOGUE[repository]
    preset = presets.load("model", Model, entry)
    model = model_from_hf_config(config)
    assert shape(model) == shape(preset)
    assert parameter_count(model) == parameter_count(preset)


@table("repository", COUNTED)
def test_published_config_has_the_published_parameters(repository: str) -> None:
    parameters, config = COUNTED[repository]
    assert parameter_count(model_from_hf_config(config)) == parameters


@table("family", DEFAULTS)
def test_the_librarys_defaults_have_the_librarys_parameters(family: str) -> None:
    assert parameter_count(model_from_hf_config({"model_type": family})) == DEFAULTS[family]


def test_the_parameters_of_every_family_are_checked() -> None:
    seen = {config["model_type"] for _, config in (*CATALOGUE.values(), *COUNTED.values())}
    assert seen | DEFAULTS.keys() == {*FAMILIES, *ALIASES}


@table("model_type", sorted({*FAMILIES, *ALIASES} - {"deepseek_v2", "dots1"}))
def test_library_defaults_alone_make_a_model(model_type: str) -> None:
    assert model_from_hf_config({"model_type": model_type}).name in (model_type, "deepseek_v3")


def test_a_default_that_differs_from_llama_is_the_familys_own() -> None:
    assert model_from_hf_config({"model_type": "mistral"}).kv_heads == 8
    assert model_from_hf_config({"model_type": "qwen3"}).head_dim == 128
    assert model_from_hf_config({"model_type": "gemma"}).tied_embeddings
    assert not model_from_hf_config({"model_type": "llama"}).tied_embeddings


# -- where a config comes from -----------------------------------------------------------------------------


def test_reads_a_file_and_the_folder_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "_name_or_path": "meta-llama/Meta-Llama-3-8B"}))
    model = model_from_hf_config(tmp_path)
    assert model == model_from_hf_config(str(tmp_path / "config.json"))
    assert model.name == "Meta-Llama-3-8B"
    assert model_from_hf_config(tmp_path, name="mine").name == "mine"


def test_reads_the_language_model_of_a_multimodal_config() -> None:
    config = {"model_type": "llava", "_name_or_path": "llava", "text_config": LLAMA, "vision_config": {}}
    assert shape(model_from_hf_config(config)) == shape(model_from_hf_config(LLAMA))
    assert model_from_hf_config(config).name == "llava"


def test_reads_the_language_model_where_its_keys_stand_beside_the_tower() -> None:
    """As Qwen2-VL's older configs have them, with positions that differ only between the tokens of a picture."""
    sizes = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
    sizes["rope_theta"] = 10**6
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    config = {"model_type": "qwen2_5_vl", **sizes, **rope, "vision_config": {"depth": 32}}
    assert shape(model_from_hf_config(config)) == shape(model_from_hf_config({"model_type": "qwen2", **sizes}))
    (note,) = left_out(config)
    assert "qwen2_5_vl" in note and "vision_config" in note
    (note,) = left_out({"model_type": "qwen2_5_vl", "text_config": sizes, "vision_config": {}})
    assert "text_config" in note
    assert left_out({"model_type": "qwen2", **sizes, "quantization_config": {}}) == []


def test_a_mistake_in_the_language_model_names_its_place() -> None:
    with pytest.raises(SpecError, match=r"^text_config\.hidden_size: "):
        model_from_hf_config({"model_type": "llava", "text_config": {**LLAMA, "hidden_size": -1}})


# -- mistakes ----------------------------------------------------------------------------------------------


@table(
    ("changes", "field"),
    [
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": -4096}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 4096.5}, "hidden_size"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"hidden_size": [4096]}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"hidden_act": "laplace"}, "hidden_act"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq"),
        ({"model_type": "deepseek_v3", "n_shared_experts": -1}, "n_shared_experts"),
        ({"model_type": "deepseek_v3", "n_shared_experts": "one"}, "n_shared_experts"),
        ({"model_type": "deepseek_v3", "num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"model_type": "deepseek_v3", "scoring_func": "argmax"}, "scoring_func"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, "mlp_only_layers"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1.5}, "max_window_layers"),
        ({"model_type": "olmo3", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "olmo3", "layer_types": "full_attention"}, "layer_types"),
        ({"model_type": "olmo3", "layer_types": ["full_attention"] * 1_000_000}, "layer_types"),
        ({"model_type": "olmo3", "layer_types": [["full_attention"]] * 32}, "layer_types"),
        ({"model_type": "olmo3", "layer_types": ["linear_attention"] * 32}, "layer_types"),
        ({"model_type": "olmo3", "sliding_window": None}, "sliding_window"),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "rope_parameters.sliding_attention.rope_type",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layers": [2] * 36}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
        ({"model_type": "granite", "logits_scaling": float("nan")}, "logits_scaling"),
        ({"model_type": "granite", "attention_multiplier": -1.0}, "attention_multiplier"),
        ({"model_type": "granite", "attention_multiplier": True}, "attention_multiplier"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier"),
        ({"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic"}}, "rope_scaling.rope_type"),
        ({"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": -1}}, "rope_scaling.alpha"),
        ({"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": "x"}}, "rope_scaling.alpha"),
        ({"model_type": "helium", "head_dim": 64}, "head_dim"),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm"),
        ({"model_type": "cohere", "logit_scale": None}, "logit_scale"),
        ({"model_type": "cohere2", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ({"model_type": "exaone4", "layer_types": {}}, "layer_types"),
        ({"model_type": "nemotron", "hidden_act": "relu3"}, "hidden_act"),
        ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm"),
        ({"model_type": "stablelm", "use_parallel_residual": "no"}, "use_parallel_residual"),
        ({"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": "x"}}, "rope_scaling"),
        ({"model_type": "cwm", "rope_scaling": []}, "rope_scaling"),
        ({"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before"),
        ({"model_type": "gpt_oss", "swiglu_limit": -1}, "swiglu_limit"),
        ({"model_type": "gpt_oss", "swiglu_limit": "7"}, "swiglu_limit"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"model_type": "llama4_text", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": -1}, "interleave_moe_layer_step"),
        ({"model_type": "llama4_text", "moe_layers": ["0"]}, "moe_layers"),
        ({"model_type": "llama4_text", "attention_chunk_size": 0}, "attention_chunk_size"),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 3}, "linear_num_key_heads"),
        ({"model_type": "qwen3_next", "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"model_type": "qwen3_next", "full_attention_interval": 0}, "full_attention_interval"),
        ({"model_type": "qwen3_5_text", "layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({"model_type": "ernie4_5_moe", "moe_layer_interval": 0}, "moe_layer_interval"),
        ({"model_type": "ernie4_5_moe", "moe_layer_start_index": "1"}, "moe_layer_start_index"),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [1, 2]}, "moe_topk"),
        ({"model_type": "minimax_m2", "shared_intermediate_size": 64}, "shared_intermediate_size"),
        ({"model_type": "dots1", "n_routed_experts": 8}, "num_experts_per_tok"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_a_mistake_names_its_key_on_one_line(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        model_from_hf_config({**LLAMA, **changes})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_an_unknown_family_is_refused_with_the_nearest_and_all_names() -> None:
    with pytest.raises(SpecError) as caught:
        model_from_hf_config({**LLAMA, "model_type": "lama"})
    assert "did you mean" in str(caught.value)
    assert all(name in str(caught.value) for name in FAMILIES)


def test_no_family_at_all_is_refused() -> None:
    with pytest.raises(SpecError, match="model_type: is missing; supported are"):
        model_from_hf_config({"hidden_size": 4096})


@pytest.mark.parametrize("text", ["{", "[1, 2]", '"llama"', "null", "", "[" * 100_000])
def test_a_malformed_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"^config\b"):
        model_from_hf_config(path)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not there"):
        model_from_hf_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not text in UTF-8"):
        model_from_hf_config(tmp_path)


# -- round trip --------------------------------------------------------------------------------------------


@table("config", [c for _, c in (*CATALOGUE.values(), *COUNTED.values())])
def test_published_config_survives_the_round_trip(config: dict[str, Any]) -> None:
    model = model_from_hf_config(config)
    written = json.loads(json.dumps(hf_config_from_model(model)))
    assert shape(model_from_hf_config(written)) == shape(model)


@table("entry", presets.names("model"))
def test_catalogue_model_survives_the_round_trip_or_is_refused(entry: str) -> None:
    model = presets.load("model", Model, entry)
    if entry in ("bert-large", "palm-540b"):
        with pytest.raises(SpecError, match="no Hugging Face family"):
            hf_config_from_model(model)
    else:
        again = model_from_hf_config(hf_config_from_model(model))
        assert (shape(again), again.name) == (shape(model), entry)


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
_sizes = st.integers(1, 64)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Any family's config with its own numbers drawn small, and switches drawn freely."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    config: dict[str, Any] = {"model_type": family, "num_experts_per_tok": 1}
    for key in FAMILIES[family].keys.values():
        needed = key.default is None and not key.nullable
        if isinstance(key.default, bool):
            config[key.name] = draw(st.booleans()) and key.name not in FAMILIES[family].requires
        elif (needed or isinstance(key.default, int)) and key.name not in (
            "num_experts_per_tok",
            "first_k_dense_replace",
        ):
            config[key.name] = draw(_sizes)
    heads = FAMILIES[family].keys["heads"].name
    kv_heads = FAMILIES[family].keys.get("kv_heads")
    config[heads] = draw(st.sampled_from((1, 2, 4, 8)))
    config[FAMILIES[family].keys["hidden"].name] = config[heads] * draw(_sizes)
    if kv_heads:
        config[kv_heads.name] = draw(st.sampled_from([n for n in (1, 2, 4, 8) if config[heads] % n == 0]))
    if "head_dim" in FAMILIES[family].requires:
        config["head_dim"] = config["hidden_size"] // config[heads]
    if "moe.groups" in FAMILIES[family].keys:
        config |= {
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": draw(st.integers(0, config["num_hidden_layers"])),
            "n_routed_experts": draw(_sizes),
        }
    if "delta.key_heads" in FAMILIES[family].keys:
        config["linear_num_value_heads"] = config["linear_num_key_heads"] * draw(_sizes)
    if family == "deepseek_v2":
        config["norm_topk_prob"] = False  # nothing else is understood of it
    if family == "falcon":
        config["new_decoder_architecture"] = draw(st.booleans())
        config["multi_query"] = draw(st.booleans())
    return config


@unhurried
@given(configs())
def test_any_config_survives_the_round_trip(config: dict[str, Any]) -> None:
    model = model_from_hf_config(config)
    assert shape(model_from_hf_config(hf_config_from_model(model))) == shape(model)


@unhurried
@given(
    st.dictionaries(
        st.sampled_from(sorted({key.name for family in FAMILIES.values() for key in family.keys.values()})),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2),
        max_size=6,
    ),
    st.sampled_from(sorted(FAMILIES)),
)
def test_any_nonsense_is_a_model_or_one_clear_line(config: dict[str, Any], model_type: str) -> None:
    try:
        model_from_hf_config({**config, "model_type": model_type})
    except SpecError as error:
        assert error.field
        assert "\n" not in str(error)
