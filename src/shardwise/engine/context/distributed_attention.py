"""What the ring and the all-gather share: an ``attend`` whose forward and backward passes communicate.

In eager mode it is one node of the autograd graph; for `torch.compile` one custom operator, so that the compiler sees
no messages, streams or buffers, and the layer around it stays one graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.context.blocks import (
    BackwardInputs,
    Gradients,
    KernelChoice,
    Scores,
    Seen,
    attention_block,
    attention_block_backward,
    kernel_for,
)
from shardwise.engine.context.sequence import WholeDocuments
from shardwise.models.dot_product import AttentionArguments


@dataclass(frozen=True)
class AttentionCall(ABC):
    """One call of attention over the ranks."""

    group: dist.ProcessGroup
    causal: bool
    scale: float
    window: int | None
    documents: Tensor | None
    """Of whole sequences."""
    overlap: bool
    choose: KernelChoice

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def backward(self, saved: BackwardInputs) -> Gradients: ...

    def block(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool = False, seen: Seen | None = None
    ) -> tuple[Tensor, Tensor]:
        """`attention_block` of some queries with some keys."""
        return attention_block(query, key, value, Scores(self.scale, causal), seen, self.choose)

    def block_backward(self, saved: BackwardInputs, causal: bool = False, seen: Seen | None = None) -> Gradients:
        return attention_block_backward(saved, Scores(self.scale, causal), seen, self.choose)


class AcrossRanks:
    """An ``attend`` for tokens cut in zig-zag, by one ``kind`` of call.

    Without ``overlap`` it waits for each message before it goes on computing; ``choose`` picks the kernel of a block.
    """

    def __init__(
        self,
        kind: type[AttentionCall],
        group: dist.ProcessGroup,
        documents: WholeDocuments,
        overlap: bool = True,
        choose: KernelChoice = kernel_for,
    ) -> None:
        self.kind, self.group, self.size = kind, group, group.size()
        self.documents, self.overlap, self.choose = documents, overlap, choose
        self.handle = next(_numbers)
        _known[self.handle] = self

    def call(self, seq: int, arguments: AttentionArguments) -> AttentionCall:
        """For ``seq`` local tokens; refuses what is not supported."""
        window = arguments.window
        if window is not None and window >= seq * self.size:
            window = None
        documents = self.documents.of(arguments.documents)
        return self.kind(self.group, arguments.causal, arguments.scale, window, documents, self.overlap, self.choose)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
        if torch.compiler.is_compiling():
            seen = arguments.documents, arguments.causal, arguments.window, arguments.scale
            operator: Any = torch.ops.shardwise.attention_across_ranks
            compiled: Tensor = operator(query, key, value, *seen, self.handle)[0]
            return compiled
        call = self.call(query.shape[1], arguments)
        out: Tensor = _Attention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
        return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        out, log_sum = call.forward(query, key, value)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *ctx.call.backward(BackwardInputs(gradient.contiguous(), *ctx.saved_tensors)), None


# -- The same as custom operators: these take only numbers and tensors, so objects are looked up by a number ----------

_numbers = count()
_known: WeakValueDictionary[int, AcrossRanks] = WeakValueDictionary()
_SEEN = "Tensor? documents, bool causal, int? window, float scale, int handle"


def _call(
    query: Tensor, documents: Tensor | None, causal: bool, window: int | None, scale: float, handle: int
) -> AttentionCall:
    return _known[handle].call(query.shape[1], AttentionArguments(causal, window, scale, documents))


@torch.library.custom_op(
    "shardwise::attention_across_ranks",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_SEEN}) -> (Tensor, Tensor)",
)
def _forward(query: Tensor, key: Tensor, value: Tensor, *seen: Any) -> tuple[Tensor, Tensor]:
    return _call(query, *seen).forward(query, key, value)


@torch.library.custom_op(
    "shardwise::attention_across_ranks_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sum, "
    f"{_SEEN}) -> (Tensor, Tensor, Tensor)",
)
def _backward(gradient: Tensor, query: Tensor, *rest: Any) -> Gradients:
    others, seen = rest[:4], rest[4:]  # key, value, output and log-sum-exp; then _SEEN
    gradients = _call(query, *seen).backward(BackwardInputs(gradient.contiguous(), query, *others))
    of_query, of_key, of_value = (tensor.contiguous() for tensor in gradients)
    return of_query, of_key, of_value


@_forward.register_fake
def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, *seen: Any) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = query.shape
    number = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((batch, seq, heads, value.shape[-1])), query.new_empty((batch, heads, seq), dtype=number)


@_backward.register_fake
def _backward_shapes(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Gradients:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, *ctx.seen = inputs
    ctx.save_for_backward(query, key, value, *output, documents)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, documents = ctx.saved_tensors
    operator: Any = torch.ops.shardwise.attention_across_ranks_backward
    return *operator(gradient, *tensors, documents, *ctx.seen), None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
