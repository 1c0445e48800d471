"""The private parts of PyTorch that shardwise uses: all of them, and why; no other module touches one.

A private name may go with any release. The version beside each is the one it was last seen in;
`docs/engine.md` lists the versions that the tests have passed with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as _schedules
import torch.distributed.pipelining.stage as _stage
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork, Store
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
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

    From 2.15 on the runtime needs a wait for every send; before, it waits for all of them at the end by itself.
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

# What torch.nn.functional.grouped_mm calls: a mode that replaces functions, or operators, sees these (2.13).
grouped_mm = torch._grouped_mm
grouped_mm_operator: Any = torch.ops.aten._grouped_mm.default

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

# A function to call when the running backward pass ends; only hooks of single tensors are public (2.13).
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# What all norms over a batch, and all dropouts, are subclasses of (2.13).
BatchNorm = nn.modules.batchnorm._BatchNorm
Dropout = nn.modules.dropout._DropoutNd

# Whether a profiler runs: its ranges cost time even where it does not (2.13).
profiler_enabled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

# Named ranges without all the operators, which torch.profiler cannot leave out (2.13).
profiler_kinds: Any = _C._profiler
prepare_profiler: Any = _C._autograd._prepare_profiler
enable_profiler: Any = _C._autograd._enable_profiler
DeviceType: Any = _C._autograd.DeviceType
disable_profiler: Any = _C._autograd._disable_profiler
profiler_type: Any = _C._autograd._profiler_type

NVTX: Any = _C._profiler.ActiveProfilerType.NVTX


def enable_nvtx() -> None:
    """Sets the state of `torch.autograd.profiler.emit_nvtx`, which reaches the threads of backward passes, until
    `disable_profiler`.

    The public class would make a range for every operator, with a unique number in its name. Here the state is set for
    a scope that nothing in this project uses, so that torch makes no ranges itself (2.11 on; a build with CUDA).
    """
    kinds: Any = _C._profiler
    settings = (False, False, False, False, False, kinds._ExperimentalConfig())  # as emit_nvtx has them
    config = kinds.ProfilerConfig(kinds.ProfilerState.NVTX, *settings)
    enable_profiler(config, set(), {kinds.RecordScope.LITE_INTERPRETER})


# Files of torch.save record by record, without unpickling them (2.13).
PyTorchFileReader: Any = _C.PyTorchFileReader


def flight_entries() -> list[dict[str, Any]]:
    """What the flight recorders have, oldest first for each backend: gloo's, and NCCL's where torch has it (2.13)."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump: Callable[[], str] | None = getattr(_C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries") or []
    return entries


def process_groups() -> list[dist.ProcessGroup]:
    """All groups that this process is in; nothing public lists them (2.13)."""
    return [group for group in distributed_c10d._world.pg_map if group is not None]


def group_named(name: str) -> dist.ProcessGroup:
    """The group that an operator's argument names (2.13)."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: dist.ProcessGroup = resolve(name)
    return group


def operator_name(operator: Any) -> str:
    """An operator's name with its namespace, without its overload (2.13)."""
    name: str = operator._schema.name
    return name


def storage_id(storage: torch.UntypedStorage) -> int:
    """The address of a storage itself: `data_ptr` is that of its memory, which it may lose or lend (2.13)."""
    address: int = storage._cdata
    return address


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place: the counter by which autograd notices it (2.13)."""
    return tensor._version


def has_forward_pre_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view, of which FSDP warns (2.13)."""
    return tensor._is_view()


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers that a state dict holds; `state_dict` itself would run FSDP's hooks (2.13)."""
    kept = module._buffers.keys() - module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if name in kept and buffer is not None}


def around_every_call(module: nn.Module, before: Callable[[], None], after: Callable[[], None] | None = None) -> None:
    """Calls ``before`` and ``after`` around every call of a module.

    Where the module is compiled this is not done by hooks, which the compiler would take into the graph (2.11 on).
    """
    compiled: Any = module._compiled_call_impl
    if compiled is None:
        module.register_forward_pre_hook(lambda module, arguments: before())
        if after is not None:
            module.register_forward_hook(lambda module, arguments, result: after())
        return

    def call(*arguments: Any, **named: Any) -> Any:
        before()
        result = compiled(*arguments, **named)
        if after is not None:
            after()
        return result

    module._compiled_call_impl = call


def replace_call(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Runs what ``around`` makes of a module's forward pass instead of it: of all of its call where it is compiled."""
    if module._compiled_call_impl is None:
        module.forward = around(module.forward)
    else:
        module._compiled_call_impl = around(module._compiled_call_impl)


def inside_every_call(module: nn.Module, block: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
    """Runs each call of a module in a block of its own, until the returned function is called.

    Without hooks where the module is compiled, as above. Otherwise what other hooks do is outside of the block.
    """
    compiled: Any = module._compiled_call_impl
    if compiled is not None:

        def call(*arguments: Any, **named: Any) -> Any:
            with block():
                return compiled(*arguments, **named)

        module._compiled_call_impl = call
        return lambda: setattr(module, "_compiled_call_impl", compiled)
    entered: list[AbstractContextManager[object]] = []

    def enter(*_: Any) -> None:
        entered.append(block())
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    hooks = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, prepend=True)]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


# FSDP2: its state of a module, the moment before it gathers, and a backward pass that its hooks did not see (2.13).


def parameter_groups(module: nn.Module) -> list[Any]:
    """FSDP's records of the parameters it gathers and reduces together."""
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before 2.13


def local_shard(parameter: Any) -> Any:
    """The very tensor that FSDP asks for what to send (2.11 on): `to_local` would make another."""
    return parameter._local_tensor


def gather_in_background(root: Any) -> None:
    """Without streams only an asynchronous all-gather overlaps with computation."""
    root._set_unshard_async_op(True)


def copy_gradients_by_kernels() -> None:
    """Makes a rank that is alone in its shard group copy gradients by kernels alone, in the whole process.

    FSDP's own copy first sends a table to the GPU, which would queue behind long copies from the host.
    """
    fsdp_collectives.foreach_reduce_scatter_copy_in = _copied_by_kernels


_fsdp_copy_in = fsdp_collectives.foreach_reduce_scatter_copy_in


def _copied_by_kernels(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> None:
    if world_size > 1:
        _fsdp_copy_in(unsharded_grads, reduce_scatter_input, world_size)
    else:
        parts = torch.split(reduce_scatter_input.view(-1), [gradient.numel() for gradient in unsharded_grads])
        foreach_copy_(parts, [gradient.reshape(-1) for gradient in unsharded_grads])


def finish_backward(root: nn.Module) -> None:
    """What FSDP does at the end of a backward pass."""
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    state._root_post_backward_final_callback()


def forget_forward_passes(group: Any) -> None:
    """Drops FSDP's record of forward passes without a backward pass, which would make a later one gather (2.13)."""
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def is_gathering(group: Any) -> bool:
    return group._all_gather_result is not None


def gathers_for_backward(group: Any) -> bool:
    return bool(group._training_state.name == "PRE_BACKWARD")


def gather_ranks(group: Any) -> int:
    return int(group._all_gather_process_group.size())


def gather_stream(group: Any, async_op: bool) -> Any:
    """The stream that reads the shards."""
    return group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]


# CUDA graphs (2.11 to 2.13): a recording that fails leaves its stream current, the allocator at its memory pool, which
# stays in use, and the generator of random numbers in the state of being recorded.


def free_matmul_workspaces() -> None:
    """Frees the workspaces of all streams; the next matmul makes a new one. Does nothing without CUDA."""
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()


def new_graph_pool() -> Any:
    return torch.cuda.graph_pool_handle()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Records what is launched inside. Relaxed mode allows calls of other threads, such as NCCL's, on other streams."""
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool, capture_error_mode="relaxed"):
            yield
    except RuntimeError:
        with suppress(RuntimeError):
            _C._cuda_endAllocateToPool(stream.device_index, pool)
            _C._cuda_releasePool(stream.device_index, pool)
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
