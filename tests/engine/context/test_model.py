"""A whole decoder whose sequences are cut over ranks: its loss and every gradient are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.context.cases import METHODS
from engine.workers import on_ranks
from shardwise.engine.context.across_ranks import AcrossRanks
from shardwise.engine.context.apply import apply_context
from shardwise.engine.context.sequence import cut_sequence
from shardwise.engine.mesh import build_mesh
from shardwise.models.decoder import Decoder, initialise
from shardwise.models.moe import MoELayer
from shardwise.spec import presets
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy

BATCH, SEQ = 2, 32


def model_of(name: str) -> Model:
    if name == "learned-positions":
        return replace(model_of("tiny"), positions="learned", norm="layernorm", activation="gelu", kv_heads=8)
    if name == "window":
        return replace(model_of("tiny"), sliding_window=6, sliding_window_every=2)
    if name == "chunks":
        pattern = (LayerRecord(mixer="chunk"), LayerRecord(rotary=False))
        return replace(model_of("tiny"), attention_chunk=7, pattern=pattern)
    return replace(presets.load("model", Model, name), layers=2)


def decoder_of(model: Model) -> Decoder:
    decoder = Decoder(model)
    initialise(decoder, 0, model)
    for parameter in decoder.parameters():
        parameter.data.mul_(4)  # scores far enough apart for a wrong mask to show
    for part in decoder.modules():
        if isinstance(part, MoELayer):
            part.balance_coefficient = 0.0  # its sum over the sequence is not context parallelism's
    return decoder


def batch_of(model: Model, packed: bool) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(11)
    tokens = torch.randint(model.vocab, (BATCH, SEQ + 1), generator=random)
    places = torch.arange(SEQ).expand(BATCH, SEQ)
    labels = tokens[:, 1:].clone()
    labels[:, 3] = -100
    batch = {"inputs": tokens[:, :-1], "labels": labels, "positions": places}
    if packed:
        begins = torch.rand(BATCH, SEQ, generator=random) < 0.15
        begins[:, 0] = True
        first = torch.where(begins, places, 0).cummax(1).values
        batch |= {"documents": begins.cumsum(1), "positions": places - first}
    return batch


def loss_and_gradients(decoder: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = decoder(**batch)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **gradients}


def worst(method: str, name: str, packed: bool, change: Callable[[Decoder], None] | None = None) -> float:
    """Deviation from one process; ``change`` does something to the parallel decoder before it runs."""
    model, rank, size = model_of(name), dist.get_rank(), dist.get_world_size()
    batch = batch_of(model, packed)
    expected = loss_and_gradients(decoder_of(model), batch)
    strategy = Strategy(cp=size, context_method=method)
    decoder = decoder_of(model)
    apply_context(decoder, build_mesh(strategy), strategy)
    if change:
        change(decoder)
    found = loss_and_gradients(decoder, {key: cut_sequence(value, rank, size, method) for key, value in batch.items()})
    assert found.keys() == expected.keys()
    for tensor in found.values():
        dist.all_reduce(tensor)
    return max(float((found[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in expected)


@pytest.mark.quick(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["tiny", "tiny-mla"])
def test_loss_and_gradients_of_a_decoder(method: str, name: str) -> None:
    assert max(on_ranks(2, worst, method, name, False)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-mla", "learned-positions"])
@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradients_of_every_kind_of_decoder_on_four_ranks(method: str, name: str, packed: bool) -> None:
    assert max(on_ranks(4, worst, method, name, packed)) < 1e-5


@pytest.mark.parametrize("method", ["all-gather", "ulysses"])
def test_a_decoder_with_windows_and_packed_documents(method: str) -> None:
    assert max(on_ranks(2, worst, method, "window", True)) < 1e-5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_decoder_with_chunks(method: str, packed: bool) -> None:
    assert max(on_ranks(2, worst, method, "chunks", packed)) < 1e-5


def recomputed(decoder: Decoder) -> None:
    for layer in decoder.layers.values():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.parametrize("method", METHODS)
def test_a_decoder_whose_layers_are_recomputed(method: str) -> None:
    """The backward pass talks to the other ranks for the forward pass again, in the same order on all."""
    assert max(on_ranks(2, worst, method, "tiny", True, recomputed)) < 1e-5


def attends(method: str, cp: int) -> tuple[int, int, bool]:
    """Attention modules, different ``attend`` among them, and whether they reach over ranks."""
    decoder, strategy = (
        Decoder(model_of("tiny")),
        Strategy(cp=cp, dp=dist.get_world_size() // cp, context_method=method),
    )
    apply_context(decoder, build_mesh(strategy), strategy)
    found = [part.attend for part in decoder.modules() if hasattr(part, "attend")]
    return len(found), len(set(map(id, found))), isinstance(found[0], AcrossRanks)


def test_every_attention_module_is_changed_and_none_without_context_parallelism() -> None:
    assert on_ranks(2, attends, "ring", 2) == [(2, 1, True)] * 2
    assert on_ranks(2, attends, "ulysses", 2) == [(2, 2, False)] * 2
    assert on_ranks(2, attends, "ring", 1) == [(2, 1, False)] * 2


# -- compiled ----------------------------------------------------------------------------------------


def compiled_layers(method: str, packed: bool) -> tuple[float, int]:
    """Worst deviation of a decoder whose layers are compiled whole, and how many graphs that took."""
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend("aot_eager")

    def compiled(decoder: Decoder) -> None:
        for layer in decoder.layers.values():
            layer.compile(backend=graphs, fullgraph=True)

    return worst(method, "tiny", packed, compiled), graphs.frame_count


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_compiles_into_one_graph(method: str, packed: bool) -> None:
    for deviation, graphs in on_ranks(2, compiled_layers, method, packed, timeout_seconds=300):
        assert deviation < 1e-5 and graphs <= 2
