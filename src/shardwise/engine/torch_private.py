"""The private parts of PyTorch that shardwise uses: all of them, and why; no other module imports one.

A private name may go with any release. Each was last seen in the version beside it;
`docs/engine.md` says with which versions the tests have passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as _schedules
import torch.distributed.pipelining.stage as _stage
from torch._C._distributed_c10d import FakeWork, Store
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import _sharding_prop as sharding_prop
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

# Names above, seen in 2.13:
# - FakeStore, FakeWork, FakeTensorMode, unset_fake_temporarily: a world of any size without its processes or
#   memory, for the dry run; torch has no public one.
# - Store: a type for annotations; the public name is a class of C++ without stubs.
# - all_to_all_single_autograd: an all-to-all that autograd and the compiler both know.
# - sharding_prop, clear_sharding_prop_cache: DTensor's cache outlives its process group and must not.
# - compute_local_shape_and_global_offset: which elements of a tensor a rank holds; checkpoints need the offset.
# - TorchDispatchMode, tree_*: every operator with its tensors; documented by example, named privately.

__all__ = [
    "FakeStore",
    "FakeTensorMode",
    "FakeWork",
    "Store",
    "TorchDispatchMode",
    "all_to_all_single_autograd",
    "clear_sharding_prop_cache",
    "compute_local_shape_and_global_offset",
    "sharding_prop",
    "tree_iter",
    "tree_leaves",
    "tree_map_only",
    "unset_fake_temporarily",
]

_C: Any = torch._C

# The pipelining runtime runs lists of actions, but it, the actions and the stage it drives are private (2.13).
RuntimeAction = _schedules._Action
ComputationType = _schedules._ComputationType
PipelineScheduleRuntime = _schedules._PipelineScheduleRuntime
PipelineStageBase = _stage._PipelineStageBase


def with_messages(
    passes: dict[int, list[RuntimeAction]], rank_of_stage: Callable[[int], int], stages: int
) -> dict[int, list[RuntimeAction]]:
    """The passes of every rank with sends and receives between them.

    From 2.15 on the runtime wants a wait for every send; before, it waits for all of them at the end by itself.
    """
    lists: dict[int, list[RuntimeAction]] = _schedules._add_send_recv(passes, rank_of_stage, stages)
    add_waits: Any = getattr(_schedules, "_add_wait_send", None)
    return lists if add_waits is None else add_waits(lists)


# One kernel for a list of tensors: what torch.optim itself calls, without a public name (2.13).
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub
foreach_zero_ = torch._foreach_zero_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

# The operator that torch.nn.functional.grouped_mm calls: what a mode that replaces operators meets (2.13).
grouped_mm = torch._grouped_mm

# Fused attention beneath `scaled_dot_product_attention`, which returns no log-sum-exp and takes no window (2.13).
_aten: Any = torch.ops.aten
cpu_flash_attention = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
cudnn_attention = _aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = _aten._scaled_dot_product_cudnn_attention_backward
efficient_attention = _aten._scaled_dot_product_efficient_attention
efficient_attention_backward = _aten._scaled_dot_product_efficient_attention_backward
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
window_attention = _aten._flash_attention_forward
window_attention_backward = _aten._flash_attention_backward

# Whether a backward pass is running, and which of its nodes: nothing public says it (2.13).
current_graph_task_id: Callable[[], int] = _C._current_graph_task_id
current_autograd_node = _C._current_autograd_node

# Whether a profiler runs: its ranges cost time even where it does not (2.13).
profiler_enabled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

# Named ranges without all the operators, which torch.profiler cannot leave out; the flight recorder's entries (2.13).
profiler_kinds: Any = _C._profiler
profiler_autograd: Any = _C._autograd
c10d: Any = _C._distributed_c10d

# Files of torch.save record by record, without unpickling them (2.13).
PyTorchFileReader: Any = _C.PyTorchFileReader


def process_groups() -> list[dist.ProcessGroup]:
    """All groups that this process is in; nothing public lists them (2.13)."""
    return [group for group in distributed_c10d._world.pg_map if group is not None]
