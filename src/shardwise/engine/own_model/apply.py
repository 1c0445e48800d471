"""A user's network cut by everything but data parallelism: attention, experts, stages, and initial values.

Transformers makes masks from the length of the hidden states, which under sequence and context parallelism are only a
part of the sequence. It makes none for an attention implementation that its mask registry does not know; then the call
says which tokens see each other.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.context.apply import apply_attention, apply_context
from shardwise.engine.experts.apply import cut_experts, exchange_of
from shardwise.engine.experts.channel import NodeOfRank
from shardwise.engine.mesh import Mesh
from shardwise.engine.own_model.tables import is_hugging_face
from shardwise.engine.parameters import fill, held, materialise
from shardwise.engine.patterns import Patterns, change_attribute, matching, replace_module
from shardwise.engine.pipeline.tied import TiedEnds, tie_ends
from shardwise.engine.tensor.apply import apply_tensor
from shardwise.engine.torch_private import Dropout, is_view
from shardwise.layout.groups import node_of
from shardwise.layout.stages import placement, stage_layers, stages_of_rank
from shardwise.models.dot_product import AttentionArguments, dot_product_attention
from shardwise.models.experts import TokenExchange
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

IMPLEMENTATION = "shardwise"


def route_attention(module: Any, patterns: Patterns) -> None:
    """Makes every attention module of a Hugging Face network call an attribute ``attend``."""
    interface: Any = importlib.import_module("transformers").AttentionInterface
    interface.register(IMPLEMENTATION, _attend)
    module.config._attn_implementation = IMPLEMENTATION
    for _, attention in matching(module, patterns.attention):
        attention.attend = dot_product_attention  # type: ignore[assignment]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """From [batch, heads, seq, features] to [batch, seq, heads, features]."""
    arguments = AttentionArguments(module.is_causal, sliding_window, scaling, documents, position_ids, softcap=softcap)
    heads_inside = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return module.attend(*heads_inside, arguments), None


def dropout_of(module: nn.Module) -> float:
    """The largest dropout probability in the network."""
    attention = float(getattr(getattr(module, "config", None), "attention_dropout", 0.0) or 0.0)
    return max([attention, *(dropout.p for dropout in module.modules() if isinstance(dropout, Dropout))])


def spread_experts(root: nn.Module, mesh: Mesh, patterns: Patterns, node_of_rank: NodeOfRank, number: int) -> None:
    """Cuts the stacked experts of every layer and sends tokens to them and back. Every rank of the world calls this.

    An experts module maps (rows, indices of their experts [rows, k], weights [rows, k]) to rows, and has its number
    of experts in ``num_experts``.
    """
    if mesh.strategy.overlap.ep and mesh.size("ep") > 1:
        problem = "networks of others have no shared expert and no chunks to overlap an exchange with"
        raise SpecError("strategy.overlap.ep", problem, "overlap.ep: false")
    exchange = exchange_of(number, mesh, mesh.strategy, node_of_rank)
    for _, experts in matching(root, patterns.experts):
        cut_experts(experts, mesh, patterns.expert_features)
        if exchange is not None:
            _send_through(experts, exchange, number // mesh.size("ep"))


def _send_through(experts: Any, exchange: TokenExchange, here: int) -> None:
    plain = experts.forward
    experts.num_experts = here

    def forward(rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        arrived, counts, handle = exchange.dispatch(rows, indices)
        numbers = torch.arange(here, device=rows.device)
        of_rows = torch.repeat_interleave(numbers, counts, output_size=arrived.shape[0])[:, None]
        results = plain(arrived, of_rows, arrived.new_ones((arrived.shape[0], 1)))
        combined: Tensor = exchange.combine(results, weights, handle)
        return combined.clone() if is_view(combined) else combined  # FSDP warns about views that its modules return

    experts.forward = forward


class PassedBy(nn.Module):
    """Replaces a part that another stage holds (embedding, norm or head) and returns its input.

    ``seen`` is what passed through last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return hidden


class Nothing(nn.Module):
    """Replaces learned positions, which the first stage has added already."""

    def forward(self, positions: Tensor) -> float:
        return 0.0


def twin(module: nn.Module) -> nn.Module:
    """A second network with the same parameters and buffers, from which other parts can be removed."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, shared)


def keep_part(root: nn.Module, patterns: Patterns, layers: range, *, first: bool, last: bool) -> Patterns:
    """Removes what belongs to other stages; returns the table of what is left. Parameters keep their names."""
    container = root.get_submodule(patterns.layers.removesuffix(".*"))
    for number, name in enumerate([name for name, _ in container.named_children()]):
        if number not in layers:
            delattr(container, name)  # not by index, which would give the others new names
    for path in patterns.layer_lists:
        change_attribute(root, path, lambda several: [several[layer] for layer in layers])
    gone: dict[str, type[nn.Module]] = {}
    if not first:
        gone |= {"embedding": PassedBy, "position_embedding": Nothing}
    if not last:
        gone |= {"norm": PassedBy, "head": PassedBy}
    for field, stand_in in gone.items():
        for name, _ in list(matching(root, getattr(patterns, field))):
            replace_module(root, name, stand_in())
    emptied: dict[str, Any] = dict.fromkeys(gone, "")
    return replace(patterns, **emptied)


Initialise = Callable[[str, tuple[int, ...]], Tensor]


def cut_stages(module: nn.Module, job: Job, mesh: Mesh, table: Patterns | None) -> dict[int, nn.Module]:
    """The stages of this rank by number; the first of them is the module itself."""
    if table is None:
        return {0: module}
    if is_hugging_face(module):
        route_attention(module, table)
    layers, last = stage_layers(job), len(stage_layers(job)) - 1
    on_node = partial(node_of, node_devices=job.cluster.node_devices)
    mine = stages_of_rank(job, mesh.pipeline_rank)
    stages = {stage: module if stage == mine[0] else twin(module) for stage in mine}
    for stage, part in stages.items():
        here = table
        if job.strategy.pp > 1:
            here = keep_part(part, table, layers[stage], first=stage == 0, last=stage == last)
        if job.strategy.tp > 1:
            _as_sequences(part, here)
        apply_tensor(part, mesh, here, job.model)
        apply_attention(part, job.training)
        apply_context(part, mesh, job.strategy)
        if job.model.moe is not None:
            spread_experts(part, mesh, here, on_node, job.model.moe.experts)
    return stages


def _as_sequences(root: nn.Module, patterns: Patterns) -> None:
    """Makes one sequence of the rows of tokens in a region: tensor parallelism exchanges parts of sequences."""
    for pattern in patterns.flat:
        for _, region in matching(root, pattern):
            region.register_forward_pre_hook(lambda module, arguments: (arguments[0][None], *arguments[1:]))
            region.register_forward_hook(lambda module, arguments, output: output[0])


def tie_stages(
    stages: Mapping[int, nn.Module], job: Job, mesh: Mesh, patterns: Patterns, second_names: Mapping[str, str]
) -> TiedEnds | None:
    """Ties embedding and head where they are one parameter at the two ends of a pipeline."""
    embedding, head = patterns.embedding, patterns.head
    tied = bool(head) and second_names.get(f"{head}.weight") == f"{embedding}.weight"
    if job.strategy.pp == 1 or not tied:
        return None
    return tie_ends(stages, placement(job), mesh.pipeline, embedding=embedding, readers=(head,))


@torch.no_grad()
def fill_stages(stages: Mapping[int, nn.Module], initialise: Initialise, device: torch.device) -> None:
    """Allocates and fills a network on the meta device, one tensor at a time."""
    for stage in stages.values():
        materialise(stage, device)
        for name, buffer in stage.named_buffers():
            buffer.copy_(initialise(name, tuple(buffer.shape)))
    for parameter in held(stages.values()):
        fill(parameter, lambda name, part: part.of(initialise(name, part.shape).to(device)))
