"""Weights of Hugging Face folders: the same logits as transformers both ways, and one clear line for every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.families import CASES, build, saved, transformers
from models.shapes import SHAPES, decoder_of, tokens
from shardwise.interop.huggingface import hf_config_from_model, model_from_hf_config
from shardwise.models import Decoder
from shardwise.models.huggingface import write_folder
from shardwise.models.huggingface.folder import INDEX, SINGLE, open_folder
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.spec.numerics import Numerics, RopeScaling

Files = dict[str, Tensor]


def loaded(folder: Path) -> Decoder:
    decoder = Decoder(open_folder(folder).model).eval()
    missing = decoder.load_state_dict(dict(open_folder(folder).tensors()), strict=False).missing_keys
    assert missing == (["head.weight"] if decoder.model.tied_embeddings else [])
    return decoder


@pytest.mark.quick(10)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers_both_ways(case: str, tmp_path: Path) -> None:
    theirs: Any = saved(case, tmp_path / "theirs")
    ours = loaded(tmp_path / "theirs")
    ids = tokens()
    logits = theirs(ids).logits
    tolerance = 1e-5 * max(1.0, float(logits.abs().max()))
    torch.testing.assert_close(ours(ids), logits, rtol=0, atol=tolerance)
    write_folder(tmp_path / "again", ours.model, open_folder(tmp_path / "theirs").tensors(), max_shard_bytes=20_000)
    kept = theirs.config._attn_implementation  # not in the folder; older releases choose one without the soft cap
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", dtype=torch.float32, attn_implementation=kept
    ).eval()
    torch.testing.assert_close(again(ids).logits, logits, rtol=0, atol=tolerance)


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """The gradients are read as a folder of weights."""
    theirs: Any = saved(case, tmp_path / "theirs")
    ours, ids = loaded(tmp_path / "theirs"), tokens()
    expected = theirs(ids, labels=ids).loss * ids[:, 1:].numel()
    expected.backward()
    labels = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)
    found = ours(ids, labels)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    folder = open_folder(tmp_path / "gradients")
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    size = max(float(gradient.abs().max()) for gradient in mine.values() if gradient is not None)
    for name, gradient in mine.items():
        torch.testing.assert_close(
            gradient, folder.slice(name, ()), rtol=1e-4, atol=1e-5 * size, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", ["llama-biased", "mixtral", "deepseek-v3", "gpt2", "gpt-neox", "phi3", "gpt-oss"])
def test_a_slice_is_a_slice_of_the_whole(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path)
    for name, whole in open_folder(tmp_path).tensors():
        for start, stop in ((0, 3), (1, 2), (2, None)):
            slices = tuple(slice(start, stop) for _ in whole.shape)
            assert torch.equal(open_folder(tmp_path).slice(name, slices), whole[slices]), name
        assert torch.equal(open_folder(tmp_path).slice(name, (slice(1, 3),)), whole[1:3]), name
        assert torch.equal(open_folder(tmp_path).slice(name, ()), whole), name


def test_a_tied_head_is_read_from_the_embedding(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    head = open_folder(tmp_path).slice("head.weight", (slice(2, 9),))
    assert torch.equal(head, open_folder(tmp_path).slice("embedding.weight", (slice(2, 9),)))


# -- folders that are not quite as the library writes them -----------------------------------------------


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    saved(getattr(request, "param", "llama"), tmp_path)
    return tmp_path


def change(folder: Path, how: Callable[[Files], Any]) -> None:
    files = load_file(folder / SINGLE)
    how(files)
    (folder / SINGLE).unlink()
    save_file(files, folder / SINGLE)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_the_published_gpt2_without_prefix_and_with_masks_is_read(folder: Path) -> None:
    expected = dict(open_folder(folder).tensors())

    def publish(files: Files) -> None:
        for name in list(files):
            files[name.removeprefix("transformer.")] = files.pop(name)
        files["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    change(folder, publish)
    found = dict(open_folder(folder).tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("folder", ["deepseek-v3"], indirect=True)
def test_the_modules_of_multi_token_prediction_are_read_where_they_are_stored(folder: Path) -> None:
    """`model.layers.61` of deepseek-ai/DeepSeek-V3: a layer, what joins it, and copies of embedding and head."""

    def publish(files: Files) -> None:
        for name in [one for one in files if one.startswith("model.layers.2.")]:
            files[name.replace("layers.2.", "layers.3.")] = files[name].clone()
        for name in ("enorm", "hnorm", "shared_head.norm"):
            files[f"model.layers.3.{name}.weight"] = torch.rand(32)
        files["model.layers.3.eh_proj.weight"] = torch.rand(32, 64)
        for name in ("embed_tokens", "shared_head.head"):
            files[f"model.layers.3.{name}.weight"] = files["model.embed_tokens.weight"].clone()

    change(folder, publish)
    with pytest.raises(SpecError, match=r"^model\.layers\.3\..* belongs to no part"):
        open_folder(folder).tensors()
    configure(folder, num_nextn_predict_layers=1)
    found = open_folder(folder)
    assert found.model.mtp_layers == 1
    decoder = Decoder(found.model)
    assert dict(found.tensors()).keys() == dict(decoder.named_tensors()).keys()
    assert found.slice("layers.3.joined.weight", ()).shape == (32, 64)
    change(folder, lambda files: files.pop("model.layers.3.enorm.weight"))
    with pytest.raises(SpecError, match=r"enorm\.weight: is missing"):
        open_folder(folder)


@pytest.mark.parametrize("folder", ["deepseek-v3"], indirect=True)
def test_promised_modules_that_are_not_stored_are_passed_over(folder: Path) -> None:
    change(folder, lambda files: files.update({"model.layers.3.hnorm.weight": torch.ones(32)}))
    configure(folder, num_nextn_predict_layers=1)
    assert open_folder(folder).model.mtp_layers == 0
    assert len(dict(open_folder(folder).tensors())) > 0


def quantise(files: Files) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    files[name] = files[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (lambda files: files.pop("model.norm.weight"), r"^model\.norm\.weight: is missing in "),
        (lambda files: files.update(extra=torch.ones(1)), r"^extra: in .* belongs to no part of \S+ as config"),
        (
            lambda files: files.update({"model.norm.weight": torch.ones(31)}),
            r"^model\.norm\.weight: is \[31\] in .* but config.json makes it \[32\]",
        ),
        (
            lambda files: files.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}),
            r"^model\.layers\.0\.mlp\.up_proj\.weight_scale_inv: is the scale of quantised weights; convert",
        ),
        (quantise, r"^model\.layers\.0\.mlp\.up_proj\.weight: is stored as torch\.float8_e4m3fn; convert"),
    ],
    ids=["missing", "extra", "shape", "scales", "fp8"],
)
def test_weights_that_do_not_fit_are_one_line_with_the_tensor(
    folder: Path, how: Callable[[Files], Any], line: str
) -> None:
    change(folder, how)
    with pytest.raises(SpecError, match=line) as caught:
        dict(open_folder(folder).tensors())
    assert "\n" not in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_hidden_layers": 4}, r"^model\.layers\.3\.attention_norm|^model\.layers\.3\.\S+: is missing"),
        ({"num_hidden_layers": 2}, r"^model\.layers\.2\.\S+: in .* belongs to no part"),
        ({"model_type": "qwen3"}, r"^model\.layers\.0\.self_attn\.q_norm\.weight: is missing"),
        ({"model_type": "gpt2"}, r"^transformer\.wte\.weight: is missing"),
        ({"model_type": "opt"}, r"^model_type: the weights of 'opt' are not read; use one of llama, "),
    ],
    ids=["more-layers", "fewer-layers", "qwen3", "gpt2", "opt"],
)
def test_the_config_of_another_model_is_one_line(folder: Path, changes: dict[str, Any], line: str) -> None:
    configure(folder, **changes)
    with pytest.raises(SpecError, match=line) as caught:
        open_folder(folder).tensors()
    assert "\n" not in str(caught.value) and caught.value.remedy


def test_a_folder_that_is_not_whole_is_one_line(folder: Path) -> None:
    weights = folder / SINGLE
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(weights), "gone.safetensors")}))
    with pytest.raises(SpecError, match=r"^gone\.safetensors: is not in .*; complete the download"):
        dict(open_folder(folder).tensors())
    (folder / INDEX).write_text("{}")
    with pytest.raises(SpecError, match=r"^model\.safetensors\.index\.json: in .* is not an index"):
        open_folder(folder).tensors()
    (folder / INDEX).unlink()
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(SpecError, match=r"^model\.safetensors: cannot be read: .*; download it again"):
        open_folder(folder).tensors()
    weights.unlink()
    with pytest.raises(SpecError, match=r"^model\.safetensors: is not in .*; convert the weights to safetensors"):
        open_folder(folder).tensors()
    with pytest.raises(SpecError, match="is not there"):
        open_folder(folder / "elsewhere").tensors()


def test_an_unknown_name_is_one_line(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"^layers\.9\.norm\.weight: is not a tensor of "):
        open_folder(folder).slice("layers.9.norm.weight", ())


# -- writing ---------------------------------------------------------------------------------------------


def test_files_stay_within_their_size_and_the_index_names_them_all(tmp_path: Path) -> None:
    decoder = decoder_of(SHAPES["dense"])
    write_folder(tmp_path, decoder.model, decoder.named_parameters(), max_shard_bytes=20_000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files == sorted(set(index["weight_map"].values()))
    stored = {name: load_file(tmp_path / name) for name in files}
    assert all(sum(tensor.nbytes for tensor in held.values()) <= 20_000 for held in stored.values())
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in decoder.parameters())
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not list(tmp_path.glob("*.partial"))


def test_bf16_stays_bf16_and_a_balancing_bias_fp32(tmp_path: Path) -> None:
    decoder = decoder_of(SHAPES["mla"]).to(torch.bfloat16)
    write_folder(tmp_path, decoder.model, decoder.named_tensors())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    written = dict(open_folder(tmp_path).tensors())
    assert all(torch.equal(written[name], tensor) for name, tensor in decoder.named_tensors())
    assert written["layers.1.mlp.router.bias"].dtype == torch.float32
    assert written["layers.1.mlp.experts.up"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (lambda given: given[:-1], r"^head\.weight: of custom was not given"),
        (lambda given: [*given, given[0]], r"^embedding\.weight: was given twice"),
        (lambda given: [("embeding.weight", given[0][1]), *given], r"^embeding\.weight: is not a tensor of this model"),
        (
            lambda given: [(given[0][0], given[0][1][:5]), *given[1:]],
            r"^embedding\.weight: is \[5, 32\], but the model",
        ),
    ],
    ids=["missing", "twice", "unknown", "shape"],
)
def test_a_mistake_in_what_is_written_is_one_line_and_leaves_no_index(
    tmp_path: Path, how: Callable[[list[Any]], list[Any]], line: str
) -> None:
    given = [(name, parameter.detach()) for name, parameter in decoder_of(SHAPES["dense"]).named_parameters()]
    with pytest.raises(SpecError, match=line) as caught:
        write_folder(tmp_path, SHAPES["dense"], how(given))
    assert "\n" not in str(caught.value) and not (tmp_path / INDEX).exists()


def test_weights_are_never_written_over(folder: Path) -> None:
    before = (folder / SINGLE).read_bytes()
    with pytest.raises(SpecError, match="already holds weights; name a new folder"):
        write_folder(folder, SHAPES["dense"], ())
    assert (folder / SINGLE).read_bytes() == before


def test_a_model_that_no_family_can_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no Hugging Face family has the shape"):
        write_folder(tmp_path, SHAPES["moe-biased"], ())
    falcon = replace(SHAPES["dense"], activation="gelu", norm="layernorm", kv_heads=1)
    with pytest.raises(SpecError, match="weights of the family falcon are not written"):
        write_folder(tmp_path, falcon, ())


# -- what config.json says beyond the shape ----------------------------------------------------------------


@pytest.mark.parametrize(
    "numerics",
    [
        Numerics(norm_epsilon=1e-6, rope_theta=5e5),
        Numerics(rope_scaling=RopeScaling(kind="linear", factor=4.0)),
        Numerics(rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_seq=16)),
        Numerics(rope_scaling=RopeScaling(kind="yarn", factor=2.0, original_seq=16, beta_fast=16.0, truncate=False)),
    ],
    ids=["plain", "linear", "llama3", "yarn"],
)
def test_numerics_survive_the_config(numerics: Numerics) -> None:
    model = replace(SHAPES["dense"], numerics=numerics)
    assert model_from_hf_config(hf_config_from_model(model)).numerics == numerics
    assert Model.from_dict(model.to_dict()) == model


def test_both_spellings_of_rope_are_read() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 64}
    new = {"model_type": "llama", "rope_parameters": {**scaling, "rope_theta": 5e5}, "max_position_embeddings": 64}
    expected = Numerics(
        norm_epsilon=1e-6, rope_theta=5e5, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_seq=64)
    )
    assert model_from_hf_config(old).numerics == model_from_hf_config(new).numerics == expected


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_scaling.short_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ],
)
def test_a_mistake_in_the_numerics_names_its_key(said: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        model_from_hf_config({"model_type": "llama", **said})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


MIXTURES = [
    "mixtral",
    "qwen2-moe",
    "deepseek-v3",
    "glm4-moe",
    "minimax-m2",
    "olmoe",
    "granite-moe-shared",
    "ernie-moe",
    "hunyuan-moe",
]


@pytest.mark.parametrize("case", MIXTURES)
def test_both_forms_are_read_alike(case: str, tmp_path: Path) -> None:
    """Experts apart, as published, and joined, as the library has them in memory."""
    network = saved(case, tmp_path / "apart")
    joined = tmp_path / "joined"
    joined.mkdir()
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert any(name.endswith(".experts.gate_up_proj") for name in state)
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
    network = build("mixtral")
    state = {
        name: tensor.contiguous() for name, tensor in network.state_dict().items() if "1.mlp.experts.down" not in name
    }
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    network.config.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"model\.layers\.1\.mlp\.experts\.down_proj.*missing"):
        open_folder(tmp_path)
