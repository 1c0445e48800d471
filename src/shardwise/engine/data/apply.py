"""Data parallelism: the same parameters on several ranks, whole (ZeRO-0) or divided (ZeRO-1, 2, 3, hybrid).

Applied last, around everything else. Gradients are sums over the ranks: each rank differentiates its share of the
loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.collectives.communicator import GradientSums
from shardwise.engine.collectives.reductions import Pending, split_like
from shardwise.engine.compression import CompressedSum, MomentumSum, compressed_sum
from shardwise.engine.data.fsdp import Sharded
from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.offload.states import StoredStates
from shardwise.engine.optim.precision import FP32, Precision
from shardwise.engine.patterns import DECODER, Patterns, Unit, find_layers, matching, own_parameters, units_of
from shardwise.engine.profiler_ranges import sent, wait_for
from shardwise.engine.torch_private import at_end_of_backward, current_graph_task_id, foreach_copy_, foreach_zero_
from shardwise.spec.job import Job
from shardwise.spec.less_communication import Compression

# -- Everything whole on every rank (ZeRO-0): gradients summed in a few large pieces while the backward pass runs ----
# Not `DistributedDataParallel`, which is silently wrong with split backward passes (pytorch#144530) and copies every
# gradient into its bucket and back; nor `fully_shard` with shards of one, which keeps all weights twice. Here a graph
# node before each layer runs once the layer's gradients are complete; they move into a bucket once and are summed
# there.

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel, unless the strategy says otherwise


class Replicated:
    """Sums gradients over the ranks that hold the same parameters, in the last backward pass of a step.

    ``masters`` are the fp32 values of parameters that are computed with in 16 bits, once `start` was called.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[Unit], mesh: Mesh, precision: Precision, sums: GradientSums
    ) -> None:
        self.root, self.units, self.mesh, self.precision, self.sums = root, units, mesh, precision, sums
        self.masters: dict[nn.Parameter, Tensor] = {}
        self.buckets: list[Bucket] = []
        self.last = False
        self._has_started = False
        self._will_finish = False
        self._beside: Any = None  # the stream that reduces, on a GPU
        self._open: dict[nn.Module, int] = {}  # forward passes of a layer with a backward pass still to come

    def start(self) -> None:
        """Call once the parameters have values; 16-bit ones get fp32 masters."""
        if self._has_started:
            return
        self._has_started = True
        if self.precision.has_masters:
            with torch.no_grad():
                for parameter in self.root.parameters():
                    if not parameter.requires_grad:
                        continue
                    self.masters[parameter] = parameter.detach().float()
                    parameter.data = parameter.to(self.precision.compute)
                    parameter.grad_dtype = self.precision.gradient
        self.buckets = _buckets(self.root, self.units, self.mesh, self.sums)
        for bucket in self.buckets:
            bucket.expect(self.mesh.strategy.compression)
        for module in {bucket.complete_after for bucket in self.buckets}:
            if module is not None:
                module.register_forward_pre_hook(self._mark, with_kwargs=True)
        if self.buckets:
            self.root.register_forward_hook(self._see_backward)

    def before_microbatch(self, last: bool) -> None:
        self.start()
        self.last = last

    def after_step(self) -> None:
        """Frees the gradients."""
        self._open.clear()
        for parameter in self.root.parameters():
            parameter.grad = None
        for bucket in self.buckets:
            bucket.clear()

    # For a pipeline.

    def before_input_gradients(self) -> None:
        self.last = False

    def after_weight_gradients(self, last: bool) -> None:
        if last:
            self.finish()

    def finish(self) -> None:
        """Starts the remaining sums and waits for all; the last full backward pass calls this at its end."""
        self._will_finish = False
        for bucket in self.buckets:
            self._start(bucket)
        for bucket in self.buckets:
            bucket.wait()
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def _start(self, bucket: Bucket) -> None:
        if bucket.started:
            return
        bucket.started = True
        bucket.collect()
        if bucket.device.type != "cuda":
            bucket.work = bucket.reduce()
            return
        self._beside = self._beside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            work = bucket.reduce()
            if work is not None:
                work.wait()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as FSDP's hooks are
    def _mark(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Inserts a graph node before the layer, whose backward runs when all gradients of the layer are complete."""
        if not torch.is_grad_enabled() or current_graph_task_id() != -1:
            return None  # the second forward pass of recompute is not counted
        values = [*arguments, *named.values()]
        places = [place for place, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
        if not places:
            return None
        self._open[module] = self._open.get(module, 0) + 1
        marked = _Mark.apply(lambda: self._passed(module), *(values[place] for place in places))  # type: ignore[no-untyped-call]
        for place, value in zip(places, marked):
            values[place] = value
        positional = len(arguments)
        return tuple(values[:positional]), dict(zip(named, values[positional:]))

    def _passed(self, module: nn.Module) -> None:
        self._open[module] -= 1
        for bucket in self.buckets:
            if bucket.complete_after is module:
                bucket.collect()
                if self.last and self._open[module] == 0:
                    self._start(bucket)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _see_backward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._finish_at_the_end)  # type: ignore[no-untyped-call]

    def _finish_at_the_end(self, gradient: Tensor) -> None:
        if not self._will_finish:
            self._will_finish = True
            at_end_of_backward(self.finish if self.last else self._collect)

    def _collect(self) -> None:
        """Fills buckets that no layer completes, so that gradients do not take memory beside an empty bucket."""
        self._will_finish = False
        for bucket in self.buckets:
            if bucket.complete_after is None and all(parameter.grad is not None for parameter in bucket.parameters):
                bucket.collect()


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passed = passed
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.passed()
        return (None, *gradients)


def _buckets(root: nn.Module, units: Sequence[Unit], mesh: Mesh, sums: GradientSums) -> list[Bucket]:
    """In the order in which the backward pass completes them; none for one rank, or for independent workers."""
    buckets: list[Bucket] = []
    if not mesh.strategy.synchronise.every_step:
        return buckets
    for expert, name in ((False, "replicate"), (True, "expert_replicate")):
        if mesh.size(name) == 1:
            continue
        bucket = Bucket(mesh.group(name), sums)
        for unit, parameters, after in _completed(root, units):
            if (unit is not None and unit.expert) != expert:
                continue
            if bucket.bytes >= (mesh.strategy.bucket or BUCKET_BYTES):
                buckets.append(bucket)
                bucket = Bucket(mesh.group(name), sums)
            bucket.parameters += [parameter for parameter in parameters if parameter.requires_grad]
            bucket.complete_after = after
        buckets.append(bucket)
    return [bucket for bucket in buckets if bucket.parameters]


def _completed(
    root: nn.Module, units: Sequence[Unit]
) -> list[tuple[Unit | None, list[nn.Parameter], nn.Module | None]]:
    """Units with their parameters in the order of the backward pass, and the layer after which each is complete."""
    owned, rest = own_parameters(root, units)
    completed: list[tuple[Unit | None, list[nn.Parameter], nn.Module | None]] = []
    layer: nn.Module | None = None
    for unit, parameters in zip(units, owned):
        if not (unit.expert or unit.at_the_end):
            layer = None if unit.by_index else unit.module
        completed.append((unit, parameters, layer))
    # The embedding, and what belongs to no layer, are complete at the end of the backward pass.
    return [*reversed(completed), (None, rest, None)]


class Bucket:
    """Parameters whose gradients are summed together, once the backward pass has left ``complete_after`` (or ended).

    Memory is allocated once; from the first backward pass of a step on, the gradients are views of it.
    """

    def __init__(self, group: dist.ProcessGroup, sums: GradientSums) -> None:
        self.group, self.sums = group, sums
        self.parameters: list[nn.Parameter] = []
        self.complete_after: nn.Module | None = None
        self.flat: Tensor | None = None
        self.compressed: CompressedSum | None = None
        self.compresses = True
        self.collected = self.started = False
        self.work: Pending | None = None

    @property
    def bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def expect(self, compression: Compression) -> None:
        """Sets up compression, before the first sum."""
        shapes = [parameter.shape for parameter in self.parameters]
        self.compressed = compressed_sum(compression, shapes, self.group, self.device)

    def reduce(self) -> Pending | None:
        """Starts the sum of what was collected."""
        flat = self.collect()
        if self.compressed is not None and self.compresses:
            return self.compressed.start(flat)
        with sent("dp", Called.GRADIENTS, flat):
            return self.sums.all_reduce(flat, self.group)

    @torch.no_grad()
    def collect(self) -> Tensor:
        """All gradients in one tensor, of which they are views from now on; zero where a parameter had none."""
        if self.flat is None:
            first = self.parameters[0]
            elements = sum(parameter.numel() for parameter in self.parameters)
            self.flat = torch.empty(elements, dtype=first.grad_dtype or first.dtype, device=first.device)
            self.places = split_like(self.flat, self.parameters)
        if self.collected:
            return self.flat
        self.collected = True
        missing = [place for place, parameter in zip(self.places, self.parameters) if parameter.grad is None]
        if missing:
            foreach_zero_(missing)
        there = [
            (place, parameter.grad)
            for place, parameter in zip(self.places, self.parameters)
            if parameter.grad is not None
        ]
        foreach_copy_([place for place, _ in there], [gradient for _, gradient in there])
        for place, parameter in zip(self.places, self.parameters):
            parameter.grad = place
        return self.flat

    def wait(self) -> None:
        wait_for(self.work, "dp", Called.GRADIENTS)
        self.work = None

    def clear(self) -> None:
        self.collected, self.started, self.work = False, False, None


# -- Whole or divided, as a step drives it ---------------------------------------------------------

PREFETCH = 1  # units gathered ahead of the one that computes; more would hide nothing more


class DataParallel:
    """Data parallelism of all stages of this rank, as a step drives it.

    Without a pipeline, call `before_microbatch` before each forward pass and `after_step` after the optimizer. A
    pipeline calls the ``parts`` of its stages itself (`engine.pipeline.runtime.Reduction`). Gradients are complete when
    the last pass returns.
    """

    def __init__(self, parts: dict[nn.Module, Sharded | Replicated]) -> None:
        self.parts = parts
        self._sharded = [part for part in parts.values() if isinstance(part, Sharded)]

    def start(self) -> None:
        """Call once the parameters have values, before the optimizer is made."""
        for part in self.parts.values():
            part.start()

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """fp32 values of whole 16-bit parameters; divided parameters are fp32 themselves."""
        return {parameter: master for part in self.parts.values() for parameter, master in part.masters.items()}

    @property
    def buckets(self) -> dict[str, Bucket]:
        """Whole parameters whose gradients are summed together; divided ones have none."""
        whole = [(number, part) for number, part in enumerate(self.parts.values()) if isinstance(part, Replicated)]
        return {f"{number}.{index}": bucket for number, part in whole for index, bucket in enumerate(part.buckets)}

    @property
    def feedback(self) -> dict[str, Tensor]:
        """What compressed sums of gradients keep from one step to the next, on this rank alone."""
        compressed = [(name, bucket.compressed) for name, bucket in self.buckets.items() if bucket.compressed]
        return {
            f"{name}.{state}": tensor for name, compressor in compressed for state, tensor in compressor.states.items()
        }

    @property
    def compressed_bytes(self) -> int:
        """What this rank has sent in compressed sums so far."""
        return sum(bucket.compressed.sent_bytes for bucket in self.buckets.values() if bucket.compressed)

    def follow_momenta(self, momentum: Callable[[nn.Parameter], Tensor], kept: float) -> None:
        """Tells compressed sums where the optimizer keeps momenta, and how much of these is left after a step."""
        for bucket in self.buckets.values():
            if isinstance(bucket.compressed, MomentumSum):
                bucket.compressed.follow([momentum(parameter) for parameter in bucket.parameters], kept)

    def compress(self, now: bool) -> None:
        """Whether the next sums are compressed, where the strategy compresses at all."""
        for bucket in self.buckets.values():
            bucket.compresses = now

    def forget_masters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drops the masters of these parameters, whose fp32 values others keep from now on."""
        for parameter in parameters:
            for part in self.parts.values():
                part.masters.pop(parameter, None)

    def is_sharded(self, stage: nn.Module) -> bool:
        return isinstance(self.parts[stage], Sharded)

    def offload(self, stored: StoredStates, stay: AbstractSet[nn.Parameter]) -> None:
        """Moves ``stored`` weights and gradients off the device, but not the gradients of parameters in ``stay``."""
        for part in self._sharded:
            part.offload(stored, stay)

    def settle_gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor | None] | None:
        """Waits for gradients that leave the device; returns the norms of those, None if all are on the device."""
        away = [part.gradients for part in self._sharded if part.gradients]
        for gradients in away:
            gradients.settle()
        return [away[0].stored.summed.get(parameter) for parameter in parameters] if away else None

    @torch.no_grad()
    def publish(self) -> None:
        """Copies masters into the weights, after something other than the optimizer has written them."""
        masters = self.masters
        if masters:
            foreach_copy_(list(masters), list(masters.values()))

    def before_step(self) -> None:
        """Call before the first forward pass of weights that may have changed."""
        for part in self._sharded:
            part.before_step()

    def before_microbatch(self, last: bool) -> None:
        for part in self.parts.values():
            part.before_microbatch(last)

    def after_step(self) -> None:
        for part in self.parts.values():
            part.after_step()

    def after_evaluation(self) -> None:
        """Call after forward passes without backward passes."""
        for part in self._sharded:
            part.after_evaluation()


def apply_data(
    root: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    precision: Precision = FP32,
    *,
    patterns: Patterns = DECODER,
    job: Job | None = None,
) -> DataParallel:
    """Puts a module, or each of the stages of this rank, under the data parallelism of the mesh's strategy.

    What ``patterns`` calls layers, else the largest list of equal blocks, is communicated one by one. Under expert
    parallelism the experts inside them may be divided over other ranks. ``job`` says by which collective gradients are
    summed, and on what network; without it, the backend's own is used.
    """
    roots = [root] if isinstance(root, nn.Module) else list(root)
    sums, strategy = GradientSums(mesh, job), mesh.strategy
    experts_apart = not (mesh.same("replicate", "expert_replicate") and mesh.same("shard", "expert_shard"))
    divided = mesh.size("shard") > 1 or (experts_apart and mesh.size("expert_shard") > 1)
    sharded = strategy.zero and (divided or strategy.offload.weights or strategy.offload.gradients)
    parts: dict[nn.Module, Sharded | Replicated] = {}
    for stage in roots:
        blocks = [module for _, module in matching(stage, patterns.layers)] or find_layers(stage)
        units = units_of(stage, blocks, patterns, experts_apart)
        if sharded:
            parts[stage] = Sharded(stage, units, mesh, precision, PREFETCH, sums)
        else:
            parts[stage] = Replicated(stage, units, mesh, precision, sums)
    return DataParallel(parts)
