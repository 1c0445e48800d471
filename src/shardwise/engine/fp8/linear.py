"""Linear layers in FP8: forward pass, input gradient and weight gradient are each a matmul of FP8 forms.

Layers that read the same input are multiplied together: it is cast once, and their input gradients are one matmul. For
the backward pass the input is kept turned, in FP8: one byte per element.

With delayed scaling, inputs and gradients are cast by the largest elements of earlier steps, not by their own: as
Transformer Engine's ``DelayedScaling`` (common/recipe: a history of 1024 steps, its maximum, no margin), which
Megatron-LM trains with unless another recipe is named. A tensor without a history, in the first step, is scaled by its
own elements. So are weights, which are cast once a step anyway. What exceeds its history saturates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.autograd import defer, is_deferring, may_defer
from shardwise.engine.fp8.scaling import BLOCK, Form, cast, format_of, scale_shape, whole_matrix, whole_shape
from shardwise.engine.tensor.linear import start_gather, start_scatter, start_sum

# -- Casts and matmuls as operators that the compiler and recompute see as one ---------------------
# They are kernels on a GPU, elsewhere emulated: an emulated matmul multiplies the same FP8 numbers in fp32, so that a
# CPU computes what a GPU does but for the order of additions.

Both = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("shardwise::fp8_cast", mutates_args=())
def fp8_cast(
    parts: Sequence[Tensor], largest: Sequence[Tensor], scaling: str, gradient: bool, stacked: bool, plain: bool,
    turned: bool,
) -> Both:  # fmt: skip
    """Values and scales of the plain and the turned form of matrices side by side, or of weights ``stacked``.

    ``largest`` is the result of `fp8_largest`, the largest of all for tensor scaling, or empty for block scaling.
    """
    dtype = format_of(scaling, gradient)
    if parts[0].is_cuda:
        from shardwise.engine.fp8.kernels import cast_forms

        return cast_forms(parts, largest, scaling, dtype, stacked, plain, turned)
    matrix = whole_matrix(parts, stacked)
    by_row, by_column = [*largest, *largest][:2] if largest else (None, None)
    forms: list[Tensor] = []
    for wanted, source, most in ((plain, matrix, by_row), (turned, matrix.T, by_column)):
        form = cast(source, most, scaling, dtype, stacked) if wanted else None
        forms += [form.values, form.scales] if form else [source.new_empty((0, 0), dtype=dtype), _no_scales(source)]
    values, scales, values_turned, scales_turned = forms
    return values, scales, values_turned, scales_turned


@fp8_cast.register_fake
def _(
    parts: Sequence[Tensor], largest: Sequence[Tensor], scaling: str, gradient: bool, stacked: bool, plain: bool,
    turned: bool,
) -> Both:  # fmt: skip
    first, dtype = parts[0], format_of(scaling, gradient)
    rows, columns = whole_shape(parts, stacked)
    outputs = []
    for wanted, shape in ((plain, (rows, columns)), (turned, (columns, rows))):
        outputs.append(first.new_empty(shape if wanted else (0, 0), dtype=dtype))
        of_scales = scale_shape(*shape, scaling, stacked)
        outputs.append(first.new_empty(of_scales, dtype=torch.float32) if wanted else _no_scales(first))
    values, scales, values_turned, scales_turned = outputs
    return values, scales, values_turned, scales_turned


def _no_scales(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.float32)


@torch.library.custom_op("shardwise::fp8_largest", mutates_args=())
def fp8_largest(parts: Sequence[Tensor], stacked: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each row and of each column, in one reading."""
    if parts[0].is_cuda:
        from shardwise.engine.fp8.kernels import largest_of

        return largest_of(parts, stacked)
    sizes = whole_matrix(parts, stacked).abs().float()
    return sizes.amax(1), sizes.amax(0)


@fp8_largest.register_fake
def _(parts: Sequence[Tensor], stacked: bool) -> tuple[Tensor, Tensor]:
    rows, columns = (parts[0].new_empty(size, dtype=torch.float32) for size in whole_shape(parts, stacked))
    return rows, columns


@torch.library.custom_op("shardwise::fp8_turned", mutates_args=())
def fp8_turned(values: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The turned form of stacked weights from the plain form of each, where both are the same numbers.

    This is so if all elements share a scale, or if blocks are square.
    """
    rows = torch.cat([part.view(torch.uint8) for part in values])  # bytes, since few operators know FP8
    turned = rows.T.contiguous().view(values[0].dtype)
    if scales[0].dim() == 0:
        return turned, scales[0].clone()
    blocks = -(-values[0].shape[1] // BLOCK)
    table = torch.cat([part[:, :blocks] for part in scales]).T
    return turned, F.pad(table, (0, -table.shape[1] % 4)).contiguous()


@fp8_turned.register_fake
def _(values: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    rows, columns = sum(part.shape[0] for part in values), values[0].shape[1]
    turned = values[0].new_empty((columns, rows))
    if scales[0].dim() == 0:
        return turned, torch.empty_like(scales[0])
    return turned, scales[0].new_empty(scale_shape(columns, rows, "block", True))


def product(left: Form, right: Form, dtype: torch.dtype, fast: bool) -> Tensor:
    """``left`` times the transpose of ``right``: sums along the rows of both.

    ``fast``: partial sums stay in the tensor cores' registers of 14 bits, which is accurate enough for a forward pass
    (Transformer Engine and torchao do the same), but not for gradients.
    """
    result: Tensor = fp8_product(left.values, left.scales, right.values, right.scales, right.square, dtype, fast)
    return result


@torch.library.custom_op("shardwise::fp8_product", mutates_args=())
def fp8_product(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, square: bool, dtype: torch.dtype, fast: bool
) -> Tensor:
    if not left.is_cuda:
        return (Form(left, left_scales).wide() @ Form(right, right_scales, square).wide().T).to(dtype)
    kinds = F.ScalingType
    of_left = of_right = kinds.TensorWise
    if left_scales.dim() == 1:
        of_left = of_right = kinds.RowWise
        left_scales, right_scales = left_scales[:, None], right_scales[None, :]
    elif left_scales.dim() == 2:
        of_left, of_right = kinds.BlockWise1x128, kinds.BlockWise128x128 if square else kinds.BlockWise1x128
        left_scales, right_scales = left_scales.T, right_scales.T
        fast = False  # blocks are added up in fp32
    return F.scaled_mm(
        left, right.T, left_scales, of_left, right_scales, of_right, output_dtype=dtype, use_fast_accum=fast
    )


@fp8_product.register_fake
def _(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, square: bool, dtype: torch.dtype, fast: bool
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=dtype)


# -- Layers of these operators ---------------------------------------------------------------------

HISTORY = 1024  # steps
INPUTS, GRADIENTS = 0, 1


class DelayedScaling:
    """The histories of a rank: for each group of linear layers that share an input, those of input and gradient.

    The newest step comes first. Ranks that hold the same layers have the same histories.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.history = torch.zeros(count, 2, HISTORY, device=device)
        self.kept = torch.zeros(count, 2, device=device)  # the maximum of each history
        self.seen = torch.zeros(count, 2, device=device)  # the maximum in this step

    def of(self, number: int) -> DelayedLargest:
        return DelayedLargest(self.kept[number], self.seen[number])

    @torch.no_grad()
    def begin_step(self) -> None:
        self.kept.copy_(self.history.amax(-1))
        self.seen.zero_()

    @torch.no_grad()
    def end_step(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Adds this step to the histories; ``groups`` of ranks compute parts of the same step with the same layers."""
        for group in groups:
            dist.all_reduce(self.seen, dist.ReduceOp.MAX, group)
        finite = torch.isfinite(self.seen)
        self.history.copy_(self.history.roll(1, -1))
        self.history[..., 0] = self.seen.masked_fill(~finite, 0.0)


class DelayedLargest:
    """What the tensors of one group of layers are cast by."""

    def __init__(self, kept: Tensor, seen: Tensor) -> None:
        self.kept, self.seen = kept, seen

    def __call__(self, which: int, own: Tensor, is_trained: bool = True) -> Tensor:
        """The largest element to scale by: from the history, or the tensor's ``own`` while there is none.

        ``own`` is added to this step's maximum if ``is_trained``.
        """
        if is_trained:
            self.seen[which] = torch.maximum(self.seen[which], own)
        kept = self.kept[which]
        return torch.where(kept > 0, kept, own)


Group = dist.ProcessGroup | None
Entry = Literal["", "copied", "gathered"]


@dataclass(frozen=True)
class ScaledProducts:
    """How layers that read the same input are multiplied. Ranks scale as one that held the undivided layers would."""

    scaling: str
    inputs_over: Group = None  # the tensor-parallel ranks that the layers' inputs are cut over
    outputs_over: Group = None  # the tensor-parallel ranks that their outputs are cut over
    entry: Entry = ""
    """How hidden states enter layers that are cut by their outputs, unless something else takes care of it: "copied",
    with gradients summed over the ranks, or "gathered" from parts of the sequence."""

    def weight_forms(self, weights: Sequence[Tensor], plain: bool = True, turned: bool = True) -> list[Tensor]:
        """Values and scales of both forms of the stacked weights."""
        largest = _largest(weights, self.scaling, True, self.inputs_over, self.outputs_over)
        return list(fp8_cast(list(weights), largest, self.scaling, False, True, plain, turned))

    def __call__(
        self,
        hidden: Tensor,
        weights: Sequence[Tensor],
        forms: Sequence[Tensor] | None,
        gathered: Sequence[Form] | None = None,
        delayed: DelayedLargest | None = None,
        *,
        wide_gradients: bool = False,
    ) -> tuple[Tensor, ...]:
        """The outputs of each layer; ``forms`` are those of the stacked weights, if these have been cast before.

        ``gathered``: the plain form of each weight, if only that exists; it is gathered again for the backward pass.
        ``delayed``: inputs and gradients are scaled by earlier steps' largest elements. ``wide_gradients``: weight
        gradients are in fp32; with ``forms``, ``weights`` may be stand-ins.
        """
        of_weights = [*(forms or ())]
        if gathered is not None:
            of_weights = [*(form.values for form in gathered), *(form.scales for form in gathered)]
        outputs: tuple[Tensor, ...] = _ScaledProducts.apply(  # type: ignore[no-untyped-call]
            hidden, self.scaling, self.inputs_over, self.outputs_over, self.entry, len(weights), gathered is not None,
            delayed, wide_gradients, *weights, *of_weights,
        )  # fmt: skip
        return outputs


def _largest(
    parts: Sequence[Tensor], scaling: str, stacked: bool, columns_over: Group = None, rows_over: Group = None
) -> list[Tensor]:
    """The largest elements that `fp8_cast` scales by; over all ranks, if the matrices are cut over ranks."""
    if scaling == "block":
        return []
    if scaling == "row":
        by_row, by_column = fp8_largest(list(parts), stacked)
        return [_over(by_row, columns_over), _over(by_column, rows_over)]
    if torch.compiler.is_compiling():  # in two steps, the first of which joins the kernel that makes the tensor
        largest = [part.abs().amax(-1).amax() for part in parts]
    else:
        largest = [torch.linalg.vector_norm(part, torch.inf) for part in parts]
    most = largest[0] if len(largest) == 1 else torch.stack(largest).amax()
    return [_over(_over(most.float(), columns_over), rows_over)]


def _over(largest: Tensor, group: Group) -> Tensor:
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest


class _ScaledProducts(torch.autograd.Function):
    """Forward in e4m3. With one scale for a whole tensor, gradients need the range of e5m2."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        # One parameter: see `models.mlp._Projected`.
        hidden, scaling, inputs_over, outputs_over, entry, count, each, delayed, wide_gradients, *tensors = given
        weights, forms, square = tensors[:count], tensors[count:], scaling == "block"
        gathered = entry == "gathered"
        ctx.scaling, ctx.inputs_over, ctx.outputs_over, ctx.entry = scaling, inputs_over, outputs_over, entry
        ctx.count, ctx.are_cast, ctx.each, ctx.delayed = count, len(forms) > 0, each, delayed
        ctx.wide_gradients, ctx.trained = wide_gradients, ctx.needs_input_grad[9 : 9 + count]
        whole = start_gather(hidden, outputs_over).wait() if gathered and outputs_over is not None else hidden
        rows = whole.flatten(0, -2)
        largest = _largest([rows], scaling, False, inputs_over)
        if delayed is not None:
            largest = [delayed(INPUTS, largest[0], any(ctx.needs_input_grad))]
        keeps = any(ctx.trained)  # the input, which only weight gradients read
        values, scales, *forms_kept = fp8_cast([rows], largest, scaling, False, False, True, keeps and not gathered)
        if each:
            of_weights = [Form(*both, square) for both in zip(forms[:count], forms[count:])]
        else:
            plan = ScaledProducts(scaling, inputs_over, outputs_over)
            plain, plain_scales, *_ = forms or plan.weight_forms(weights, turned=False)
            stacked, ends = Form(plain, plain_scales, square), list(accumulate(weight.shape[0] for weight in weights))
            of_weights = [stacked.rows(start, stop) for start, stop in zip([0, *ends], ends)]
        if not torch.compiler.is_compiling():
            ctx.deferrable, ctx.weights = may_defer(), weights
        kept = (hidden if keeps else hidden.new_empty(0),) if gathered else forms_kept
        ctx.save_for_backward(*kept, *(forms if each else forms[2:] if forms else weights))
        inputs = Form(values, scales)
        outputs = (product(inputs, weight, hidden.dtype, True) for weight in of_weights)
        return tuple(torch.unflatten(output, 0, whole.shape[:-1]) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        scaling, group, saved = ctx.scaling, ctx.outputs_over, ctx.saved_tensors
        gathered = ctx.entry == "gathered"
        kept, others = (saved[:1], saved[1:]) if gathered else (saved[:2], saved[2:])
        waits = not torch.compiler.is_compiling() and ctx.deferrable and is_deferring()
        trained = any(ctx.trained)
        early = start_gather(kept[0], group) if trained and gathered and not waits else None
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        largest = _largest(flat, scaling, False, group)
        if ctx.delayed is not None:
            largest = [ctx.delayed(GRADIENTS, largest[0])]
        values, scales, turned, turned_scales = fp8_cast(flat, largest, scaling, True, False, True, trained)
        dtype, widths = flat[0].dtype, [gradient.shape[1] for gradient in flat]
        pending = of_hidden = None
        if ctx.needs_input_grad[0]:
            if ctx.each:
                others = fp8_turned(list(others[: ctx.count]), list(others[ctx.count :]))
            elif not ctx.are_cast:
                plan = ScaledProducts(scaling, ctx.inputs_over, group)
                others = plan.weight_forms(others, plain=False)[2:]
            of_rows = product(Form(values, scales), Form(others[0], others[1], scaling == "block"), dtype, False)
            of_hidden = torch.unflatten(of_rows, 0, gradients[0].shape[:-1])
            if ctx.entry:
                pending = (start_scatter if gathered else start_sum)(of_hidden, group)

        def of_weights() -> Sequence[Tensor]:
            inputs = kept
            if gathered:
                rows = (early or start_gather(kept[0], group)).wait().flatten(0, -2)
                largest = _largest([rows], scaling, False)
                if ctx.delayed is not None:
                    largest = [ctx.delayed(INPUTS, largest[0])]
                inputs = fp8_cast([rows], largest, scaling, False, False, False, True)[2:]
            wanted = torch.float32 if ctx.wide_gradients else dtype
            gradient = product(Form(turned, turned_scales), Form(inputs[0], inputs[1]), wanted, False)
            return torch.split(gradient, widths)

        weight_gradients: Sequence[Tensor | None] = [None] * ctx.count
        if trained:
            weight_gradients = defer(of_weights, *ctx.weights) if waits else of_weights()
        of_hidden = pending.wait() if pending else of_hidden
        unread = len(ctx.needs_input_grad) - 9 - ctx.count
        return (of_hidden, *(None,) * 8, *weight_gradients, *(None,) * unread)
