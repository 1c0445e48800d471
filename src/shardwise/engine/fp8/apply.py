"""Which linear layers of a network are multiplied in FP8, and the FP8 forms of their weights, cast once a step.

In FP8 are the linear layers that the network's table names: projections of attention and MLP, including latent ones.
Embedding, head, norms, routers, the attention core and routed experts stay in bf16.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.fp8.linear import DelayedLargest, DelayedScaling, Entry, Group, ScaledProducts
from shardwise.engine.fp8.scaling import BLOCK, E4M3, LARGEST, SMALLEST, Form
from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.tensor.linear import RowLinear, is_linear, narrow_move
from shardwise.engine.torch_private import local_shard
from shardwise.layout.sharding import gathers_in_fp8
from shardwise.models.adapters import Move, adapter_of, with_adapters
from shardwise.models.mlp import as_they_are
from shardwise.spec.errors import SpecError

# -- Weights that ZeRO-3 gathers in FP8, one byte per element ---------------------------------------
# A rank casts its shard by the scales of the whole weight. `fully_shard` asks a shard what to send
# (``fsdp_pre_all_gather``) and hands it what has arrived (``fsdp_post_all_gather``). The scales need the largest
# elements of all shards, on which ranks agree once a step, for all weights together; so the FP8 numbers are those of an
# undivided weight. With row scaling the two forms of a weight are different numbers: both together would take as many
# bytes as the weight in bf16, which is gathered instead.


class GatheredWeight:
    """One weight: its shard on this rank, the scales of the whole, and the whole in FP8 while it is gathered.

    The parameter that layers see has no memory: only its shape and its gradient are used.
    """

    def __init__(self, parameter: Any, scaling: str, group: dist.ProcessGroup) -> None:
        rows, columns = parameter.shape
        self.scaling, self.shape = scaling, (rows, columns)
        self.padded_rows = -(-rows // group.size())
        self.first_row = min(rows, group.rank() * self.padded_rows)
        self.values: Tensor | None = None
        shard = local_shard(parameter)
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        self.inverse = torch.ones(blocks if scaling == "block" else (), device=shard.device)
        self._shard = weakref.ref(shard)
        shard.fsdp_pre_all_gather = self._to_send
        shard.fsdp_post_all_gather = self._arrived

    def largest(self) -> Tensor:
        """The largest element of this rank's rows, or of its part of each block."""
        shard = self._narrow()
        if self.scaling == "tensor":
            return shard.abs().amax().float().view(1) if shard.numel() else self.inverse.new_zeros(1)
        table = self.inverse.new_zeros(self.inverse.shape)
        of_rows = F.pad(shard, (0, -shard.shape[1] % BLOCK)).view(len(shard), -1, BLOCK).abs().amax(-1).float()
        return table.scatter_reduce_(0, self._blocks_of_rows()[:, None].expand_as(of_rows), of_rows, "amax").flatten()

    def scale_by(self, largest: Tensor) -> None:
        """Sets the scales from the maximum over all ranks of what `largest` returns."""
        self.inverse.copy_((LARGEST[E4M3] / largest.clamp(min=SMALLEST)).view(self.inverse.shape))

    @property
    def form(self) -> Form:
        """Of the whole weight, while it is gathered."""
        assert self.values is not None
        scales, square = self.inverse.reciprocal(), self.scaling == "block"
        return Form(self.values, F.pad(scales, (0, -scales.shape[1] % 4)) if square else scales, square)

    @property
    def _held(self) -> Tensor:
        shard: Tensor | None = self._shard()
        assert shard is not None
        return shard

    def _narrow(self) -> Tensor:
        """The shard as it is computed with: rounded to bf16."""
        return self._held.detach().bfloat16()

    def _blocks_of_rows(self) -> Tensor:
        held = self._held
        rows: Tensor = self.first_row + torch.arange(len(held), device=held.device)
        return rows // BLOCK

    def _to_send(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], None]:
        wide = self._narrow().float()
        inverse = self.inverse
        if self.scaling == "block":
            inverse = inverse[self._blocks_of_rows()].repeat_interleave(BLOCK, 1)[:, : wide.shape[1]]
        values = (wide * inverse).clamp_(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3)
        if len(values) < self.padded_rows:
            whole = values.new_zeros((self.padded_rows, self.shape[1]))
            whole[: len(values)] = values
            values = whole
        return (values,), None

    def _arrived(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        self.values = gathered[0][: self.shape[0]]
        if out is not None:
            return None
        return torch.empty(self.shape, dtype=dtype, device=gathered[0].device), ()


class WeightsTogether(NamedTuple):
    """Weights that read the same input; with tensor scaling they share a scale."""

    weights: tuple[GatheredWeight, ...]
    cut_over: Group  # the tensor-parallel ranks that they are cut over


class GatherScales:
    """Finds the scales of all gathered weights of a rank, once a step: one all-reduce over the shards."""

    def __init__(self, together: Sequence[WeightsTogether], group: dist.ProcessGroup) -> None:
        self.together, self.group = together, group

    @torch.no_grad()
    def find(self) -> None:
        weights = [weight for some in self.together for weight in some.weights]
        tables = [weight.largest() for weight in weights]
        flat = torch.cat(tables)
        with sent("dp", Called.LARGEST_WEIGHTS, flat):
            dist.all_reduce(flat, dist.ReduceOp.MAX, self.group)
        largest = dict(zip(weights, torch.split(flat, [len(table) for table in tables])))
        for some in self.together:
            for weight in some.weights if some.weights[0].scaling == "block" else ():
                weight.scale_by(largest[weight])
            if some.weights[0].scaling == "tensor":
                most = torch.stack([largest[weight] for weight in some.weights]).amax(0)
                if some.cut_over is not None:
                    dist.all_reduce(most, dist.ReduceOp.MAX, some.cut_over)
                for weight in some.weights:
                    weight.scale_by(most)


def drop_wide_weights(layers: Iterable[nn.Module]) -> None:
    """Frees the memory of weights whose wide values nothing reads."""
    for layer in layers:
        storage = layer.weight.untyped_storage()  # type: ignore[operator]
        if storage.nbytes():
            storage.resize_(0)


# -- Which layers are multiplied in FP8 ------------------------------------------------------------

_logger = logging.getLogger("shardwise.engine")
_CASTS = "fp8_weights"


class WeightsInFp8:
    """Linear layers that read the same input, and the FP8 forms of their weights until these change.

    The decoder layer around them has the forms made before it runs, so that neither another microbatch nor a recomputed
    layer casts them again. Weights that are gathered in bf16 for every use are cast for every use; those that are
    gathered in FP8 (``gathered``) are used as they are.
    """

    def __init__(self, layers: Sequence[Any], products: ScaledProducts, move: Move = as_they_are) -> None:
        self.layers, self.products = tuple(layers), products
        self.move = move  # the narrow vectors of adapters, to where the layers multiply
        self.is_trained = any(layer.weight.requires_grad for layer in self.layers)
        self.forms: list[Tensor] | None = None
        self.gathered: tuple[GatheredWeight, ...] = ()
        self.delayed: DelayedLargest | None = None  # None: scales are current
        self.has_wide_gradients = False
        self.stand_ins: list[Tensor] = []  # for the weights in compiled layers, if gradients are wide

    def __call__(self, hidden: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        outputs = self._outputs(hidden, [layer.weight for layer in layers])
        if any(map(adapter_of, layers)):
            return with_adapters(outputs, hidden, layers, self.move)
        return tuple(output if layer.bias is None else output + layer.bias for output, layer in zip(outputs, layers))

    def single(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """The output of a single layer, without its bias."""
        return self._outputs(hidden, [weight])[0]

    def _outputs(self, hidden: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        here = [weight.form for weight in self.gathered] if self.gathered else None
        if self.has_wide_gradients and torch.compiler.is_compiling():
            weights = self.stand_ins
        return self.products(hidden, weights, self.forms, here, self.delayed, wide_gradients=self.has_wide_gradients)

    @torch.no_grad()
    def cast(self) -> None:
        """Makes the forms, unless they are there; of frozen weights nothing else is read from then on."""
        if self.forms is None:
            self.forms = self.products.weight_forms([layer.weight for layer in self.layers])
            if not self.is_trained:
                drop_wide_weights(self.layers)


def apply_fp8(stage: nn.Module, mesh: Mesh, patterns: Patterns, scaling: str) -> None:
    """Makes the linear layers of a stage multiply in FP8; does nothing without a ``scaling``.

    Call after tensor parallelism has cut the layers, and before recompute and compilation.
    """
    if not scaling:
        return
    require_device(mesh.device, scaling)
    if not (patterns.columns or patterns.fused or patterns.rows):
        problem = f"no table names the linear layers of {type(stage).__name__}, which FP8 is for"
        raise SpecError("training.precision", problem, "pass patterns=, or precision: bf16")
    strategy = mesh.strategy
    divided = mesh.size("shard") > 1 or strategy.offload.weights or strategy.offload.gradients
    kept = strategy.zero < 3 or strategy.keep_parameters or not divided
    group = mesh.group("tp") if mesh.size("tp") > 1 else None
    products = _named(stage, (*patterns.columns, *patterns.fused), ScaledProducts(scaling, outputs_over=group))
    products |= _named(stage, patterns.rows, ScaledProducts(scaling, inputs_over=group))
    products |= _named(stage, patterns.headless, ScaledProducts(scaling), BLOCK if scaling == "block" else 1)
    entry: Entry = "" if group is None else "gathered" if strategy.sequence_parallel else "copied"
    if any(True for _ in matching(stage, patterns.experts)):
        _logger.info("routed experts stay in bf16: only the other linear layers are multiplied in FP8")
    for _, layer in matching(stage, patterns.layers):
        of_projections = ScaledProducts(scaling, outputs_over=group, entry=entry)
        move = as_they_are if group is None else narrow_move(group, strategy.sequence_parallel)
        casts = list(_of_layer(layer, products, of_projections, move))
        setattr(layer, _CASTS, casts)
        if kept:
            layer.register_forward_pre_hook(_cast_before)
        elif gathers_in_fp8(strategy, scaling):
            layer.register_forward_pre_hook(_drop_before)


def _named(
    stage: nn.Module, names: Iterable[str], products: ScaledProducts, unit: int = 1
) -> dict[nn.Module, ScaledProducts]:
    """The linear layers that ``names`` match, if their widths are multiples of ``unit``; others stay in bf16."""
    layers = [
        layer
        for name in names
        for _, layer in matching(stage, name)
        if is_linear(layer) or isinstance(layer, RowLinear)
    ]
    return {layer: products for layer in layers if all(width % unit == 0 for width in layer.weight.shape)}  # type: ignore[union-attr]


def _of_layer(
    layer: nn.Module, products: dict[nn.Module, ScaledProducts], of_projections: ScaledProducts, move: Move
) -> Iterable[WeightsInFp8]:
    together = set()
    region: Any
    for region in layer.modules():
        maps = region.projections() if hasattr(region, "projections") else ()
        if maps:
            casts = WeightsInFp8(maps, of_projections, move)
            region.project = casts
            together.update(maps)
            yield casts
    for module in layer.modules():
        if module in products and module not in together:
            yield _alone(module, products[module])


def _alone(linear: Any, products: ScaledProducts) -> WeightsInFp8:
    if getattr(linear, "transposed", False) or not isinstance(linear, nn.Linear | RowLinear):
        problem = f"{type(linear).__name__} keeps its weight transposed, which is not cast to FP8"
        raise SpecError("training.precision", problem, "precision: bf16")
    casts = WeightsInFp8([linear], products)
    if isinstance(linear, RowLinear):
        linear.multiply = casts.single
    else:
        plain: Any = linear
        plain.forward = lambda hidden: casts(hidden, plain)[0]
    return casts


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as FSDP's hooks are
def _cast_before(layer: nn.Module, arguments: Any) -> None:
    for cast in getattr(layer, _CASTS):
        cast.cast()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drop_before(layer: nn.Module, arguments: Any) -> None:
    for cast in getattr(layer, _CASTS):
        if cast.gathered:
            drop_wide_weights(cast.layers)


def gather_in_fp8(stage: nn.Module, group: dist.ProcessGroup) -> GatherScales:
    """Gathers the weights of a stage under `fully_shard` in FP8 from now on; call `find` on the result every step."""
    together = []
    for cast in weights_in_fp8([stage]):
        products = cast.products
        cast.gathered = tuple(GatheredWeight(layer.weight, products.scaling, group) for layer in cast.layers)
        together.append(WeightsTogether(cast.gathered, products.inputs_over or products.outputs_over))
    return GatherScales(together, group)


def weights_in_fp8(stages: Iterable[nn.Module]) -> list[WeightsInFp8]:
    """The FP8 weights of all layers that `apply_fp8` has changed."""
    return [cast for stage in stages for layer in stage.modules() for cast in getattr(layer, _CASTS, ())]


def widen_gradients(casts: Iterable[WeightsInFp8]) -> None:
    """Makes matmuls write weight gradients in fp32 where they are accumulated in fp32."""
    for cast in casts:
        weights = [layer.weight for layer in cast.layers]
        if cast.is_trained and all(takes_wide_gradients(weight) for weight in weights):
            cast.has_wide_gradients, cast.stand_ins = True, [stand_in(weight) for weight in weights]


def delay_scaling(casts: Sequence[WeightsInFp8], device: torch.device) -> DelayedScaling:
    """Scales inputs and gradients by the largest elements of earlier steps from now on."""
    scaling = DelayedScaling(len(casts), device)
    for number, cast in enumerate(casts):
        cast.delayed = scaling.of(number)
    return scaling


def require_device(device: str, scaling: str) -> None:
    """Raises SpecError if the installed PyTorch or the GPU has no such matmul; a CPU emulates all of them."""
    if device != "cuda":
        return
    capability = torch.cuda.get_device_capability()
    # Block scales are cuBLAS's, for Hopper alone (ATen/native/cuda/ScaledBlas.cpp, _check_deepseek_support).
    if capability < (8, 9) or (scaling == "block" and capability != (9, 0)):
        wanted = "a Hopper GPU" if scaling == "block" else "a GPU of compute capability 8.9"
        problem = f"{scaling} scaling in FP8 needs {wanted}, and this one's is {capability[0]}.{capability[1]}"
        raise SpecError("training.precision", problem, "precision: bf16")
    if not hasattr(torch.nn.functional, "scaled_mm"):
        problem = f"PyTorch {torch.__version__} has no torch.nn.functional.scaled_mm"
        raise SpecError("training.precision", problem, "PyTorch 2.11 or newer, or precision: bf16")


# -- Weight gradients of compiled layers in fp32, as the matmul sums them --------------------------
# A compiled layer rounds the gradient of a bf16 weight to bf16, and autograd widens it again to accumulate it in fp32:
# a useless pass over every gradient. Matmuls of FP8 forms do not read the weight itself. So in compiled layers an fp32
# leaf without memory of its own takes its place, and hands its gradient over to the weight.


def takes_wide_gradients(parameter: Tensor) -> bool:
    """Whether gradients of a 16-bit parameter are accumulated in fp32, by the parameter itself."""
    return parameter.is_leaf and parameter.dtype != torch.float32 and parameter.grad_dtype == torch.float32


def stand_in(parameter: nn.Parameter) -> Tensor:
    """A leaf of the same shape, all of whose elements are one zero; its gradient is handed over."""
    leaf = torch.zeros((), dtype=torch.float32, device=parameter.device).expand(parameter.shape).requires_grad_()

    def hand_over(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    leaf.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return leaf
