"""Which linear layers of a network are multiplied in FP8, and the FP8 forms of their weights, cast once a step.

Those that the table of a network names in its layers are: projections of attention and MLP, latent ones too. Embedding,
head, norms, routers, the attention core and routed experts stay in bf16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.fp8.delayed import DelayedLargest, DelayedScaling
from shardwise.engine.fp8.gathers import GatheredWeight, GatherScales, WeightsTogether, drop_wide_weights
from shardwise.engine.fp8.linear import Entry, ScaledProducts
from shardwise.engine.fp8.scaling import BLOCK
from shardwise.engine.fp8.stand_ins import stand_in, takes_wide_gradients
from shardwise.engine.mesh import Mesh
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.tensor.linear import RowLinear, is_linear
from shardwise.layout.sharding import gathers_in_fp8
from shardwise.spec.errors import SpecError

_logger = logging.getLogger("shardwise.engine")
_CASTS = "fp8_weights"


class WeightsInFp8:
    """Linear layers of one input, and the FP8 forms of their weights, while these do not change.

    The layer that they are in asks for the forms before it runs: then neither another microbatch nor a recomputed
    layer casts them again. Weights that are gathered in bf16 for every use are cast for every use; those that come in
    FP8 (``gathered``) are used as they are.
    """

    def __init__(self, layers: Sequence[Any], products: ScaledProducts) -> None:
        self.layers, self.products = tuple(layers), products
        self.forms: list[Tensor] | None = None
        self.gathered: tuple[GatheredWeight, ...] = ()
        self.delayed: DelayedLargest | None = None  # else scales are current
        self.has_wide_gradients = False
        self.stand_ins: list[Tensor] = []  # for the weights in compiled layers, if it has

    def __call__(self, hidden: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        outputs = self._outputs(hidden, [one.weight for one in layers])
        return tuple(one if layer.bias is None else one + layer.bias for one, layer in zip(outputs, layers))

    def one(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """The output of a single layer, without its bias."""
        return self._outputs(hidden, [weight])[0]

    def _outputs(self, hidden: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        here = [one.form for one in self.gathered] if self.gathered else None
        if self.has_wide_gradients and torch.compiler.is_compiling():
            weights = self.stand_ins
        return self.products(hidden, weights, self.forms, here, self.delayed, wide_gradients=self.has_wide_gradients)

    @torch.no_grad()
    def cast(self) -> None:
        """Makes the forms, unless they are there."""
        if self.forms is None:
            self.forms = self.products.weight_forms([one.weight for one in self.layers])


def apply_fp8(stage: nn.Module, mesh: Mesh, patterns: Patterns, scaling: str) -> None:
    """Multiplies the linear layers of a stage in FP8, in place; nothing without a ``scaling``.

    After tensor parallelism has cut them, before recompute and compilation.
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
    found = _named(stage, (*patterns.columns, *patterns.fused), ScaledProducts(scaling, outputs_over=group))
    found |= _named(stage, patterns.rows, ScaledProducts(scaling, inputs_over=group))
    found |= _named(stage, patterns.headless, ScaledProducts(scaling), BLOCK if scaling == "block" else 1)
    entry: Entry = "" if group is None else "gathered" if strategy.sequence_parallel else "copied"
    if any(True for _ in matching(stage, patterns.experts)):
        _logger.info("routed experts stay in bf16: only the other linear layers are multiplied in FP8")
    for _, layer in matching(stage, patterns.layers):
        casts = list(_of_layer(layer, found, ScaledProducts(scaling, outputs_over=group, entry=entry)))
        setattr(layer, _CASTS, casts)
        if kept:
            layer.register_forward_pre_hook(_cast_before)
        elif gathers_in_fp8(strategy, scaling):
            layer.register_forward_pre_hook(_drop_before)


def _named(
    stage: nn.Module, names: Iterable[str], products: ScaledProducts, unit: int = 1
) -> dict[nn.Module, ScaledProducts]:
    """Linear layers; of latent ones those whose widths are multiples of ``unit``, the others stay in bf16."""
    found = [one for name in names for _, one in matching(stage, name) if is_linear(one) or isinstance(one, RowLinear)]
    return {one: products for one in found if all(width % unit == 0 for width in one.weight.shape)}  # type: ignore[union-attr]


def _of_layer(
    layer: nn.Module, found: dict[nn.Module, ScaledProducts], of_projections: ScaledProducts
) -> Iterable[WeightsInFp8]:
    together = set()
    region: Any
    for region in layer.modules():
        maps = region.projections() if hasattr(region, "projections") else ()
        if maps:
            casts = WeightsInFp8(maps, of_projections)
            region.project = casts
            together.update(maps)
            yield casts
    for one in layer.modules():
        if one in found and one not in together:
            yield _alone(one, found[one])


def _alone(linear: Any, products: ScaledProducts) -> WeightsInFp8:
    if getattr(linear, "transposed", False) or not isinstance(linear, nn.Linear | RowLinear):
        problem = f"{type(linear).__name__} keeps its weight transposed, which is not cast to FP8"
        raise SpecError("training.precision", problem, "precision: bf16")
    casts = WeightsInFp8([linear], products)
    if isinstance(linear, RowLinear):
        linear.multiply = casts.one
    else:
        plain: Any = linear
        plain.forward = lambda hidden: casts(hidden, plain)[0]
    return casts


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as FSDP's hooks are
def _cast_before(layer: nn.Module, arguments: Any) -> None:
    for one in getattr(layer, _CASTS):
        one.cast()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drop_before(layer: nn.Module, arguments: Any) -> None:
    for one in getattr(layer, _CASTS):
        if one.gathered:
            drop_wide_weights(one.layers)


def gather_in_fp8(stage: nn.Module, group: dist.ProcessGroup) -> GatherScales:
    """Weights of a stage under `fully_shard` are gathered in FP8 from now on; their scales are still to be found."""
    together = []
    for one in weights_in_fp8([stage]):
        products = one.products
        one.gathered = tuple(GatheredWeight(layer.weight, products.scaling, group) for layer in one.layers)
        together.append(WeightsTogether(one.gathered, products.inputs_over or products.outputs_over))
    return GatherScales(together, group)


def weights_in_fp8(stages: Iterable[nn.Module]) -> list[WeightsInFp8]:
    """Of all layers that `apply_fp8` has found."""
    return [one for stage in stages for layer in stage.modules() for one in getattr(layer, _CASTS, ())]


def widen_gradients(casts: Iterable[WeightsInFp8]) -> None:
    """Matmuls make gradients of weights in fp32 where these are accumulated so."""
    for one in casts:
        weights = [layer.weight for layer in one.layers]
        if all(takes_wide_gradients(weight) for weight in weights):
            one.has_wide_gradients, one.stand_ins = True, [stand_in(weight) for weight in weights]


def delay_scaling(casts: Sequence[WeightsInFp8], device: torch.device) -> DelayedScaling:
    """Casts of inputs and gradients by the largest elements of earlier steps."""
    scaling = DelayedScaling(len(casts), device)
    for number, one in enumerate(casts):
        one.delayed = scaling.of(number)
    return scaling


def require_device(device: str, scaling: str) -> None:
    """Raises SpecError if the installed PyTorch or the GPU has no such matmul; a CPU emulates all of them."""
    if device != "cuda":
        return
    found = torch.cuda.get_device_capability()
    # Block scales are cuBLAS's, for Hopper alone (ATen/native/cuda/ScaledBlas.cpp, _check_deepseek_support).
    if found < (8, 9) or (scaling == "block" and found != (9, 0)):
        wanted = "a Hopper GPU" if scaling == "block" else "a GPU of compute capability 8.9"
        problem = f"{scaling} scaling in FP8 needs {wanted}, and this one's is {found[0]}.{found[1]}"
        raise SpecError("training.precision", problem, "precision: bf16")
    if not hasattr(torch.nn.functional, "scaled_mm"):
        problem = f"PyTorch {torch.__version__} has no torch.nn.functional.scaled_mm"
        raise SpecError("training.precision", problem, "PyTorch 2.11 or newer, or precision: bf16")
