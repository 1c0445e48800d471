"""Spreading the experts of a network over ranks: parameters cut, tokens exchanged, loads balanced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.experts.exchanges import (
    DeduplicatedExchange,
    DividedExchange,
    FlatExchange,
    GatheredExchange,
    SummedExchange,
    mix_overlapped,
)
from shardwise.engine.experts.rows import Channel, ExchangedBytes, NodeOfRank, channel, node_channels
from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.parameters import HeldPart, keep
from shardwise.engine.profiler_ranges import sent
from shardwise.models.adapters import ExpertAdapter
from shardwise.models.moe import LocalExchange, MoELayer, TokenExchange
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Strategy

# For each parameter of an expert: the dimension that counts the expert's inner features, and the number of equal blocks
# in it. None: the parameter has no such dimension and is added to the output once.
ExpertFeatures = Mapping[str, tuple[int, int] | None]
_INNER = {"gate": (2, 1), "up": (2, 1), "down": (1, 1), "gate_bias": (1, 1), "up_bias": (1, 1), "down_bias": None}


def apply_experts(module: nn.Module, mesh: Mesh, strategy: Strategy, node_of_rank: NodeOfRank) -> TokenExchange | None:
    """Cuts every mixture of experts in ``module`` in place and gives it the exchange that the strategy asks for.

    All layers share the exchange (None if there is nothing to exchange), which counts what is sent. ``node_of_rank``
    maps a rank of the world to its node. This may make process groups, so all ranks of the world must call it equally
    often, whether or not their part of the model has experts.
    """
    mixtures = [layer for layer in module.modules() if isinstance(layer, MoELayer)]
    numbers = {layer.number for layer in mixtures}
    exchange = exchange_of(numbers.pop() if numbers else strategy.ep, mesh, strategy, node_of_rank)
    for mixture in mixtures:
        cut_experts(mixture.experts, mesh)
        mixture.sum_over_sequence = sequence_sum(mesh, strategy)
        if exchange is not None:
            mixture.exchange = exchange
        if strategy.overlap.ep and strategy.ep > 1:
            mixture.mix = mix_overlapped
            # Marks its forward pass as one that communicates, so that it is not compiled as a whole.
            mixture.experts.exchange = exchange  # type: ignore[assignment]
    return exchange


def cut_experts(experts: nn.Module, mesh: Mesh, features: ExpertFeatures = _INNER) -> None:
    """Keeps this rank's experts, and of each its part of the inner features; works on the meta device too."""
    for name, whole in list(experts.named_parameters(recurse=False)):
        held = _own_run(HeldPart(tuple(whole.shape), expert=True), 0, 1, mesh, "ep", "experts")
        inner = features[name]
        if inner is not None:
            held = _own_run(held, *inner, mesh, "expert_tp", "expert features")
        elif mesh.rank("expert_tp") > 0:
            setattr(experts, name, None)  # only the first rank adds it, since outputs are summed over the ranks
            continue
        keep(experts, name, held)
    for name in ("gate", "up", "down"):
        adapter = getattr(experts, f"{name}_adapter", None)
        if adapter is not None:
            _cut_adapter(adapter, mesh, cuts_inputs=name == "down")


def _cut_adapter(adapter: ExpertAdapter, mesh: Mesh, *, cuts_inputs: bool) -> None:
    """Cuts the side of an adapter that is cut of its matrix; of the other, each rank sees a share of the gradient."""
    for name, dimension in (("a", 1), ("b", 2)):
        held = HeldPart(tuple(getattr(adapter, name).shape), expert=True)
        held = _own_run(held, 0, 1, mesh, "ep", "experts")
        if cuts_inputs == (name == "a"):
            held = _own_run(held, dimension, 1, mesh, "expert_tp", "expert features")
        elif mesh.size("expert_tp") > 1:
            held = replace(held, copies=mesh.size("expert_tp"), partial="expert_tp")
        keep(adapter, name, held)


def _own_run(part: HeldPart, dimension: int, blocks: int, mesh: Mesh, name: str, what: str) -> HeldPart:
    number, place, places = part.shape[dimension] // blocks, mesh.rank(name), mesh.size(name)
    if number % places:
        raise SpecError(f"strategy.{name}", f"{places} does not divide {number} {what}", "use a divisor")
    each = number // places
    return part.cut(dimension, place * each, (place + 1) * each, blocks)


def exchange_of(experts: int, mesh: Mesh, strategy: Strategy, node_of_rank: NodeOfRank) -> TokenExchange | None:
    """The exchange that a strategy asks for; None if every rank holds all experts of its own tokens."""
    traffic = ExchangedBytes()
    same_tokens = strategy.tp > 1 and not strategy.sequence_parallel
    parts = channel("expert_tp", mesh.group("expert_tp"), node_of_rank, traffic)
    if not same_tokens:
        return _between_tokens(experts, mesh, strategy, node_of_rank, parts)
    alone = Channel("", None, (False,), traffic)
    inner = _between_tokens(experts, mesh, strategy, node_of_rank, alone) or LocalExchange(experts)
    if parts.size == 1:
        return DividedExchange(inner, channel("tp", mesh.group("tp"), node_of_rank, traffic))
    if not mesh.same("expert_tp", "tp"):
        problem = "the ranks that split an expert are not those that hold the same tokens"
        raise SpecError("strategy.order", problem, "put tp first, or use sequence_parallel: true or expert_tp: 1")
    return SummedExchange(inner, parts)


def _between_tokens(
    experts: int, mesh: Mesh, strategy: Strategy, node_of_rank: NodeOfRank, parts: Channel
) -> TokenExchange | None:
    """The exchange between ranks that hold different tokens; the ranks of ``parts`` split the same experts."""
    if strategy.ep == 1:
        return GatheredExchange(experts, parts) if parts.size > 1 else None
    if strategy.dispatch == "deduplicated":
        return DeduplicatedExchange(experts, *node_channels(mesh, node_of_rank, parts.traffic), parts)
    return FlatExchange(experts, channel("ep", mesh.group("ep"), node_of_rank, parts.traffic), parts)


def sequence_sum(mesh: Mesh, strategy: Strategy) -> Callable[[Tensor], Tensor]:
    """A function that turns the counts [batch, experts] of a rank's tokens into those of whole sequences."""
    name = "sequence" if strategy.sequence_parallel else "cp"  # else tensor-parallel ranks hold the same tokens
    if mesh.size(name) == 1:
        return lambda counts: counts
    group = mesh.group(name)

    def summed(counts: Tensor) -> Tensor:
        total = counts.detach().clone()
        with sent("ep", Called.SEQUENCE_LOADS, total):
            dist.all_reduce(total, group=group)
        return total

    return summed


@torch.no_grad()
def update_balance(module: nn.Module, mesh: Mesh, rate: float) -> None:
    """Ends a step: sums the loads of all its tokens, moves every balancing bias by ``rate``, and clears the loads.

    The result is the same on every rank, since counts are added exactly. The host reads nothing.
    """
    mixtures = [layer for layer in module.modules() if isinstance(layer, MoELayer)]
    if not mixtures:
        return
    totals = torch.stack([mixture.load for mixture in mixtures]).round().long()
    if mesh.size("stage") > 1:
        with sent("ep", Called.STEP_LOADS, totals):
            dist.all_reduce(totals, group=mesh.group("stage"))
    if not mesh.strategy.sequence_parallel:
        totals //= mesh.size("tp")  # all of these ranks have counted the same tokens
    for mixture, total in zip(mixtures, totals):
        mixture.update_bias(total.float(), rate if mixture.is_trained else 0.0)
