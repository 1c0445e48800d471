"""A mixture of experts in place of a layer's MLP: its experts, how tokens reach them, its router, the layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.mlp import MLP, activation_of
from shardwise.models.stored import StoredWeight
from shardwise.spec.model import Model

Multiply = Callable[[Tensor, Tensor], Tensor]
Work = Callable[[Tensor, Multiply], Any]  # takes rows, and the function that multiplies rows by their experts
Adds = Callable[[Tensor, Tensor], Tensor]  # what an adapter adds to the products of rows and their ends


def at_once(counts: Tensor) -> Work:
    """All rows in one call."""
    return lambda rows, multiply: multiply(rows, counts)


class GroupedExperts(nn.Module):
    """Stacked experts: ``gate`` and ``up`` are [experts, hidden, ffn], ``down`` is [experts, ffn, hidden].

    No token is dropped: every expert gets as many rows as were routed to it.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        experts, hidden, width = model.moe.experts, model.hidden, model.moe.ffn
        self.activation = activation_of(model)
        self.gate = _matrix(experts, hidden, width) if model.gated else None
        self.up = _matrix(experts, hidden, width)
        self.down = _matrix(experts, width, hidden)
        biased = model.mlp_bias
        self.gate_bias = nn.Parameter(torch.zeros(experts, width)) if biased and model.gated else None
        self.up_bias = nn.Parameter(torch.zeros(experts, width)) if biased else None
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden)) if biased else None
        self.stored: nn.ModuleDict | None = None  # frozen matrices in fewer bits, in place of the parameters
        self.gate_adapter: Adds | None = None
        self.up_adapter: Adds | None = None
        self.down_adapter: Adds | None = None

    def forward(self, rows: Tensor, work: Work) -> Any:
        """The result of ``work``, which may call `multiply` several times: parameters are gathered once for all."""
        return work(rows, self.multiply)

    def multiply(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each expert's MLP on its own rows: ``rows`` [n, hidden] are sorted by expert, ``counts`` [experts] each."""
        ends = counts.cumsum(0).to(torch.int32)
        kept: Any = self.stored or {"gate": self.gate, "up": self.up, "down": self.down}
        up = _product(rows, kept["up"], self.up_bias, ends, self.up_adapter)
        gates = "gate" in kept and kept["gate"] is not None
        gate = (_product(rows, kept["gate"], self.gate_bias, ends, self.gate_adapter),) if gates else ()
        inner = self.activation(*gate, up)
        return _product(inner, kept["down"], self.down_bias, ends, self.down_adapter)


def _matrix(experts: int, inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts, inputs, outputs).normal_(std=0.02))


def _product(
    rows: Tensor, matrices: Tensor | StoredWeight, biases: Tensor | None, ends: Tensor, adds: Adds | None = None
) -> Tensor:
    """Each row times the matrix of its expert, plus bias; the rows of an expert stop at its entry of ``ends``."""
    if isinstance(matrices, StoredWeight):
        product: Tensor = _StoredExperts.apply(rows, matrices, ends)  # type: ignore[no-untyped-call]
    else:
        product = grouped_product(rows, matrices, ends)
    if adds is not None and getattr(adds, "on", True):
        product = product + adds(rows, ends)
    if biases is None:
        return product
    places = torch.arange(rows.shape[0], device=rows.device)[:, None]
    passed = (places < ends).to(biases.dtype)
    owned = passed.diff(dim=1, prepend=torch.zeros_like(passed[:, :1]))
    # A matmul rather than a lookup: the gradient of a lookup is summed in no fixed order.
    return product + owned @ biases


class _StoredExperts(torch.autograd.Function):
    """`grouped_product` with stored matrices [experts, outputs, inputs], made anew for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stored: StoredWeight, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.stored = stored
        return _grouped(rows, stored.dense(rows.dtype).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        matrices = ctx.stored.dense(gradient.dtype, after=gradient)
        return _grouped(gradient.contiguous(), matrices, ends), None, None


# In bf16 the grouped matmul is torch's own, which the compiler knows. In other formats torch computes it but does not
# compile it, and its backward refuses a broadcast gradient, so a small operator of our own replaces it.


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``rows`` [n, inputs] times ``matrices`` [groups, inputs, outputs]; a group's rows stop at its entry of ``ends``.

    ``ends`` is int32 and stays on the device: the host need not know the sizes of the groups. Rows after the last end
    are undefined.
    """
    product = _grouped(rows, matrices, ends)
    return _DenseGradient.apply(product) if rows.dtype == torch.bfloat16 else product  # type: ignore[no-untyped-call]


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, matrices, offs=ends)
    product: Tensor = _product_in_any_format(rows, matrices, ends)
    return product


class _DenseGradient(torch.autograd.Function):
    """The identity, with a gradient that lies in memory as one block."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


@torch.library.custom_op("shardwise::grouped_product", mutates_args=())
def _product_in_any_format(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices, offs=ends)


@_product_in_any_format.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[-1])


@torch.library.custom_op("shardwise::grouped_product_of_columns", mutates_args=())
def _product_of_columns(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """For each group its rows, transposed, times their gradient: [groups, inputs, outputs]."""
    return F.grouped_mm(rows.T, gradient, offs=ends)


@_product_of_columns.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_product(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, matrices, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    of_rows, of_matrices = ctx.needs_input_grad[:2]
    for_rows = _product_in_any_format(gradient, matrices.transpose(-1, -2), ends) if of_rows else None
    return for_rows, _product_of_columns(rows, gradient, ends) if of_matrices else None, None


_product_in_any_format.register_autograd(_differentiate_product, setup_context=save_inputs)


class TokenExchange(Protocol):
    """How tokens get to their experts and back; the handle is private to the exchange."""

    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Sends ``rows`` [tokens, hidden] to experts ``indices`` [tokens, k]; returns rows sorted by expert, counts
        [experts] and a handle."""

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        """The experts' rows back at their tokens [tokens, hidden], weighted by ``weights`` [tokens, k] and summed."""


Beside = Callable[[], Tensor]
Mixed = tuple[Tensor, Tensor | None]


def mix_in_turn(
    exchange: TokenExchange, experts: GroupedExperts, rows: Tensor, indices: Tensor, weights: Tensor,
    beside: Beside | None,
) -> Mixed:  # fmt: skip
    """The weighted sum of each token's experts, and what ``beside`` (the shared expert) computes of the same tokens."""
    sorted_rows, counts, handle = exchange.dispatch(rows, indices)
    mixed = exchange.combine(experts(sorted_rows, at_once(counts)), weights, handle)
    return mixed, None if beside is None else beside()


class LocalExchange:
    """All experts are here: a token's row is copied once for each of its experts and sorted by expert.

    Everything moves by gathers, forward and backward, so that no sum depends on the order of atomic additions.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        experts = indices.flatten()
        order = experts.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        each = indices.shape[1]
        spread: Tensor = _CopiedRows.apply(rows, order // each, back, each)  # type: ignore[no-untyped-call]
        return spread, count_tokens(experts[None], self.experts)[0], (order, back)

    def combine(self, rows: Tensor, weights: Tensor, handle: tuple[Tensor, Tensor]) -> Tensor:
        combined: Tensor = _WeightedRows.apply(rows, weights.to(rows.dtype), *handle)  # type: ignore[no-untyped-call]
        return combined


def count_tokens(indices: Tensor, experts: int) -> Tensor:
    """How often each expert occurs in each row of ``indices`` [rows, any]: [rows, experts] int64."""
    counts = torch.zeros(indices.shape[0], experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add_(1, indices, torch.ones_like(indices))


def reorder_rows(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Row i of the result is row ``order[i]``; ``back`` is the inverse of that order. Backward is a gather too."""
    result: Tensor = _CopiedRows.apply(rows, order, back, 1)  # type: ignore[no-untyped-call]
    return result


class _CopiedRows(torch.autograd.Function):
    """Row i of the result is row ``source[i]``; each row has ``copies``, which ``back`` lists row by row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        of_copies = gradient.index_select(0, back)
        of_rows = of_copies if ctx.copies == 1 else torch.unflatten(of_copies, 0, (-1, ctx.copies)).sum(1)
        return of_rows, None, None, None


class _WeightedRows(torch.autograd.Function):
    """The sum of each token's rows, weighted by ``weights`` [tokens, k]; ``order`` and ``back`` are the handle.

    The backward pass works on rows sorted by expert: a batched matmul of the few rows of each token takes ten times as
    long as reading them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, back)
        returned = torch.unflatten(rows.index_select(0, back), 0, weights.shape)
        if torch.compiler.is_compiling():  # which makes one pass of it, without rounding in between
            return (returned * weights[..., None]).sum(1)
        return torch.bmm(weights[:, None, :], returned)[:, 0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, back = ctx.saved_tensors
        spread = gradient.index_select(0, order // weights.shape[1])
        of_weights = (spread * rows).sum(-1, dtype=torch.float32).index_select(0, back)
        of_rows = spread.mul_(weights.flatten().index_select(0, order)[:, None])
        return of_rows, of_weights.view_as(weights).to(weights.dtype), None, None


# -- Router, balance loss, layer -------------------------------------------------------------------


def _unchanged(counts: Tensor) -> Tensor:
    return counts


class BuffersInFp32(nn.Module):
    """Keeps buffers in fp32 for running sums: bf16 can neither count beyond 256 nor add a thousandth to one."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                self._buffers[name] = buffer.float()
        return self


class TopKRouter(BuffersInFp32):
    """Scores every expert for every token, in fp32, and picks the best ``top_k``.

    Softmax routing as in Mixtral (arXiv 2401.04088), Qwen3 and DeepSeek-V2; sigmoid routing with a balancing bias and
    groups of experts as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    ``bias`` (None without bias balancing) is added to the scores only for picking: it moves load between experts and
    does not change the weights. It is a buffer; no gradient reaches it, unlike the bias that ``gate`` may have.
    ``held``, if set from outside, picks the experts of ``hidden`` instead.
    """

    bias: Tensor | None
    held: Callable[[Tensor], Tensor] | None = None

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        self.top_k = model.moe.top_k
        self.sigmoid = model.moe.router == "sigmoid"
        self.groups, self.groups_used = model.moe.groups, model.moe.groups_used
        self.renormalise, self.scale = model.numerics.renormalise_top_k, model.numerics.router_scale
        self.gate = nn.Linear(model.hidden, model.moe.experts, bias=model.moe.router_logit_bias)
        self.register_buffer("bias", torch.zeros(model.moe.experts) if model.moe.router_bias else None)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``hidden`` [tokens, features]: the experts [tokens, k], their weights, all scores [tokens, experts]."""
        logits = _wide_product(hidden, self.gate.weight)
        if self.gate.bias is not None:
            logits = logits + self.gate.bias.float()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        indices = self._pick(scores.detach()) if self.held is None else self.held(hidden.detach())
        weights = scores.gather(1, indices)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return indices, weights * self.scale, scores

    def _pick(self, scores: Tensor) -> Tensor:
        if self.bias is not None:
            scores = scores + self.bias
        if self.groups_used < self.groups:
            scores = self._within_best_groups(scores)
        return scores.topk(self.top_k, dim=-1, sorted=False).indices

    def _within_best_groups(self, scores: Tensor) -> Tensor:
        """Node-limited routing: experts outside a token's best groups are excluded.

        A group is as good as its best expert (DeepSeek-V2, arXiv 2405.04434 section 2.2.2) or, with sigmoid
        scores, as the sum of its two best (DeepSeek-V3).
        """
        grouped = torch.unflatten(scores, -1, (self.groups, -1))
        counted = min(2, grouped.shape[-1]) if self.sigmoid else 1
        merit = grouped.topk(counted, dim=-1).values.sum(-1)
        best = merit.topk(self.groups_used, dim=-1).indices
        reached = torch.zeros_like(merit, dtype=torch.bool).scatter(1, best, True)
        return grouped.masked_fill(~reached[..., None], float("-inf")).flatten(-2)


@torch.library.custom_op("shardwise::wide_product", mutates_args=())
def _wide_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """A matmul in fp32 that saves its inputs as given for the backward pass, and no fp32 copies.

    A custom operator: the compiler would look inside and save the fp32 copies.
    """
    return F.linear(hidden.float(), weight.float())


@_wide_product.register_fake
def _(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=torch.float32)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    hidden, weight = ctx.saved_tensors
    of_hidden = gradient @ weight.float()
    of_weight = gradient.T @ hidden.float()
    return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype)


_wide_product.register_autograd(_backward, setup_context=save_inputs)


def balance_value(scores: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """The balance loss of each sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), without its coefficient: [batch].

    ``scores`` [batch, seq, experts] are those of the tokens at hand; ``counts`` [batch, experts] says how many tokens
    of the *whole* sequence chose each expert. For a part of a sequence the value is that part's share: the shares of
    all parts add up to the value of the whole, which is 1 for an even load and larger for any other.
    """
    chosen = counts.sum(-1, keepdim=True)
    frequency = counts * (counts.shape[-1] / chosen)
    tokens = chosen / top_k
    probability = (scores / scores.sum(-1, keepdim=True)).sum(1) / tokens
    return (frequency * probability).sum(-1)


def with_gradient_of(states: Tensor, loss: Tensor) -> Tensor:
    """``states`` unchanged, through which the backward pass also reaches ``loss``, with a gradient of one.

    So a loss inside a layer needs no output of its own, even where the layer and the model's loss are on different
    stages.
    """
    attached: Tensor = _AttachedLoss.apply(states, loss)  # type: ignore[no-untyped-call]
    return attached


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, loss: Tensor) -> Tensor:
        ctx.like = (loss.shape, loss.dtype, loss.device)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradient, torch.ones(shape, dtype=dtype, device=device)


class MoELayer(BuffersInFp32):
    """Routed experts in place of a layer's MLP, and an optional shared expert that sees every token.

    What may be replaced or set from outside:

    - ``exchange`` carries tokens to experts and back (see `TokenExchange`);
    - ``mix`` runs exchange, experts and shared expert: one after the other, or overlapped;
    - ``sum_over_sequence`` turns the counts [batch, experts] of the tokens at hand into those of whole sequences;
    - ``balance_scale`` is the factor on each sequence's balance loss: the coefficient divided by the number of
      sequences of the step, times whatever the gradients of the loss are divided by later. A tensor may change every
      step without recompilation. None: the coefficient divided by the number of sequences of this call.

    ``load`` counts the tokens routed to each expert in training, until `update_bias` clears it. A layer that is
    recomputed in the backward pass adds its load twice; `update_bias` only compares it with the mean.
    """

    load: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        self.router = TopKRouter(model)
        self.experts = GroupedExperts(model)
        self.shared = MLP(model, model.moe.shared_ffn) if model.moe.shared_ffn else None
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if model.moe.shared_gate else None
        self.number, self.top_k, self.weighs_inputs = model.moe.experts, model.moe.top_k, model.moe.weighs_inputs
        self.register_buffer("load", torch.zeros(self.number, dtype=torch.float32), persistent=False)
        self.balance_coefficient = model.numerics.balance_loss
        self.balance_scale: Tensor | float | None = None
        self.exchange: TokenExchange = LocalExchange(self.number)
        self.mix: Callable[..., Mixed] = mix_in_turn
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _unchanged

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        indices, weights, scores = self.router(rows)
        if self.training:
            weights = self._balanced(weights, indices, scores, batch=hidden.shape[0])
        if self.weighs_inputs:
            rows, weights = (rows * weights).to(rows.dtype), torch.ones_like(weights)
        beside = None if self.shared is None else partial(self._shared, hidden)
        mixed, shared = self.mix(self.exchange, self.experts, rows, indices, weights, beside)
        mixed = mixed.view_as(hidden)
        return mixed if shared is None else mixed + shared

    def _shared(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        result: Tensor = self.shared(hidden)
        return result if self.shared_gate is None else result * self.shared_gate(hidden).sigmoid()

    def _balanced(self, weights: Tensor, indices: Tensor, scores: Tensor, batch: int) -> Tensor:
        """``weights`` with the gradient of the balance loss attached; counts the load.

        It is attached to the weights, not to the output, so that a recomputed layer need not compute its output again.
        """
        counts = count_tokens(indices.view(batch, -1), self.number).float()
        # Not `+=`: the compiler refuses to assign an attribute inside a recomputed layer.
        self.load.add_(counts.sum(0))
        if not self.balance_coefficient:
            return weights
        values = balance_value(torch.unflatten(scores, 0, (batch, -1)), self.sum_over_sequence(counts), self.top_k)
        scale = self.balance_coefficient / batch if self.balance_scale is None else self.balance_scale
        return with_gradient_of(weights, values.sum() * scale)

    @property
    def is_trained(self) -> bool:
        """Whether the router is: its bias stays where it is frozen."""
        return any(parameter.requires_grad for parameter in self.router.parameters())

    @torch.no_grad()
    def update_bias(self, total_load: Tensor, rate: float) -> None:
        """Moves the bias of every expert by ``rate`` towards an even load, and clears ``load``.

        ``total_load`` is the load of the whole step, summed over all ranks.
        """
        if self.router.bias is not None:
            self.router.bias += rate * torch.sign(total_load.mean() - total_load)
        self.load.zero_()
