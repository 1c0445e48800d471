"""What the engine sends is what the cost model prices: bytes of a rank, forward and backward, counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cost.builders import GPT, LLAMA, MLA_MOE, job
from engine.context.cases import METHODS, Case, arguments_of, attend_of, inputs_of
from engine.workers import on_ranks
from shardwise.cost.traffic.context import context_traffic
from shardwise.engine.context.sequence import cut_sequence
from shardwise.layout.stages import rank_contents
from shardwise.spec.model import Model


class Sent(TorchDispatchMode):
    """Bytes that leave this rank, and messages or collectives it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        size = dist.get_world_size()
        name = function.name() if function.namespace == "c10d" else ""
        if "send" in name:
            self._add(sum(_bytes(tensor) for tensor in args[0]))
        elif "gather" in name:
            self._add(_bytes(args[1]) * (size - 1))
        elif "alltoall_base" in name:
            own = args[4][dist.get_rank()] if args[4] else args[1].shape[0] // size
            self._add(_bytes(args[1]) - own * _bytes(args[1]) // max(1, args[1].shape[0]))
        return function(*args, **(kwargs or {}))

    def _add(self, size: int) -> None:
        self.bytes, self.calls = self.bytes + size, self.calls + 1


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def sent_by(case: Case) -> tuple[int, int, int, int]:
    """Bytes and calls, forward and backward."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    *inputs, gradient = (cut_sequence(tensor, rank, size, case.method) for tensor in inputs_of(case))
    with Sent() as forward:
        out = attend_of(case.method, group)(*(tensor.requires_grad_() for tensor in inputs), arguments_of(case))
    with Sent() as backward:
        out.backward(gradient)
    return forward.bytes, forward.calls, backward.bytes, backward.calls


def priced(model: Model, case: Case, size: int) -> tuple[float, float]:
    """Bytes of one layer and microbatch, forward and backward."""
    one = replace(model, layers=1, moe=None, mtp_layers=0)
    collective = {"ring": "auto", "all-gather": "ring", "ulysses": "direct"}[case.method]
    training = {"seq": case.seq, "precision": "bf16" if case.dtype == torch.bfloat16 else "fp32"}
    strategy = {"cp": size, "dp": 1, "microbatch": case.batch, "context_method": case.method, "collective": collective}
    plan = job(one, training=training, **strategy)
    found = context_traffic(plan, rank_contents(plan, 0))

    def total(which: str) -> float:
        return sum(traffic.bytes_sent for traffic in found if traffic.in_pass == which)

    return total("forward"), total("backward")


def case_of(model: Model, method: str, dtype: torch.dtype) -> Case:
    return Case(
        method,
        seq=64,
        heads=model.heads,
        key_heads=model.heads if model.mla else model.key_value_heads,
        features=model.query_key_dim,
        value_features=model.value_dim,
        dtype=dtype,
    )


def combinations() -> Iterable[Any]:
    for name, model in {"gpt": GPT, "llama": LLAMA, "mla": MLA_MOE}.items():
        for method in METHODS:
            yield pytest.param(model, method, id=f"{name}-{method}")


@pytest.mark.quick(8)
@pytest.mark.parametrize(("model", "method"), list(combinations()))
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_bytes_sent_are_those_priced(model: Model, method: str, size: int, dtype: torch.dtype) -> None:
    case = case_of(model, method, dtype)
    expected = priced(model, case, size)
    for forward, _, backward, _ in on_ranks(size, sent_by, case):
        assert (forward, backward) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("method", "forward", "backward"), [("ring", 3, 6), ("all-gather", 1, 2), ("ulysses", 2, 2)])
def test_messages_and_collectives_of_a_layer(method: str, forward: int, backward: int) -> None:
    """Keys and values travel together, so do queries with them in Ulysses."""
    for _, there, _, back in on_ranks(4, sent_by, Case(method)):
        assert (there, back) == (forward, backward)


@pytest.mark.parametrize("method", METHODS)
def test_every_rank_sends_as_much(method: str) -> None:
    assert len(set(on_ranks(4, sent_by, Case(method)))) == 1
