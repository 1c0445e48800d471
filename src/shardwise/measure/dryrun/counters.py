"""What a traced step sends and computes: every collective and message, and FLOPs by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shardwise.collectives import CollectiveKind
from shardwise.engine import profiler_ranges
from shardwise.engine.labels import Label, label_of
from shardwise.engine.torch_private import tree_iter
from shardwise.measure.dryrun.result import RECEIVE
from shardwise.measure.dryrun.world import replaced

# -- Every collective and message of a rank: what it is, over which ranks, how many bytes, and by which name


@dataclass(frozen=True)
class Sent:
    """One call. ``size_bytes`` is what the collective works on, as the cost model counts it: of an all-gather the
    result, of a reduce-scatter what goes in, of an all-to-all and a message what is sent. ``peer`` is the other rank
    of a message. ``label`` is what the engine calls it."""

    kind: str
    ranks: tuple[int, ...]
    size_bytes: int
    label: Label = Label("none")
    peer: int | None = None


class CollectiveLog:
    """A witness of operators that notes every collective in ``sent``, by the names given while it is `naming`."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self._labels: list[Label] = []

    def __call__(self, operator: Any, args: Any, named: Any, result: Any) -> None:
        if operator.namespace in ("c10d", "_c10d_functional"):
            name = operator.name()
            if name in _KINDS:
                self._note(name, _KINDS[name], args, result)

    def naming(self) -> AbstractContextManager[None]:
        """Receives the names that the engine gives its phases and collectives."""

        @contextmanager
        def named(name: str) -> Iterator[None]:
            self._labels.append(label_of(name))
            try:
                yield
            finally:
                self._labels.pop()

        return replaced((profiler_ranges, "marked", named))

    def _note(self, operator: str, kind: str, args: Any, result: Any) -> None:
        group = _group_of(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        label = next((one for one in reversed(self._labels) if one.what), Label("none"))
        if kind in (CollectiveKind.SEND_RECV, RECEIVE):
            peer = dist.get_global_rank(group, args[2])
            self.sent.append(Sent(kind, ranks, _bytes(args[0]), label, peer))
            return
        if kind == CollectiveKind.ALL_TO_ALL:
            size = _bytes(args[0] if operator.startswith("_c10d_functional") else args[1])
        else:  # what is whole is on one side of a gather or a scatter, on both of a reduction
            tensors = [_bytes(one) for one in (*args[:2], result) if isinstance(one, (Tensor, list, tuple))]
            size = max(tensors)
        self.sent.append(Sent(kind, ranks, size, label))


_FORMS = {
    CollectiveKind.ALL_REDUCE: ("allreduce_", "allreduce_coalesced_"),
    CollectiveKind.ALL_GATHER: (
        "_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "allgather_coalesced_",
    ),
    CollectiveKind.REDUCE_SCATTER: ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    CollectiveKind.ALL_TO_ALL: ("alltoall_base_", "alltoall_"),
    CollectiveKind.BROADCAST: ("broadcast_",),
    CollectiveKind.SEND_RECV: ("send",),
    RECEIVE: ("recv_",),
}  # fmt: skip
_FUNCTIONAL = {
    CollectiveKind.ALL_REDUCE: ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    CollectiveKind.ALL_GATHER: (
        "all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced",
    ),
    CollectiveKind.REDUCE_SCATTER: (
        "reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced",
    ),
    CollectiveKind.ALL_TO_ALL: ("all_to_all_single",),
    CollectiveKind.BROADCAST: ("broadcast", "broadcast_"),
}  # fmt: skip
_KINDS: dict[str, str] = {
    **{f"c10d::{name}": str(kind) for kind, several in _FORMS.items() for name in several},
    **{f"_c10d_functional::{name}": str(kind) for kind, several in _FUNCTIONAL.items() for name in several},
}


def _group_of(args: Any) -> dist.ProcessGroup:
    """The process group among the arguments: an object of its own, or the name at their end."""
    for one in args:
        if not isinstance(one, (Tensor, list, tuple, str, int, float)) and "ProcessGroup" in str(type(one)) + str(one):
            return one if isinstance(one, dist.ProcessGroup) else dist.ProcessGroup.unbox(one)
    named: Any = distributed_c10d
    group: dist.ProcessGroup = named._resolve_process_group(args[-1])
    return group


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tree_iter(tensors) if isinstance(one, Tensor))


# -- Floating-point operations of a step, by kind: matmuls and attention -----------------------------
# Counted as the cost model does: two for a multiplication and an addition, half of a causal square, and twice the
# forward pass for the backward pass of attention (recomputed scores inside its kernel do not count).


class FlopLog:
    """A witness of operators that adds up: ``flops["products"]``, ``flops["attention"]``."""

    def __init__(self) -> None:
        self.flops = {"products": 0.0, "attention": 0.0}

    def __call__(self, operator: Any, args: Any, named: Any, result: Any) -> None:
        name = operator._schema.name
        if name in _WINDOWS:
            self.flops["attention"] += _WINDOWS[name](*args, **named)
        if name in _PRODUCTS:
            self.flops["products"] += _PRODUCTS[name](*args)
        elif name in _ATTENTION:
            self.flops["attention"] += _ATTENTION[name](*args)


def _elements(tensor: Any) -> int:
    return int(tensor.numel())


def _product(left: Any, right: Any, *_: Any) -> float:
    """Of matrices, or of a batch of them."""
    return 2.0 * float(_elements(left)) * int(right.shape[-1])


def _added_product(_: Any, left: Any, right: Any, *__: Any) -> float:
    return _product(left, right)


def _grouped(rows: Any, matrices: Any, *_: Any) -> float:
    """Every row times the matrix of its group; or (of weights' gradients) the rows of each group with each other."""
    return 2.0 * float(_elements(rows)) * int(matrices.shape[-1])


def _of_columns(rows: Any, gradient: Any, *_: Any) -> float:
    return 2.0 * float(_elements(rows)) * int(gradient.shape[-1])


def _by_rows(hidden: Any, weight: Any) -> float:
    return 2.0 * float(_elements(hidden)) * int(weight.shape[0])


def _scores(query: Any, key: Any, value: Any, causal: bool) -> float:
    """Both products of attention, [batch, heads, seq, features] each."""
    pairs = _elements(query) // int(query.shape[-1]) * int(key.shape[2])
    features = int(query.shape[-1]) + int(value.shape[-1])
    return 2.0 * float(pairs) * features * (0.5 if causal else 1.0)


def _flash(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, *_: Any) -> float:
    return _scores(query, key, value, causal)


def _flash_backward(_: Any, query: Any, key: Any, value: Any, *rest: Any) -> float:
    causal = rest[7]  # out, log-sum-exp, two sequence bounds, two maxima, dropout come before
    return 2 * _scores(query, key, value, causal)


def _efficient(query: Any, key: Any, value: Any, *rest: Any) -> float:
    return _scores(query, key, value, bool(rest[3]) if len(rest) > 3 else False)


def _efficient_backward(_: Any, query: Any, key: Any, value: Any, *rest: Any) -> float:
    return 2 * _scores(query, key, value, bool(rest[7]) if len(rest) > 7 else False)


def _of_rows(query: Any, key: Any, value: Any, longest: int, window: Any) -> float:
    """Rows of ``longest`` tokens one behind the other, [tokens, heads, features]; a window of (before, behind)."""
    before, behind = window or (-1, -1)
    causal = behind == 0
    seen = longest / 2 if causal else float(longest)
    if before >= 0:
        reach = float(min(longest, before + 1))
        seen = (reach - reach * reach / (2 * longest)) * (1 if causal else 2)
    features = int(query.shape[-1]) + int(value.shape[-1])
    return 2.0 * float(_elements(query) // int(query.shape[-1])) * seen * features


def _unequal(query: Any, key: Any, value: Any, *rest: Any) -> float:
    return _of_rows(query, key, value, rest[3], rest[6])  # bounds, lengths, whether causal and the scale between


def _unequal_backward(_: Any, query: Any, key: Any, value: Any, *rest: Any) -> float:
    return 2 * _of_rows(query, key, value, rest[5], rest[9])


def _windowed(query: Any, key: Any, value: Any, *_: Any, window_size_left: int, window_size_right: int,
              **__: Any) -> float:  # fmt: skip
    """A window (before, behind) around queries that stand at the end of the keys; [batch, seq, heads, features]."""
    queries, keys = int(query.shape[1]), int(key.shape[1])
    places = range(keys - queries, keys)  # and the halves of a causal square, as all is counted
    before = sum(min(place + 0.5, window_size_left + 0.5) for place in places)
    behind = sum(min(keys - place - 0.5, window_size_right) for place in places)
    features = int(query.shape[-1]) + int(value.shape[-1])
    return 2.0 * int(query.shape[0]) * int(query.shape[2]) * (before + behind) * features


def _windowed_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **named: Any) -> float:
    return 2 * _windowed(query, key, value, **named)


_PRODUCTS: dict[str, Callable[..., float]] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::addmm": _added_product,
    "aten::addmm_": _added_product,
    "aten::baddbmm": _added_product,
    "aten::_grouped_mm": _grouped,
    "shardwise::wide_product": _by_rows,
    "shardwise::grouped_product": _grouped,
    "shardwise::grouped_product_of_columns": _of_columns,
}
_ATTENTION: dict[str, Callable[..., float]] = {
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "torch_attn::_varlen_attn": _unequal,
    "torch_attn::_varlen_attn_backward": _unequal_backward,
}
_WINDOWS: dict[str, Callable[..., float]] = {
    "aten::_flash_attention_forward": _windowed,
    "aten::_flash_attention_backward": _windowed_backward,
}
