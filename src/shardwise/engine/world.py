"""Joining and leaving the processes that train together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.engine.torch_private import clear_sharding_prop_cache
from shardwise.layout.groups import local_rank

if TYPE_CHECKING:
    from shardwise.engine.torch_private import Store


def store_at(address: str, port: int, rank: int, world: int, seconds: float = 300) -> Store:
    """The store of all ranks, which rank 0 serves; under torchrun its agent does."""
    place = f"[{address}]" if ":" in address else address
    store, _, _ = next(rendezvous(f"tcp://{place}:{port}", rank, world, timeout=timedelta(seconds=seconds)))
    return store  # type: ignore[no-any-return]


def silence_blas_fallback() -> None:
    """Hides a warning: on a CPU without bf16 PyTorch falls back to BLAS, and every process prints a stack trace."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")


@contextmanager
def process_group(
    rank: int, world: int, meeting: str | Store, *, device: str = "cpu", seconds: float = 120, on_cpu: str = "gloo"
) -> Iterator[None]:
    """The default process group of ``world`` processes that meet in a file or a store; destroyed at the end.

    Besides NCCL on GPUs there is always a CPU backend, for checkpoints and small agreements; without GPUs, ``on_cpu``.
    """
    silence_blas_fallback()
    store = dist.FileStore(meeting, world) if isinstance(meeting, str) else meeting  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else on_cpu
    if device == "cuda":
        torch.cuda.set_device(local_rank(rank, torch.cuda.device_count()))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
    # Not in a finally clause: a failed rank that leaves breaks the connections of others, which would hide its error.
    yield
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch's cache of operators on DTensors names the groups of this world; equal meshes of the next would use them.
    clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
