"""FP8: casts against the formats' own rounding, layers against float64, layouts against one process."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from engine.fp8.cases import (
    PRECISIONS,
    SCALINGS,
    compiled_gradients,
    compiled_layers,
    counts,
    error,
    gradients_here,
    job_of,
    own_network,
    parts_here,
    trained,
    wide_bytes_in_use,
)
from engine.parity import check
from engine.workers import on_ranks
from shardwise.engine.fp8.apply import apply_fp8
from shardwise.engine.fp8.linear import ScaledProducts, fp8_cast, fp8_largest, fp8_product
from shardwise.engine.fp8.scaling import E4M3, E5M2, LARGEST, Form, cast, format_of
from shardwise.measure.verify import FP8_BOUNDS
from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import Adapters
from shardwise.spec.job import Job
from shardwise.spec.support import verdict

FAKE: dict[str, Any] = {"test_utils": "test_faketensor"}  # the others multiply what is returned, which FP8 cannot


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=random) * 9 + 1
    return (torch.randn(rows, columns, generator=random) * sizes).bfloat16()


def largest_of(one: Tensor, scaling: str) -> Tensor | None:
    return {"tensor": one.abs().amax().float(), "row": one.abs().amax(1).float(), "block": None}[scaling]


# -- casts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_element_is_off_by_the_formats_rounding(scaling: str, square: bool, dtype: torch.dtype) -> None:
    """Half of a unit in the last place, or half of the smallest step of its scale."""
    one = matrix(256, 384)
    form = cast(one, largest_of(one, scaling), scaling, dtype, square and scaling == "block")
    last_place, smallest = (2**-4, 2.0**-10) if dtype == E4M3 else (2**-3, 2.0**-17)
    wide, unit = one.float(), Form(torch.ones_like(form.values, dtype=torch.float32), form.scales, form.square).wide()
    assert ((form.wide() - wide).abs() <= (wide.abs() * last_place + smallest * unit) * 1.001).all()
    assert form.values.float().abs().max() <= LARGEST[dtype]
    if scaling != "row":  # a power of two leaves up to half of the range unused
        assert form.values.float().abs().max() == LARGEST[dtype]


def test_scales_of_rows_are_powers_of_two_and_zeros_have_one() -> None:
    one = matrix(64, 32)
    one[3] = 0
    form = cast(one, largest_of(one, "row"), "row", E4M3, False)
    assert torch.equal(form.scales.log2(), form.scales.log2().round())
    assert torch.equal(form.wide()[3], torch.zeros(32)) and torch.isfinite(form.scales).all()
    assert form.values.float().abs().amax(1)[:3].min() >= LARGEST[E4M3] / 2


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("stacked", [False, True])
def test_both_forms_of_several_matrices_are_those_of_the_whole(scaling: str, stacked: bool) -> None:
    some = [matrix(256, 128), matrix(256, 256, seed=1)]
    some = [one.T.contiguous() for one in some] if stacked else some
    whole = torch.cat(some, 0 if stacked else 1)
    largest: list[Tensor] = []
    if scaling == "tensor":
        largest = [whole.abs().amax().float()]
    elif scaling == "row":
        largest = list(fp8_largest(some, stacked))
        assert torch.equal(largest[0], whole.float().abs().amax(1))
        assert torch.equal(largest[1], whole.float().abs().amax(0))
    found = fp8_cast(some, largest, scaling, False, stacked, True, True)
    for values, scales, one in ((*found[:2], whole), (*found[2:], whole.T)):
        expected = cast(one, largest_of(one, scaling), scaling, E4M3, stacked and scaling == "block")
        assert torch.equal(values.float(), expected.values.float()) and torch.equal(scales, expected.scales)
        assert values.is_contiguous()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_operators_are_what_the_compiler_is_told(scaling: str) -> None:
    one = matrix(128, 256)
    largest = {"tensor": [one.abs().amax().float()], "row": list(fp8_largest([one], False)), "block": []}[scaling]
    for stacked in (False, True):
        torch.library.opcheck(fp8_cast, ([one], largest, scaling, False, stacked, True, True), **FAKE)
    values, scales, turned, turned_scales = fp8_cast([one], largest, scaling, False, False, True, False)
    assert turned.numel() == turned_scales.numel() == 0
    torch.library.opcheck(fp8_product, (values, scales, values, scales, False, torch.bfloat16, True), **FAKE)
    torch.library.opcheck(fp8_largest, ([one], False), **FAKE)


def test_gradients_of_tensor_scaling_have_the_wider_range() -> None:
    """Transformer Engine's hybrid; torchao's row-wise recipe and DeepSeek-V3 have e4m3 throughout."""
    assert [format_of(one, gradient=True) for one in SCALINGS] == [E5M2, E4M3, E4M3]
    assert all(format_of(one, gradient=False) == E4M3 for one in SCALINGS)


# -- layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_outputs_and_gradients_against_float64(scaling: str, cached: bool) -> None:
    """Rounding of e4m3 is 2.6% of an element on average, of two operands √2 times that; of e5m2 5.2%."""
    hidden = matrix(256, 384).view(2, 128, 384).requires_grad_()
    weights = [(matrix(width, 384, width) * 0.02).requires_grad_() for width in (256, 128)]
    gradients = [matrix(256, width, 7).view(2, 128, width) for width in (256, 128)]
    products = ScaledProducts(scaling)
    forms = [one.detach() for one in products.weight_forms(weights)] if cached else None
    outputs = products(hidden, weights, forms)
    torch.autograd.backward(outputs, gradients)
    rows, flat = hidden.detach().double().flatten(0, 1), [one.double().flatten(0, 1) for one in gradients]
    wide = [one.detach().double() for one in weights]
    in_e4m3, in_backward = 0.042, 0.066 if scaling == "tensor" else 0.042
    for output, weight, one in zip(outputs, wide, weights):
        assert 0.01 < error(output.flatten(0, 1).detach(), rows @ weight.T) < in_e4m3
        assert one.grad is not None
    assert hidden.grad is not None
    of_rows = flat[0] @ wide[0] + flat[1] @ wide[1]
    assert 0.01 < error(hidden.grad.flatten(0, 1), of_rows) < in_backward
    for one, gradient in zip(weights, flat):
        assert one.grad is not None and 0.01 < error(one.grad, gradient.T @ rows) < in_backward


def test_an_input_is_kept_in_one_byte() -> None:
    hidden, weight = matrix(256, 384).requires_grad_(), matrix(128, 384).requires_grad_()
    kept: list[Tensor] = []
    products = ScaledProducts("tensor")
    forms = [one.detach() for one in products.weight_forms([weight])]
    with saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        products(hidden, [weight], forms)
    of_weights = {one.data_ptr() for one in forms}
    assert sum(one.nbytes for one in kept if one.data_ptr() not in of_weights) == hidden.numel() + 4


# -- whole models ------------------------------------------------------------------------------------


@cache
def alone(precision: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """What one process computes."""
    (found,) = on_ranks(1, trained, job_of(precision))
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fp8_follows_bf16(precision: str) -> None:
    """Within the bounds that `verify` states, and not equal: something was rounded."""
    found, expected = alone(precision), alone("bf16")
    assert found[0] != expected[0]
    assert found[0] == pytest.approx(expected[0], rel=FP8_BOUNDS["loss"])
    assert found[1] == pytest.approx(expected[1], rel=FP8_BOUNDS["gradient_norm"])


LAYOUTS: list[tuple[str, dict[str, object]]] = [
    *(("fp8", {"dp": 2, "zero": zero}) for zero in (0, 1, 3)),
    *(("fp8", {"pp": 2, "schedule": schedule}) for schedule in ("1f1b", "zb-h1")),
    ("fp8-rowwise", {"dp": 2, "zero": 3}),
    ("fp8-blockwise", {"dp": 2, "zero": 3}),
    ("fp8-blockwise", {"pp": 2, "schedule": "1f1b"}),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("precision", "layout"), LAYOUTS, ids=str)
def test_a_layout_with_the_same_microbatches_computes_the_same(precision: str, layout: dict[str, object]) -> None:
    """Data parallelism and pipelines cut no matrix: scales are the same, and losses equal but for sums of gradients."""
    losses, norms, _ = alone(precision)
    for found in on_ranks(2, trained, job_of(precision, 2, **layout)):
        assert found[0][0] == pytest.approx(losses[0], rel=1e-6)
        assert found[0] == pytest.approx(losses, rel=1e-3)
        assert found[1] == pytest.approx(norms, rel=1e-2)


@pytest.mark.parametrize("kind", ["columns", "gathered columns", "rows"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_cut_layer_is_scaled_like_a_whole_one(scaling: str, kind: str) -> None:
    """Equal FP8 numbers on all ranks: what is left is the rounding of sums over ranks in bf16."""
    for found in on_ranks(2, parts_here, scaling, kind):
        summed = "output" if kind == "rows" else "of hidden"
        for name, off in found.items():
            assert off < (5e-3 if name == summed else 1e-6), (name, off)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("precision", "sequence_parallel"), [("fp8", True), ("fp8", False), ("fp8-rowwise", True)])
def test_tensor_parallelism_follows_one_process(precision: str, sequence_parallel: bool) -> None:
    losses, norms, _ = alone(precision)
    for found in on_ranks(2, trained, job_of(precision, 2, tp=2, sequence_parallel=sequence_parallel)):
        assert found[0] == pytest.approx(losses, rel=1e-3)
        assert found[1] == pytest.approx(norms, rel=2e-2)


LATENT = {"heads": 4, "mla": {"kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32, "q_rank": 64}}


def test_latent_attention_under_tensor_parallelism_follows_one_process() -> None:
    """Its up-projections are cut, but what enters them is summed by others."""
    ((losses, norms, _),) = on_ranks(1, trained, job_of("fp8", model=LATENT))
    for found in on_ranks(2, trained, job_of("fp8", 2, tp=2, model=LATENT)):
        assert found[0] == pytest.approx(losses, rel=1e-3)
        assert found[1] == pytest.approx(norms, rel=2e-2)


@pytest.mark.parametrize("strategy", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}], ids=str)
def test_a_network_of_others_follows_bf16(strategy: dict[str, object]) -> None:
    pytest.importorskip("transformers")
    ((losses, norms),) = on_ranks(1, own_network, "bf16", {})
    for found in on_ranks(2 if strategy else 1, own_network, "fp8", strategy):
        assert found[0] != losses and found[0] == pytest.approx(losses, rel=FP8_BOUNDS["loss"])
        assert found[1] == pytest.approx(norms, rel=FP8_BOUNDS["gradient_norm"])


@pytest.mark.parametrize("recompute", [{}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_weights_are_cast_once_a_step(recompute: dict[str, object]) -> None:
    """In neither the second microbatch nor a recomputed layer: four groups of layers that read one input, 2 layers."""
    ((first, second),) = on_ranks(1, counts, job_of("fp8", **recompute))
    assert first[0] == second[0] == 2 * 4
    matmuls = 2 * 2 * (7 + 4 + 4)  # microbatches, layers: outputs, input gradients, weight gradients
    assert first[2] == matmuls + (2 * 2 * 7 if recompute.get("recompute") == "full" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_multiply_in_fp8_too(recompute: str) -> None:
    """All of them, also those that a compiled bf16 layer would add to the residual path by one matmul."""
    ((losses, matmuls),) = on_ranks(1, compiled_layers, job_of("fp8", recompute=recompute))
    assert losses == pytest.approx(alone("fp8")[0], rel=1e-5)
    again = (6, 7) if recompute == "full" else (0,)  # nothing reads the last one's output again
    assert matmuls in [2 * 2 * (7 + 4 + 4 + one) for one in again]


@pytest.mark.slow
def test_weight_gradients_are_the_matmuls_sums_in_fp32() -> None:
    """Compiled or not, over two microbatches: nothing rounds them to bf16 on their way."""
    ((_, expected, *_),) = on_ranks(1, gradients_here, job_of("fp8"))
    (found,) = on_ranks(1, compiled_gradients, job_of("fp8"))
    assert list(found) == list(expected)
    for name, one in found.items():
        assert one.dtype == torch.float32 and error(one, expected[name]) < 1e-4, name
        if ".attention." in name or ".mlp." in name:
            assert (one != one.bfloat16().float()).float().mean() > 0.9, name


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_nothing(recompute: str) -> None:
    losses, norms, weights = alone("fp8")
    ((found, found_norms, found_weights),) = on_ranks(1, trained, job_of("fp8", recompute=recompute))
    assert found == losses and found_norms == norms
    assert all(torch.equal(one, found_weights[name]) for name, one in weights.items())


def test_routed_experts_stay_in_bf16() -> None:
    """Per layer, FP8 has query, key and value together, output, the shared expert's gate and up together, down."""
    experts = {"moe": {"experts": 4, "top_k": 2, "ffn": 128, "shared_ffn": 128}}
    ((first, _),) = on_ranks(1, counts, job_of("fp8-blockwise", model=experts))
    assert first == (2 * 4, 2 * 2 * (4 + 4), 2 * 2 * (7 + 4 + 4))


# -- adapters ----------------------------------------------------------------------------------------


def adapted(job: Job) -> Job:
    return replace(job, training=replace(job.training, adapters=Adapters(rank=4, alpha=8)))


def test_frozen_weights_are_cast_once_and_have_no_weight_products() -> None:
    """Below the first layer's adapters nothing needs a gradient: one group of layers there has no backward pass."""
    ((first, second),) = on_ranks(1, counts, adapted(job_of("fp8")))
    assert first == (2 * 4, *second[1:])
    assert second == (0, 2 * (2 * (4 + 4) - 1), 2 * (2 * (7 + 4) - 1))


def test_of_frozen_weights_only_the_casts_are_kept() -> None:
    assert on_ranks(1, wide_bytes_in_use, adapted(job_of("fp8"))) == [0] < on_ranks(1, wide_bytes_in_use, job_of("fp8"))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("precision", "strategy"),
    [
        ("fp8", {"tp": 2, "sequence_parallel": True, "dp": 2}),
        ("fp8-blockwise", {"dp": 2, "zero": 3}),
        ("fp8-delayed", {"pp": 2, "schedule": "1f1b"}),
        ("fp8-rowwise", {"tp": 2, "recompute": "full"}),
        ("fp8", {"dp": 2, "zero": 3, "recompute": "selective"}),
        ("fp8-delayed", {"tp": 2, "dp": 2, "zero": 1}),
    ],
)
def test_adapters_beside_fp8_layers_equal_one_process(precision: str, strategy: dict[str, Any]) -> None:
    check(
        adapted(job_of(precision, math.prod(strategy.get(each, 1) for each in ("tp", "dp", "pp")), **strategy)), steps=2
    )


# -- refused -----------------------------------------------------------------------------------------


def test_widths_that_blocks_do_not_divide_are_refused() -> None:
    for precision, width, status in (("fp8", 264, "refused"), ("fp8", 272, "runs"), ("fp8-blockwise", 272, "refused")):
        assert verdict(job_of(precision, model={"ffn": width})).status == status
    assert verdict(job_of("fp8-blockwise")).status == "runs"
    assert verdict(job_of("fp8-blockwise", microbatch=2)).status == "refused"  # 64 tokens


def test_other_networks_are_refused() -> None:
    """Without a table of their layers, or with weights that are kept transposed."""
    from shardwise.engine.mesh import Mesh
    from shardwise.engine.patterns import Patterns
    from shardwise.spec.strategy import Strategy

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32, 16))

    network = nn.ModuleDict({"layer": nn.ModuleDict({"a": Conv1D()})})
    table = Patterns("layer", "", "", "", (), columns={"layer.a": ""})
    alone = Mesh(Strategy(), "cpu", dict.fromkeys(("tp", "shard"), ((0,),)), {})
    with pytest.raises(SpecError, match="no table names the linear layers of ModuleDict"):
        apply_fp8(network, alone, Patterns("layer", "", "", "", ()), "tensor")
    with pytest.raises(SpecError, match="Conv1D keeps its weight transposed"):
        apply_fp8(network, alone, table, "tensor")
