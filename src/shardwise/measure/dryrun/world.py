"""Poses as one rank of a world of any size: collectives move nothing, and tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.collectives import CollectiveKind
from shardwise.cost.memory import sum as memory_sum
from shardwise.cost.memory.states import updated_parameters
from shardwise.engine import profiler_ranges
from shardwise.engine.collectives.reductions import SCRATCH
from shardwise.engine.context import blocks
from shardwise.engine.context.blocks import EFFICIENT, FLASH, BlockKernel
from shardwise.engine.labels import Label, label_of
from shardwise.engine.offload import states
from shardwise.engine.offload.store import BackgroundCopy, Lanes, Store, StoredRegion
from shardwise.engine.optim import optimizer
from shardwise.engine.optim.one_pass import OnePass
from shardwise.engine.torch_private import (
    FakeStore,
    FakeTensorMode,
    FakeWork,
    efficient_attention,
    flash_attention,
    group_named,
    operator_name,
    sharding_prop,
    tree_iter,
)
from shardwise.layout.pieces import UPDATE_CHUNK_ELEMENTS, update_chunk
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.measure.dryrun.result import RECEIVE
from shardwise.models import dot_product, loss
from shardwise.models.dot_product import shapes_taken
from shardwise.models.norms import RMSNorm
from shardwise.spec.job import Job

# -- replacing functions for a while -----------------------------------------------------------------

_MISSING = object()


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes for the duration: each is an owner (a module, a class, an object), a name and a value."""
    originals = [vars(owner).get(name, _MISSING) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), original in zip(replacements, originals):
            if original is _MISSING:  # the attribute was its class's
                delattr(owner, name)
            else:
                setattr(owner, name, original)


# -- the world ---------------------------------------------------------------------------------------


@contextmanager
def posing_as(rank: int, world: int) -> Iterator[None]:
    """Makes PyTorch's fake process group the default one; there must be none before, and is none after.

    A send counts as complete when polled: the fake group itself would never complete it.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group exists already: a dry run needs a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with replaced((FakeWork, "is_completed", lambda work: True)):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside have shapes but no values, and use the memory that a GPU's kernels would."""
    # DTensor tries operators on full tensors in the fake mode that it finds, where they would be counted.
    no_mode = (sharding_prop, "detect_fake_mode", lambda *_, **__: None)
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of_a_gpu(), replaced(no_mode):
        yield


# -- stand-ins for GPU kernels on a CPU: the two differ in the memory that they use ------------------
# PyTorch can fake GPU tensors only if it is built for GPUs, so fake tensors are on the CPU. There it decomposes norms
# and attention, converts before a softmax, and rounds a matmul before adding it. The stand-ins compute nothing, and
# only allocate the right tensors.

aten: Any = torch.ops.aten


def kernels_of_a_gpu() -> AbstractContextManager[None]:
    """Makes operators allocate and save what the fused kernels of a GPU would."""
    return replaced(
        (RMSNorm, "forward", lambda module, x: _rms_norm(x, module.normalized_shape, module.weight)),
        (F, "rms_norm", _rms_norm),
        (F, "scaled_dot_product_attention", _attention),
        (dot_product, "takes", shapes_taken),
        (blocks, "takes", shapes_taken),
        (Tensor, "softmax", _in_its_own_format(Tensor.softmax)),
        (Tensor, "log_softmax", _in_its_own_format(Tensor.log_softmax)),
        (loss, "plus_product", _plus_product),
        (SCRATCH, "lend", lambda elements, dtype: torch.empty(elements, dtype=dtype)),
    )


def updates_in_one_pass() -> AbstractContextManager[None]:
    """Makes AdamW take no memory beyond its states, like the kernel of a GPU."""
    on_a_gpu = SimpleNamespace(run_on=lambda device: True)
    return replaced(
        (optimizer, "kernels", on_a_gpu), (OnePass, "__call__", lambda one_pass, update, parts: list(parts) and None)
    )


def chunks_of_all_layers(job: Job, pipeline_rank: int) -> AbstractContextManager[None]:
    """Makes offloaded states come to the device in chunks as large as with all layers of the rank."""
    updated = updated_parameters(rank_contents(job, pipeline_rank), sharding_of(job.strategy))
    elements = int(updated * job.strategy.offload.optimizer)

    def chunk(of_traced: int, most: int = UPDATE_CHUNK_ELEMENTS) -> int:
        return int(update_chunk(elements, most))

    return replaced((states, "update_chunk", chunk), (memory_sum, "update_chunk", chunk))


def block_kernel(query: Tensor, value: Tensor, biased: bool) -> BlockKernel:
    """The kernel for the blocks of context parallelism on a GPU.

    Values narrower than keys (MLA) go to cuDNN there, which like the memory-efficient kernel does not pad them.
    """
    plain = not biased and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1]
    return FLASH if plain else EFFICIENT


def _rms_norm(
    input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    result: Tensor = _FusedNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


class _FusedNorm(torch.autograd.Function):
    """aten::_fused_rms_norm, which saves its input and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        rows = inputs.shape[: inputs.dim() - dimensions]
        ctx.save_for_backward(inputs, weight, inputs.new_empty((*rows, *(1,) * dimensions), dtype=torch.float32))
        return torch.empty_like(inputs, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        inputs, weight, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        return torch.empty_like(inputs), None if weight is None else torch.empty_like(weight), None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """FlashAttention; with a mask, or values of another width than keys, the memory-efficient kernel.

    Heads that share keys are not repeated.
    """
    if attn_mask is None and query.shape[-1] == value.shape[-1]:
        out = flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    else:
        mask = attn_mask
        if mask is not None:
            mask = mask.to(query.dtype).expand(query.shape[0], query.shape[1], -1, -1)
        out = efficient_attention(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
    result: Tensor = out
    return result


def _in_its_own_format(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A softmax that reads its input as it is, even if the result has another format."""

    def softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is None or dtype == scores.dtype or (torch.is_grad_enabled() and scores.requires_grad):
            return original(scores, dim, dtype=dtype)
        return torch.empty_like(scores, dtype=dtype)

    return softmax


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Adds a product of factors in another format in one pass, which PyTorch 2.11 cannot do with fake tensors."""
    if total is None:
        return torch.empty((left.shape[0], right.shape[1]), dtype=torch.float32)
    return total.addmm_(*(torch.empty((), dtype=total.dtype).expand(factor.shape) for factor in (left, right)))


# -- a store for offloaded tensors without values: it keeps nothing, and copies take no time ---------
# Memory is freed and allocated when the engine does so, which waits for every copy no later than the plan assumes.


def nothing_moves() -> AbstractContextManager[None]:
    """Makes stores take everything and keep nothing."""

    def region(store: Store, size: int) -> StoredRegion:
        return _Nowhere(store.lanes, size, store.target == "cpu")

    return replaced((Store, "region", region), (Lanes, "_run", _over))


class _Nowhere(StoredRegion):
    def __init__(self, lanes: Lanes, size: int, in_host: bool) -> None:
        super().__init__(lanes, size)
        self.in_host = in_host

    def put(self, at: int, source: Tensor) -> None: ...

    def get(self, at: int, target: Tensor) -> None: ...

    def summed(self, at: int, source: Tensor, is_first: bool) -> Tensor:
        return source

    def in_memory(self, at: int, size: int) -> Tensor | None:
        """While a chunk is updated, its few elements count as the device's, which is far from the peak."""
        return torch.empty(size, dtype=torch.uint8) if self.in_host else None


def _over(lanes: Lanes, out: bool, work: Callable[[], None], tensors: tuple[Tensor, ...]) -> BackgroundCopy:
    """A finished copy, which keeps its tensors until it is waited for, as real copies do."""
    future: Future[None] = Future()
    future.set_result(None)
    return BackgroundCopy(future, *tensors)


# -- what a traced step sends and computes: every collective and message, and FLOPs by kind ----------


@dataclass(frozen=True)
class Sent:
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
