"""A user's network cut by everything but data parallelism, and its first values where it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.engine.attention import apply_attention
from shardwise.engine.context import apply_context
from shardwise.engine.gradients import held
from shardwise.engine.mesh import Mesh
from shardwise.engine.own_model.attention import route_attention
from shardwise.engine.own_model.experts import spread_experts
from shardwise.engine.own_model.stages import keep_part, twin
from shardwise.engine.own_model.tables import is_hugging_face
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.pipeline import TiedEnds, tie_ends
from shardwise.engine.tensor import apply_tensor
from shardwise.engine.values import fill, materialise
from shardwise.layout.ranks import node_of
from shardwise.layout.stages import placement, stage_layers, stages_of_rank
from shardwise.spec.job import Job

Initialise = Callable[[str, tuple[int, ...]], Tensor]


def cut_stages(module: nn.Module, job: Job, mesh: Mesh, table: Patterns | None) -> dict[int, nn.Module]:
    """The stages of this rank by their numbers; the first of them is the module itself."""
    if table is None:
        return {0: module}
    if is_hugging_face(module):
        route_attention(module, table)
    layers, last = stage_layers(job), len(stage_layers(job)) - 1
    on_node = partial(node_of, node_devices=job.cluster.node_devices)
    mine = stages_of_rank(job, mesh.rank("pp"))
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
    """Rows of tokens pass through a region as one sequence: tensor parallelism moves parts of sequences."""
    for pattern in patterns.flat:
        for _, region in matching(root, pattern):
            region.register_forward_pre_hook(lambda module, arguments: (arguments[0][None], *arguments[1:]))
            region.register_forward_hook(lambda module, arguments, output: output[0])


def tie_stages(
    stages: Mapping[int, nn.Module], job: Job, mesh: Mesh, patterns: Patterns, second_names: Mapping[str, str]
) -> TiedEnds | None:
    """Where embedding and head are one parameter and stand at two ends of a pipeline."""
    embedding, head = patterns.embedding, patterns.head
    tied = bool(head) and second_names.get(f"{head}.weight") == f"{embedding}.weight"
    if job.strategy.pp == 1 or not tied:
        return None
    return tie_ends(stages, placement(job), mesh.group("pp"), embedding=embedding, head=head)


@torch.no_grad()
def fill_stages(stages: Mapping[int, nn.Module], initialise: Initialise, device: torch.device) -> None:
    """Memory and values for a network that has had none, one tensor at a time."""
    for stage in stages.values():
        materialise(stage, device)
        for name, buffer in stage.named_buffers():
            buffer.copy_(initialise(name, tuple(buffer.shape)))
    for one in held(stages.values()):
        fill(one, lambda name, part: part.of(initialise(name, part.shape).to(device)))
