"""Adapters as PEFT's own: the same logits in both directions for every family, and the same training."""

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

from models.families import CASES, saved, transformers
from models.shapes import tokens
from shardwise.models import Decoder
from shardwise.models.adapters import add_adapters, is_of_adapter
from shardwise.models.huggingface.adapters import CONFIG, TENSORS, Added, LoadedAdapter, read_adapter, write_adapter
from shardwise.models.huggingface.folder import open_folder
from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import Adapters

peft = pytest.importorskip("peft")

LORA = Adapters(rank=4, alpha=12.0)
DORA = Adapters(rank=3, alpha=5.0, method="dora", scaling="rank-stabilised")


def tuned(folder: Path, adapters: Adapters) -> Decoder:
    """The decoder of a folder with adapters that change its logits."""
    decoder = Decoder(open_folder(folder).model).eval()
    decoder.load_state_dict(dict(open_folder(folder).tensors()), strict=False)
    add_adapters(decoder, adapters)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if is_of_adapter(name):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
                if name.endswith(".magnitude"):
                    parameter.add_(1.5)
    return decoder


def adapter_of(decoder: Decoder, adapters: Adapters) -> LoadedAdapter:
    values = {name: value.detach() for name, value in decoder.named_parameters() if is_of_adapter(name)}
    names = [name.removesuffix(".a") for name in values if name.endswith(".a")]
    return LoadedAdapter(
        {
            name.removesuffix(".adapter") + ".weight": Added(
                values[f"{name}.a"], values[f"{name}.b"], adapters.factor, values.get(f"{name}.magnitude")
            )
            for name in names
        },
        {},
    )


def logits_with(folder: Path, adapter: LoadedAdapter) -> Tensor:
    """Of the plain decoder, with sums of weights and adapters."""
    tensors = {**dict(open_folder(folder).tensors()), **adapter.trained}
    tensors |= {name: added.to(tensors[name]) for name, added in adapter.added.items()}
    decoder = Decoder(open_folder(folder).model).eval()
    decoder.load_state_dict(tensors, strict=False)
    result: Tensor = decoder(tokens())
    return result


GRID = [
    *((case, "lora") for case in CASES),
    *((case, "dora") for case in ("llama-biased", "deepseek-v3", "phi3", "gpt-neox", "qwen3", "gpt2")),
]


@pytest.mark.quick(8)
@pytest.mark.parametrize(("case", "method"), GRID)
@torch.no_grad()
def test_peft_loads_what_is_written_and_reads_back_the_same(case: str, method: str, tmp_path: Path) -> None:
    theirs: Any = saved(case, tmp_path / "base")
    adapters, naming = {"lora": LORA, "dora": DORA}[method], open_folder(tmp_path / "base").naming
    if case.startswith(
        ("deepseek", "glm4", "dots1", "ernie-moe", "hunyuan-moe")
    ):  # peft 0.21 with transformers 5 takes `up_proj` of any module for the joined experts
        adapters = replace(adapters, targets=("attention",))
    ours = tuned(tmp_path / "base", adapters)
    expected = ours(tokens())
    tolerance = 3e-5 * max(1.0, float(expected.abs().max()))
    adapter = adapter_of(ours, adapters)
    write_adapter(tmp_path / "adapter", naming, adapters, adapter, str(tmp_path / "base"))
    with_theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    torch.testing.assert_close(with_theirs(tokens()).logits, expected, rtol=0, atol=tolerance)
    again = logits_with(tmp_path / "base", read_adapter(tmp_path / "adapter", naming))
    torch.testing.assert_close(again, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", ["llama", "gpt2", "phi3", "qwen3"])
def test_what_peft_writes_has_its_logits(case: str, tmp_path: Path) -> None:
    theirs: Any = saved(case, tmp_path / "base")
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 9}}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", **patterns)
    model = peft.get_peft_model(theirs, config).eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
        expected = model(tokens()).logits
    model.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", open_folder(tmp_path / "base").naming)
    tolerance = 3e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(logits_with(tmp_path / "base", adapter).detach(), expected, rtol=0, atol=tolerance)


Saved = Callable[..., tuple[LoadedAdapter, Tensor]]


@pytest.fixture
def by_peft(tmp_path: Path) -> Saved:
    """An adapter that PEFT has saved with random values, as it is read, and PEFT's logits."""

    def make(case: str = "llama", **settings: Any) -> tuple[LoadedAdapter, Tensor]:
        theirs: Any = saved(case, tmp_path / "base")
        usual = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        model = peft.get_peft_model(theirs, peft.LoraConfig(**{**usual, **settings})).eval()
        random = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
            expected = model(tokens()).logits
        model.save_pretrained(tmp_path / "adapter")
        return read_adapter(tmp_path / "adapter", open_folder(tmp_path / "base").naming), expected

    return make


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("llama", {"alpha_pattern": {r"model\.layers\.[0]\..*q_proj": 40}}),
        ("llama", {"layers_to_transform": [1], "use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head", "norm", "input_layernorm"]}),
        ("gemma", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ],
)
def test_every_setting_of_peft_is_read_as_it_means(
    case: str, settings: dict[str, Any], by_peft: Saved, tmp_path: Path
) -> None:
    adapter, expected = by_peft(case, **settings)
    tolerance = 3e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(logits_with(tmp_path / "base", adapter).detach(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("case", "settings", "words"),
    [
        ("llama", {"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa', which is not read"),
        ("llama", {"init_lora_weights": "olora"}, "init_lora_weights: 'olora', which is not read"),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}, "is beside an embedding"),
        ("llama", {"alpha_pattern": {"(q+)+_proj": 4}}, "alpha_pattern"),
        ("gemma", {"modules_to_save": ["embed_tokens"]}, "trains the embedding alone, which is the head"),
    ],
)
def test_what_would_be_another_model_is_refused(
    case: str, settings: dict[str, Any], words: str, by_peft: Saved
) -> None:
    with pytest.raises(SpecError) as caught:
        by_peft(case, **settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@torch.no_grad()
def test_a_trained_embedding_is_peft_s_head_too_where_they_are_one(tmp_path: Path) -> None:
    theirs: Any = saved("gemma", tmp_path / "base")
    naming = open_folder(tmp_path / "base").naming
    embedding = 1.5 * dict(open_folder(tmp_path / "base").tensors())["embedding.weight"]
    adapter = replace(adapter_of(tuned(tmp_path / "base", LORA), LORA), trained={"embedding.weight": embedding})
    expected = logits_with(tmp_path / "base", adapter)
    write_adapter(tmp_path / "adapter", naming, LORA, adapter, None)
    with_theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tolerance = 3e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(with_theirs(tokens()).logits, expected, rtol=0, atol=tolerance)
    again = logits_with(tmp_path / "base", read_adapter(tmp_path / "adapter", naming))
    torch.testing.assert_close(again, expected, rtol=0, atol=tolerance)


def test_what_peft_would_not_load_is_not_written(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    folder = open_folder(tmp_path / "base")
    weights = dict(folder.tensors())
    norm, query = "norm.weight", "layers.0.attention.query.weight"
    added = adapter_of(tuned(tmp_path / "base", LORA), LORA).added
    for adapter, words in (
        (LoadedAdapter({}, {norm: weights[norm]}), "were not trained, which PEFT needs"),
        (LoadedAdapter(added, {query: weights[query]}), f"{query}: is trained, and has an adapter too"),
    ):
        with pytest.raises(SpecError, match=words):
            write_adapter(tmp_path / "adapter", folder.naming, LORA, adapter, None)
        assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("adapters", [LORA, DORA], ids=["lora", "dora"])
def test_training_is_that_of_peft(adapters: Adapters, tmp_path: Path) -> None:
    """Loss, every gradient, and every weight after a few steps."""
    theirs: Any = saved("llama", tmp_path / "base")
    ours = tuned(tmp_path / "base", adapters)
    naming = open_folder(tmp_path / "base").naming
    write_adapter(tmp_path / "adapter", naming, adapters, adapter_of(ours, adapters), None)
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(is_of_adapter(name))
    mine = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    their_names = {name: their_name(name) for name in mine}
    trained = dict(model.named_parameters())
    assert sum(value.requires_grad for value in trained.values()) == len(mine)
    optimizers = [
        torch.optim.AdamW(each, lr=1e-2, weight_decay=0.01)
        for each in (mine.values(), [trained[name] for name in their_names.values()])
    ]
    for step in range(3):
        ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(step))
        loss = ours(ids[:, :-1], ids[:, 1:].contiguous()) / ids[:, 1:].numel()
        their_loss = model(ids, labels=ids).loss
        torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-6)
        loss.backward()
        their_loss.backward()
        for name, parameter in mine.items():
            gradient = trained[their_names[name]].grad
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6 + 1e-5 * gradient.abs().max())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter, trained[their_names[name]], rtol=1e-3, atol=1e-5)


def their_name(name: str) -> str:
    _, layer, part, linear, _, own = name.split(".")
    module = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}.get(linear, f"{linear}_proj")
    block = "self_attn" if part == "attention" else "mlp"
    ending = {"a": "lora_A.default.weight", "b": "lora_B.default.weight",
              "magnitude": "lora_magnitude_vector.default.weight"}[own]  # fmt: skip
    return f"base_model.model.model.layers.{layer}.{block}.{module}.{ending}"


def test_adapters_begin_as_those_of_peft(tmp_path: Path) -> None:
    """`a` uniform within 1/√inputs, `b` zero."""
    from shardwise.models.decoder import initial_value

    saved("llama", tmp_path)
    model = open_folder(tmp_path).model
    a = initial_value("layers.0.attention.query.adapter.a", (512, 32), 0, model)
    assert 0.9 / 32**0.5 < a.abs().max() <= 1 / 32**0.5 and abs(float(a.mean())) < 0.01
    assert not initial_value("layers.0.attention.query.adapter.b", (32, 512), 0, model).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, "describes 'LOHA', not a LORA"),
        ({"bias": "all"}, "has bias: 'all', which is not read"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
        ({"lora_alpha": None}, "has lora_alpha: null, which is not a number"),
        ({"alpha_pattern": [1]}, "has alpha_pattern: [1], which is not read"),
        ({"alpha_pattern": {"(": 1}}, "which is not read"),
        ({}, "fits no"),
    ],
)
def test_what_is_not_read_gets_one_line(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    naming = open_folder(tmp_path / "base").naming
    ours = tuned(tmp_path / "base", LORA)
    write_adapter(tmp_path / "adapter", naming, LORA, adapter_of(ours, LORA), None)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps({**config, **change}))
    if not change:
        tensors = load_file(tmp_path / "adapter" / TENSORS)
        name = next(name for name in tensors if "lora_A" in name)
        save_file({**tensors, name: tensors[name][:, :5].contiguous()}, tmp_path / "adapter" / TENSORS)
        words = "but the base makes it"
    with pytest.raises(SpecError) as caught:
        read_adapter(tmp_path / "adapter", naming)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "has 5 lengths for 32 outputs"),
        ("model.norm.weight", "is [5], but the base makes it [32]"),
    ],
)
def test_tensors_of_other_shapes_get_one_line(name: str, words: str, tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    naming = open_folder(tmp_path / "base").naming
    adapter = adapter_of(tuned(tmp_path / "base", DORA), DORA)
    write_adapter(tmp_path / "adapter", naming, DORA, adapter, None)
    file = tmp_path / "adapter" / TENSORS
    save_file({**load_file(file), f"base_model.model.{name}": torch.ones(5)}, file)
    with pytest.raises(SpecError) as caught:
        read_adapter(tmp_path / "adapter", naming)
    assert words in str(caught.value)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    folder = open_folder(tmp_path / "base")
    ours = tuned(tmp_path / "base", LORA)
    write_adapter(tmp_path / "adapter", folder.naming, LORA, adapter_of(ours, LORA), None)
    smaller = replace(folder.naming, model=replace(folder.model, layers=2))
    with pytest.raises(SpecError, match="belongs to no part"):
        read_adapter(tmp_path / "adapter", smaller)


assert transformers
