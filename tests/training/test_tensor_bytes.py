"""Bytes of tensors against values computed by hand: real tensors and fake ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.training.memory import TensorBytes

MiB = 2**20


@pytest.fixture(params=["real", "fake"])
def kind(request: pytest.FixtureRequest) -> Iterator[AbstractContextManager[object]]:
    yield nullcontext() if request.param == "real" else FakeTensorMode()


def test_every_storage_counts_once_while_it_lives(kind: AbstractContextManager[object]) -> None:
    with kind, TensorBytes() as memory:
        first = torch.empty(MiB, dtype=torch.uint8)
        view = first.view(1024, 1024)[10:20]
        assert memory.live == MiB
        second = first + 1
        assert memory.live == 2 * MiB
        del first
        assert memory.live == 2 * MiB  # the view holds it
        del view
        assert memory.live == MiB
        second.add_(1)
        assert (memory.live, memory.peak) == (MiB, 2 * MiB)
        memory.reset_peak()
        assert memory.peak == MiB
    del second
    assert memory.live == 0


def test_a_tensor_from_before_counts_when_it_is_watched(kind: AbstractContextManager[object]) -> None:
    with kind:
        before = torch.empty(MiB, dtype=torch.uint8)
        with TensorBytes() as memory:
            before.view(-1)
            memory.watch([before, before[:1]])
            assert memory.live == MiB


def test_a_resized_storage_counts_as_it_is_now(kind: AbstractContextManager[object]) -> None:
    """FSDP frees gathered parameters like this."""
    original = torch.UntypedStorage.resize_
    with kind, TensorBytes() as memory:
        gathered = torch.empty(MiB, dtype=torch.uint8)
        gathered.untyped_storage().resize_(0)
        assert memory.live == 0
        gathered.untyped_storage().resize_(MiB)
        assert (memory.live, memory.peak) == (MiB, MiB)
        gathered.resize_(2 * MiB)
        assert memory.live == 2 * MiB
        del gathered
        assert memory.live == 0
    assert torch.UntypedStorage.resize_ is original


def test_a_training_step_by_hand(kind: AbstractContextManager[object]) -> None:
    """Two linear maps without bias, 64 rows of 256 features, fp32; SGD with momentum."""
    weight, rows = 256 * 256 * 4, 64 * 256 * 4
    with kind, TensorBytes() as memory:
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        assert memory.live == 2 * weight
        inputs = torch.zeros(64, 256)
        for step in range(2):
            memory.reset_peak()
            outputs = model(inputs)
            # The input, the rectified product (which ReLU and the second map both save), the output.
            assert memory.live == (2 + 2 * step) * weight + 3 * rows
            outputs.backward(torch.ones_like(outputs))
            assert memory.live == (4 + 2 * step) * weight + 2 * rows
            del outputs
            optimizer.step()
            assert memory.live == 6 * weight + rows
            optimizer.zero_grad()
            assert memory.live == 4 * weight + rows
    # In the second step, when the last gradient is made: weights, momenta, gradients; beside them the input, the
    # output and its gradient, which the caller holds, and the gradient of the first product.
    assert memory.peak == 6 * weight + 4 * rows
