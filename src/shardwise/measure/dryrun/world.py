"""One rank of a world of any size, in this process alone: collectives that move nothing, tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.collectives.reductions import SCRATCH
from shardwise.engine.context import blocks
from shardwise.engine.context.kernels import EFFICIENT, FLASH, BlockKernel
from shardwise.engine.offload.store import BackgroundCopy, Lanes, Store, StoredRegion
from shardwise.engine.torch_private import FakeStore, FakeTensorMode, FakeWork, sharding_prop
from shardwise.models import dot_product, loss
from shardwise.models.dot_product import shapes_taken
from shardwise.models.norms import RMSNorm

# -- Temporarily replaces functions ------------------------------------------------------------------

_MISSING = object()


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Owner (a module, a class, an object), name and what stands under the name until the end."""
    originals = [vars(owner).get(name, _MISSING) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), original in zip(replacements, originals):
            if original is _MISSING:  # it was its class's
                delattr(owner, name)
            else:
                setattr(owner, name, original)


# -- the world ---------------------------------------------------------------------------------------


@contextmanager
def posing_as(rank: int, world: int) -> Iterator[None]:
    """PyTorch's fake process group as the default group; a real one must not exist, and none is left behind.

    A send is complete when next polled: the fake group itself would never complete it.
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
    """Tensors made inside have shapes and no values, and take the memory that a GPU's kernels would."""
    # DTensor tries its operators on whole tensors in the mode it finds, where they would be counted.
    no_mode = (sharding_prop, "detect_fake_mode", lambda *_, **__: None)
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of_a_gpu(), replaced(no_mode):
        yield


# -- Stand-ins for GPU kernels on a CPU: the two differ in the memory that they use ------------------
# PyTorch can pretend that tensors are on a GPU only where it is built for one, so that fake tensors are on the CPU.
# There it decomposes norms and attention, converts before a softmax, and rounds a matmul before it is added. Nothing
# is computed here, only the right tensors are allocated.

aten: Any = torch.ops.aten


def kernels_of_a_gpu() -> AbstractContextManager[None]:
    """Operators inside make and keep what the fused kernels of a GPU make and keep."""
    return replaced(
        (RMSNorm, "forward", _norm_of_module),
        (F, "rms_norm", _rms_norm),
        (F, "scaled_dot_product_attention", _attention),
        (dot_product, "takes", shapes_taken),
        (blocks, "takes", shapes_taken),
        (Tensor, "softmax", _in_its_own_format(Tensor.softmax)),
        (Tensor, "log_softmax", _in_its_own_format(Tensor.log_softmax)),
        (loss, "add_product", _add_product),
        (SCRATCH, "lend", lambda elements, dtype: torch.empty(elements, dtype=dtype)),
    )


def block_kernel(query: Tensor, value: Tensor, biased: bool) -> BlockKernel:
    """The kernel that the blocks of context parallelism take on a GPU.

    Values narrower than keys (MLA) are cuDNN's there, which pads them no more than the memory-efficient kernel does.
    """
    plain = not biased and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1]
    return FLASH if plain else EFFICIENT


def _norm_of_module(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return _rms_norm(x, module.normalized_shape, module.weight)


def _rms_norm(
    input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    result: Tensor = _FusedNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


class _FusedNorm(torch.autograd.Function):
    """aten::_fused_rms_norm, which keeps its input and one fp32 number of each row."""

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
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    else:
        mask = attn_mask
        if mask is not None:
            mask = mask.to(query.dtype).expand(query.shape[0], query.shape[1], -1, -1)
        attend = aten._scaled_dot_product_efficient_attention
        out = attend(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
    result: Tensor = out
    return result


def _in_its_own_format(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A softmax whose result is in another format than its input reads the input as it is."""

    def softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is None or dtype == scores.dtype or (torch.is_grad_enabled() and scores.requires_grad):
            return original(scores, dim, dtype=dtype)
        return torch.empty_like(scores, dtype=dtype)

    return softmax


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """One pass over factors of another format than ``total``, which PyTorch 2.11 cannot do with fake tensors."""
    total.addmm_(*(torch.empty((), dtype=total.dtype).expand(one.shape) for one in (left, right)))


# -- Memory that is not the device's, for offloaded tensors without values: it holds nothing, and is reached at once
# Offloaded memory is freed and fetched memory is allocated when the engine says so: it waits for every copy no later
# than the plan has it gone or present.


def nothing_moves() -> AbstractContextManager[None]:
    """Stores made inside take everything and keep nothing."""
    return replaced((Store, "region", _region), (Lanes, "_run", _over))


class _Nowhere(StoredRegion):
    def __init__(self, lanes: Lanes, size: int, in_host: bool) -> None:
        super().__init__(lanes, size)
        self.in_host = in_host

    def write(self, at: int, tensor: Tensor) -> BackgroundCopy:
        return self.lanes.out(_nothing, tensor)

    def read(self, at: int, into: Tensor) -> BackgroundCopy:
        return self.lanes.back(_nothing, into)

    def add(self, at: int, tensor: Tensor, norm: Tensor, *, is_first: bool) -> BackgroundCopy:
        return self.lanes.out(_nothing, tensor)

    def in_memory(self, at: int, size: int) -> Tensor | None:
        """While they are updated the few elements of a chunk count as the device's: far from its peak."""
        return torch.empty(size, dtype=torch.uint8) if self.in_host else None


def _region(store: Store, size: int) -> StoredRegion:
    return _Nowhere(store.lanes, size, store.target == "cpu")


def _over(lanes: Lanes, out: bool, work: Callable[[], None], tensors: tuple[Tensor, ...]) -> BackgroundCopy:
    """A copy that is over; its tensors are kept until somebody has waited for it, as those of others are."""
    future: Future[None] = Future()
    future.set_result(None)
    return BackgroundCopy(future, *tensors)


def _nothing() -> None:
    pass
