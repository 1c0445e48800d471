"""What a traced step sends and computes: every collective and message, and FLOPs by kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import CollectiveKind
from shardwise.engine import profiler_ranges
from shardwise.engine.labels import Label, label_of
from shardwise.engine.torch_private import group_named, operator_name, tree_iter
from shardwise.measure.dryrun.result import RECEIVE
from shardwise.measure.dryrun.world import replaced


@dataclass(frozen=True)
class Sent:
    """One collective or message."""

    kind: str
    ranks: tuple[int, ...]
    size_bytes: int
    """As the cost model counts: the result of an all-gather, the input of a reduce-scatter, otherwise what is sent."""
    label: Label = Label("none")  # the engine's name for it
    peer: int | None = None  # the other rank of a message


class CollectiveLog:
    """Observes operators and records every collective in ``sent``; during `naming` with the engine's labels."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self._labels: list[Label] = []

    def __call__(self, operator: Any, args: Any, named: Any, result: Any) -> None:
        if operator.namespace in ("c10d", "_c10d_functional") and (name := operator.name()) in _KINDS:
            self._record(name, _KINDS[name], args, result)

    def naming(self) -> AbstractContextManager[None]:
        """While active, follows the names that the engine gives its phases and collectives."""

        @contextmanager
        def named(name: str) -> Iterator[None]:
            self._labels.append(label_of(name))
            try:
                yield
            finally:
                self._labels.pop()

        return replaced((profiler_ranges, "marked", named))

    def _record(self, operator: str, kind: str, args: Any, result: Any) -> None:
        group = _group_of(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        label = next((known for known in reversed(self._labels) if known.what), Label("none"))
        if kind in (CollectiveKind.SEND_RECV, RECEIVE) and label.part_of is not None:
            if kind == CollectiveKind.SEND_RECV:  # n−1 of these make up a collective of n such parts
                size = round(_bytes(args[0]) * len(ranks) / (len(ranks) - 1))
                self.sent.append(Sent(str(label.part_of), ranks, size, label))
            return
        if kind in (CollectiveKind.SEND_RECV, RECEIVE):
            peer = dist.get_global_rank(group, args[2])
            self.sent.append(Sent(kind, ranks, _bytes(args[0]), label, peer))
            return
        if kind == CollectiveKind.ALL_TO_ALL:
            size = _bytes(args[0] if operator.startswith("_c10d_functional") else args[1])
        else:  # the full tensor is on one side of a gather or a scatter, on both of a reduction
            size = max(_bytes(given) for given in (*args[:2], result) if isinstance(given, (Tensor, list, tuple)))
        self.sent.append(Sent(kind, ranks, size, label))


# The operators of each kind of collective, in c10d and in its functional form.
_OPERATORS = {
    CollectiveKind.ALL_REDUCE: ("allreduce_ allreduce_coalesced_",
                                "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_"),
    CollectiveKind.ALL_GATHER: (
        "_allgather_base_ allgather_ allgather_into_tensor_coalesced_ allgather_coalesced_",
        "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced"),
    CollectiveKind.REDUCE_SCATTER: (
        "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced"),
    CollectiveKind.ALL_TO_ALL: ("alltoall_base_ alltoall_", "all_to_all_single"),
    CollectiveKind.BROADCAST: ("broadcast_", "broadcast broadcast_"),
    CollectiveKind.SEND_RECV: ("send", ""),
    RECEIVE: ("recv_", ""),
}  # fmt: skip
_KINDS = {
    f"{namespace}::{name}": str(kind)
    for kind, forms in _OPERATORS.items()
    for namespace, names in zip(("c10d", "_c10d_functional"), forms)
    for name in names.split()
}


def _group_of(args: Any) -> dist.ProcessGroup:
    """The process group among the arguments: an object, or the name at their end."""
    for argument in args:
        if not isinstance(argument, (Tensor, list, tuple, str, int, float)) and "ProcessGroup" in str(
            type(argument)
        ) + str(argument):
            return argument if isinstance(argument, dist.ProcessGroup) else dist.ProcessGroup.unbox(argument)
    return group_named(args[-1])


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_iter(tensors) if isinstance(tensor, Tensor))


# -- FLOPs of a step: matmuls and attention ----------------------------------------------------------
# Counted as the cost model does: two for a multiply-add, half for a causal square, and twice the forward pass for the
# backward pass of attention (scores recomputed inside its kernel do not count).

# Argument positions of the left and right factor, and the dimension of the right one that is not summed over.
_MATMULS = {
    "aten::mm": (0, 1, -1),
    "aten::bmm": (0, 1, -1),
    "aten::addmm": (1, 2, -1),
    "aten::addmm_": (1, 2, -1),
    "aten::baddbmm": (1, 2, -1),
    "aten::_grouped_mm": (0, 1, -1),
    "shardwise::wide_product": (0, 1, 0),
    "shardwise::fp8_product": (0, 2, 0),
    "shardwise::grouped_product": (0, 1, -1),
    "shardwise::grouped_product_of_columns": (0, 1, -1),
}
# Argument positions of the query (key and value follow; a gradient precedes it in a backward pass), and of is_causal.
_SQUARE = {
    "aten::_scaled_dot_product_flash_attention": (0, 4),
    "aten::_scaled_dot_product_flash_attention_backward": (1, 11),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7),
    "aten::_scaled_dot_product_efficient_attention": (0, 6),
    "aten::_scaled_dot_product_efficient_attention_backward": (1, 11),
}
# Positions of the query, the longest sequence and the window.
_PACKED = {"torch_attn::_varlen_attn": (0, 6, 9), "torch_attn::_varlen_attn_backward": (1, 9, 13)}
_WINDOWED = {"aten::_flash_attention_forward": 0, "aten::_flash_attention_backward": 1}


class FlopLog:
    """Observes operators and adds up ``flops["products"]`` (matmuls) and ``flops["attention"]``."""

    def __init__(self) -> None:
        self.flops = {"products": 0.0, "attention": 0.0}

    def __call__(self, operator: Any, args: Any, named: Any, result: Any) -> None:
        name = operator_name(operator)
        if name in _MATMULS:
            left, right, dimension = _MATMULS[name]
            self.flops["products"] += 2.0 * float(args[left].numel()) * int(args[right].shape[dimension])
        elif name in _SQUARE:
            first, causal = _SQUARE[name]
            query, key, value = args[first : first + 3]
            is_causal = len(args) > causal and bool(args[causal])
            self.flops["attention"] += (1 + first) * _square(query, key, value, is_causal)
        elif name in _PACKED:
            first, longest, window = _PACKED[name]
            self.flops["attention"] += (1 + first) * _packed(args[first], args[first + 2], args[longest], args[window])
        elif name in _WINDOWED:
            first = _WINDOWED[name]
            query, key, value = args[first : first + 3]
            sides = named["window_size_left"], named["window_size_right"]
            self.flops["attention"] += (1 + first) * _windowed(query, key, value, *sides)


def _features(query: Any, value: Any) -> int:
    """Features per head, summed over both matmuls of attention."""
    return int(query.shape[-1]) + int(value.shape[-1])


def _square(query: Any, key: Any, value: Any, causal: bool) -> float:
    """Every query with every key; tensors are [batch, heads, seq, features]."""
    pairs = int(query.numel()) // int(query.shape[-1]) * int(key.shape[2])
    return 2.0 * float(pairs) * _features(query, value) * (0.5 if causal else 1.0)


def _packed(query: Any, value: Any, longest: int, window: Any) -> float:
    """Concatenated sequences of ``longest`` tokens, [tokens, heads, features]; ``window`` is (before, behind)."""
    before, behind = window or (-1, -1)
    causal = behind == 0
    seen = longest / 2 if causal else float(longest)
    if before >= 0:
        reach = float(min(longest, before + 1))
        seen = (reach - reach * reach / (2 * longest)) * (1 if causal else 2)
    return 2.0 * float(int(query.numel()) // int(query.shape[-1])) * seen * _features(query, value)


def _windowed(query: Any, key: Any, value: Any, left: int, right: int) -> float:
    """A window around queries, which are the last of the keys; tensors are [batch, seq, heads, features]."""
    queries, keys = int(query.shape[1]), int(key.shape[1])
    places = range(keys - queries, keys)  # a query counts half of its own key, as in a causal square
    before = sum(min(place + 0.5, left + 0.5) for place in places)
    behind = sum(min(keys - place - 0.5, right) for place in places)
    return 2.0 * int(query.shape[0]) * int(query.shape[2]) * (before + behind) * _features(query, value)
