"""The decoder: its loss, its parts, packed documents, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models.shapes import SHAPES, assert_same, decoder_of, gradients, tokens
from shardwise.models import Decoder, loss
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
EVERY_SHAPE = pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
REFUSED = {"bert-large"}


def some_labels() -> torch.Tensor:
    labels = tokens(seed=4)
    labels[0, 5:9] = loss.IGNORED
    labels[1, -1] = loss.IGNORED
    return labels


@pytest.mark.quick(3)
@EVERY_SHAPE
def test_the_loss_and_its_gradients_are_those_of_cross_entropy_on_logits(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, ids, labels = decoder_of(model), tokens(), some_labels()
    expected = F.cross_entropy(decoder(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    right = gradients(decoder)
    monkeypatch.setattr(loss, "loss_tokens_at_once", lambda *sizes, **head: 7)  # parts that do not divide the tokens
    found = decoder(ids, labels)
    found.backward()
    assert found.dtype == torch.float32 and found.shape == ()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_same(gradients(decoder), right)


def test_labels_that_are_all_ignored_give_zero_and_no_gradient() -> None:
    decoder, ids = decoder_of(SHAPES["dense"]), tokens()
    found = decoder(ids, torch.full_like(ids, loss.IGNORED))
    found.backward()
    assert float(found.detach()) == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients(decoder).values())


def test_the_gradient_of_a_scaled_loss_is_scaled() -> None:
    decoder, ids = decoder_of(SHAPES["dense"]), tokens()
    decoder(ids, ids).backward()
    whole = gradients(decoder)
    (decoder(ids, ids) / 48).backward()
    assert_same(gradients(decoder), {name: gradient / 48 for name, gradient in whole.items()})


def test_the_loss_in_bf16_is_near_the_one_in_fp32() -> None:
    decoder, ids = decoder_of(SHAPES["dense"], wide=False), tokens()
    exact = decoder(ids, ids)
    rounded = decoder.to(torch.bfloat16)(ids, ids)
    rounded.backward()
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=0)
    assert {gradient.dtype for gradient in gradients(decoder).values()} == {torch.bfloat16}


# -- parts -------------------------------------------------------------------------------------------------


def part_of(decoder: Decoder, layers: range, first: bool, last: bool) -> Decoder:
    for index in list(decoder.layers):
        if int(index) not in layers:
            del decoder.layers[index]
    if not first:
        decoder.embedding = decoder.position_embedding = None
    if not last:
        decoder.norm = decoder.head = None
    return decoder


@pytest.mark.quick(3)
@EVERY_SHAPE
def test_parts_one_after_the_other_are_the_whole(model: Model) -> None:
    ids, labels, documents = tokens(), some_labels(), (torch.arange(24) // 7).expand(2, -1)
    whole = decoder_of(model)
    expected = whole(ids, labels, documents=documents)
    expected.backward()
    front = part_of(decoder_of(model), range(2), first=True, last=False)
    back = part_of(decoder_of(model), range(2, model.layers), first=False, last=True)
    handed = front(ids, documents=documents)
    found = back(handed, labels, documents=documents)
    found.backward()
    assert handed.shape == (2, 24, model.hidden)
    torch.testing.assert_close(found, expected)
    apart = gradients(front)
    for name, gradient in gradients(back).items():
        name = "embedding.weight" if model.tied_embeddings and name == "head.weight" else name
        apart[name] = apart[name] + gradient if name in apart else gradient
    assert_same(apart, gradients(whole))


def test_tied_embeddings_are_one_parameter() -> None:
    decoder = Decoder(SHAPES["gpt"])
    assert decoder.head is not None and decoder.embedding is not None
    assert decoder.head.weight is decoder.embedding.weight


@pytest.mark.quick(3)
@EVERY_SHAPE
@torch.no_grad()
def test_packed_documents_are_as_if_apart(model: Model) -> None:
    decoder = decoder_of(model).eval()
    lengths = [(7, 1, 16), (12, 12)]
    rows = tokens()
    documents = torch.stack([torch.repeat_interleave(torch.tensor(of_row)) for of_row in lengths])
    positions = torch.stack([torch.cat([torch.arange(n) for n in of_row]) for of_row in lengths])
    packed = decoder(rows, positions=positions, documents=documents)
    for row, of_row in enumerate(lengths):
        start = 0
        for length in of_row:
            here = slice(start, start + length)
            alone = decoder(rows[row : row + 1, here])
            torch.testing.assert_close(packed[row : row + 1, here], alone, rtol=1e-4, atol=1e-4)
            start += length


@torch.no_grad()
def test_a_window_hides_all_but_the_last_keys() -> None:
    decoder = decoder_of(replace(SHAPES["dense"], layers=1, sliding_window=4)).eval()
    ids = tokens(batch=1)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % 61
    same = (decoder(ids) - decoder(other)).abs().amax(-1)[0] == 0
    assert same.tolist() == [not 3 <= place < 7 for place in range(24)]


@torch.no_grad()
def test_a_model_that_is_not_causal_sees_what_comes() -> None:
    decoder = decoder_of(replace(SHAPES["dense"], causal=False)).eval()
    ids = tokens(batch=1)
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % 61
    assert bool(((decoder(ids) - decoder(other)).abs().amax(-1) > 0).all())


# -- what is built -----------------------------------------------------------------------------------------


@pytest.mark.quick(22)
@pytest.mark.parametrize("entry", presets.names("model"))
def test_a_model_of_the_catalogue_is_built_with_its_parameters_or_refused(entry: str) -> None:
    model = presets.load("model", Model, entry)
    if entry in REFUSED:
        with pytest.raises(SpecError, match=r"^model\.\w+") as caught:
            Decoder(model)
        assert "\n" not in str(caught.value) and entry in str(caught.value) and caught.value.remedy
        return
    few = replace(model, layers=min(model.layers, 4), mtp_layers=0)  # prediction modules are counted apart
    with torch.device("meta"):
        decoder = Decoder(few)
    held = sum(parameter.numel() for parameter in decoder.parameters())
    held += sum(buffer.numel() for name, buffer in decoder.named_buffers() if name.endswith("router.bias"))
    assert held == parameter_count(few)


def test_more_tokens_than_learned_positions_is_one_clear_line() -> None:
    with pytest.raises(SpecError, match="65 tokens are more than the 64 positions"):
        Decoder(SHAPES["gpt"])(tokens(seq=65))


def test_the_models_know_nothing_of_other_devices() -> None:
    folder = Path(loss.__file__).parent
    assert [path.name for path in folder.rglob("*.py") if "distributed" in path.read_text(encoding="utf-8")] == []


# -- no waiting for the device, and compilation -----------------------------------------------------------


class NoSynchronisation(TorchDispatchMode):
    """Refuses what would make the host wait for the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "equal.default")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in self.WAITING), name
        if "index" in name:  # indexing with a mask counts what it finds
            assert not any(
                isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in (args[1] if len(args) > 1 and
                isinstance(args[1], (list, tuple)) else ()))  # fmt: skip
        return func(*args, **(kwargs or {}))


@EVERY_SHAPE
def test_nothing_waits_for_the_device(model: Model) -> None:
    decoder, ids = decoder_of(model), tokens()
    documents = (torch.arange(24) // 7).expand(2, -1)
    with NoSynchronisation():
        decoder(ids, ids, documents=documents).backward()
    with pytest.raises(AssertionError), NoSynchronisation():
        torch.ones(1).item()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["dense", "moe", "mla"])
def test_a_layer_compiles_as_one_graph(shape: str) -> None:
    torch._dynamo.reset()
    model = replace(SHAPES[shape], layers=1 if shape == "dense" else 2)
    decoder, ids = decoder_of(model), tokens()
    decoder(ids, ids).backward()
    right = gradients(decoder)
    for layer in decoder.layers.values():
        layer.compile(fullgraph=True, backend="aot_eager")
    decoder(ids, ids).backward()
    assert_same(gradients(decoder), right)
