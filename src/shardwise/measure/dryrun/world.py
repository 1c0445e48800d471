"""One rank of a world of any size, in this process alone: collectives that move nothing, tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _sharding_prop
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.measure.dryrun.kernels import kernels_of_a_gpu
from shardwise.measure.dryrun.replacing import replaced


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
    no_mode = (_sharding_prop, "detect_fake_mode", lambda *_, **__: None)
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of_a_gpu(), replaced(no_mode):
        yield
