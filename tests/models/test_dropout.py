"""What adapters drop: by the cited hash, in the share asked for, independent of what it should not follow."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from engine.recompute_cases import LLAMA
from shardwise.engine.engine import apply_compile
from shardwise.engine.patterns import DECODER
from shardwise.models import dropout
from shardwise.models.adapters import add_adapters
from shardwise.models.decoder import Decoder, initialise
from shardwise.models.dropout import InputDropout, TokenKeys, dropped, keys_in_layer, keys_of_tokens, mixed, salt_of
from shardwise.spec.fine_tuning import Adapters
from shardwise.spec.strategy import Strategy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"
)
CPU = torch.device("cpu")


def keys(step: int = 0, rows: range = range(8), seq: int = 256) -> Tensor:
    return keys_of_tokens(5, step, rows, 8, seq, CPU)


def test_the_hash_is_lowbias32() -> None:
    """Its published form, in integers of Python."""

    def published(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (10_000,), generator=draw).int()
    assert [int(bit) % 2**32 for bit in mixed(bits)] == [published(int(bit) % 2**32) for bit in bits]


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_the_share_is_dropped_and_the_mean_stays(share: float) -> None:
    """Within five standard deviations, in all and feature by feature."""
    left = dropped(torch.ones(8, 256, 64), keys(), 0, share)
    assert sorted(left.unique().tolist()) == pytest.approx([0, 1 / (1 - share)])
    deviation = (share / (1 - share)) ** 0.5
    assert abs(float(left.mean()) - 1) < 5 * deviation / left.numel() ** 0.5
    assert float((left.mean((0, 1)) - 1).abs().max()) < 5 * deviation / 2048**0.5


@pytest.mark.parametrize(
    "other",
    [
        lambda: keys(step=1),
        lambda: keys_in_layer(keys(), 1),
        lambda: mixed(keys() ^ salt_of("mlp.up")),
        lambda: keys().roll(1, 0),
        lambda: keys().roll(1, 1),
    ],
    ids=["step", "layer", "linear", "row", "place"],
)
def test_choices_are_independent(other: Any) -> None:
    first, second = (dropped(torch.ones(8, 256, 64), each, 0, 0.5) - 1 for each in (keys(), other()))
    assert abs(float((first * second).mean())) < 5 / first.numel() ** 0.5
    neighbours = (first[..., 1:] * first[..., :-1]).mean()
    assert abs(float(neighbours)) < 5 / first.numel() ** 0.5


def test_parts_drop_what_the_whole_drops() -> None:
    inputs, whole = torch.randn(8, 256, 64), keys()
    left = dropped(inputs, whole, 0, 0.3)
    assert torch.equal(dropped(inputs[2:4, :, 16:32], keys(rows=range(2, 4)), 16, 0.3), left[2:4, :, 16:32])
    here = InputDropout(0.3, 0, TokenKeys(), part=(1, 4))
    here.tokens.now = whole
    narrow = here.narrow(inputs[:, 64:128], torch.eye(64))
    own = dropped(inputs, mixed(whole), 0, 0.3)
    assert narrow is not None and torch.equal(narrow, own[:, 64:128])


def test_gradients_are_those_of_what_is_left_and_only_inputs_are_kept() -> None:
    inputs = torch.randn(2, 32, 48, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(4, 48, dtype=torch.float64, requires_grad=True)
    here = InputDropout(0.4, 3, TokenKeys())
    here.tokens.now = keys(rows=range(2), seq=32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda t: t):
        found = here.narrow(inputs, matrix)
    assert found is not None
    assert kept[:2] == [inputs.data_ptr(), matrix.data_ptr()] and len(kept) == 3  # and the keys
    mask = dropped(torch.ones_like(inputs), mixed(here.tokens.now ^ 3), 0, 0.4)
    right = (inputs * mask) @ matrix.T
    gradient = torch.randn_like(found)
    for ours, expected in zip(
        (found, *torch.autograd.grad(found, (inputs, matrix), gradient)),
        (right, *torch.autograd.grad(right, (inputs, matrix), gradient)),
    ):
        torch.testing.assert_close(ours, expected)


@pytest.mark.slow
def test_compiled_layers_share_a_graph_and_drop_the_same() -> None:
    torch._dynamo.reset()
    counters.clear()
    tokens = torch.arange(64).view(2, 32) % LLAMA.vocab
    found = []
    for compiled in (False, True):
        decoder = Decoder(LLAMA)
        add_adapters(decoder, Adapters(rank=4, dropout=0.5))
        initialise(decoder, 0, LLAMA)
        for name, parameter in decoder.named_parameters():
            if name.endswith("adapter.b"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
        if compiled:
            apply_compile(decoder, Strategy(), DECODER, backend="aot_eager")
        losses = []
        for step in (0, 1):
            loss = decoder(tokens, tokens, token_keys=keys_of_tokens(0, step, range(2), 2, 32, CPU))
            loss.backward()
            losses.append(loss.item())
        gradient = decoder.get_submodule("layers.0.mlp.up.adapter").a.grad
        found.append((*losses, *gradient.flatten().tolist()))
        assert losses[0] != losses[1] != decoder(tokens, tokens).item()
    plain, compiled_too = (torch.tensor(each) for each in found)
    torch.testing.assert_close(compiled_too[:2], plain[:2])
    assert (compiled_too - plain)[2:].abs().max() < 1e-5 * plain[2:].abs().max()
    assert counters["stats"]["unique_graphs"] == 2  # for all layers: with keys and without


@pytest.mark.slow
def test_compiled_layers_keep_no_more_for_their_backward_pass() -> None:
    """The compiler would keep what is left if it knew that the backward pass draws the same again."""

    def kept_bytes(share: float) -> int:
        torch._dynamo.reset()
        decoder = Decoder(LLAMA)
        add_adapters(decoder, Adapters(rank=4, dropout=share))
        initialise(decoder, 0, LLAMA)
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_(".adapter." in name)
        apply_compile(decoder, Strategy(), DECODER, backend="aot_eager_decomp_partition")  # as inductor decides it
        tokens = torch.arange(512).view(2, 256) % LLAMA.vocab
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            decoder(tokens, tokens, token_keys=keys(rows=range(2)))
        return sum(kept.values())

    assert kept_bytes(0.5) <= kept_bytes(0.0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_drops_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(4, 64, 1500).to(DEVICE, dtype)
    own = keys_of_tokens(1, torch.tensor(7, device=DEVICE), range(4), 4, 64, torch.device(DEVICE))
    found = []
    for with_kernels in (False, True):
        monkeypatch.setattr(dropout.kernels, "run_on", lambda device, there=with_kernels: there)
        found.append(dropped(inputs, own, 512, 0.1))
    assert torch.equal(found[0] == 0, found[1] == 0)
    torch.testing.assert_close(found[1], found[0])
