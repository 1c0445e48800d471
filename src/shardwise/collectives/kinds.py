"""The collective operations and the names people write for them."""

from __future__ import annotations

import re
from enum import StrEnum

from shardwise.spec.errors import SpecError, nearest_name, shown


class CollectiveKind(StrEnum):
    """What the ranks want to end up with. The root of a rooted collective is rank 0.

    The size of a collective is that of its whole buffer: what every rank holds (all-reduce, broadcast,
    reduce, send_recv), the concatenation over the ranks (all-gather, reduce-scatter, gather, scatter),
    or what one rank sends in all, its own block included (all-to-all).
    """

    SEND_RECV = "send_recv"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    GATHER = "gather"
    ALL_GATHER = "all_gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"

    @classmethod
    def parse(cls, text: str | CollectiveKind) -> CollectiveKind:
        """The kind behind "allreduce", "all-reduce", "AllReduce", "a2a", "p2p", ..."""
        if isinstance(text, CollectiveKind):
            return text
        if isinstance(text, str):
            squeezed = re.sub(r"[^a-z0-9]", "", text.lower())
            squeezed = _ALIASES.get(squeezed, squeezed)
            for kind in cls:
                if kind.value.replace("_", "") == squeezed:
                    return kind
        names = [kind.value for kind in cls]
        remedy = nearest_name(str(text), names) or "choose one of " + ", ".join(names)
        raise SpecError("collective", f"{shown(text)} is not a collective", remedy)


_ALIASES = {
    "p2p": "sendrecv",
    "pointtopoint": "sendrecv",
    "sendreceive": "sendrecv",
    "send": "sendrecv",
    "recv": "sendrecv",
    "bcast": "broadcast",
    "ar": "allreduce",
    "ag": "allgather",
    "allgatherintotensor": "allgather",
    "rs": "reducescatter",
    "reducescattertensor": "reducescatter",
    "a2a": "alltoall",
    "alltoallv": "alltoall",
    "alltoallsingle": "alltoall",
}
