"""Every collective and message of a rank: what it is, over which ranks, how many bytes, and by which name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_iter

from shardwise.collectives import CollectiveKind
from shardwise.engine import profiler_names
from shardwise.engine.labels import Label, label_of
from shardwise.measure.dryrun.replacing import replaced
from shardwise.measure.dryrun.result import RECEIVE


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

        return replaced((profiler_names, "marked", named))

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
