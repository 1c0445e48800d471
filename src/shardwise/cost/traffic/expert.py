"""Expert parallelism: tokens are dispatched to their experts and combined, forward and backward.

A plain all-to-all sends a token once per chosen expert. The deduplicated form (DeepSeek-V3, arXiv 2412.19437,
section 3.2.2; DeepEP) sends it once per destination node and forwards it inside, once per destination device.
Exchanges may overlap with computation: of another microbatch (DualPipe, Megatron-LM's combined 1F1B), or of other
chunks of the same tokens, as this project's engine does (`engine/experts/exchanges.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.collectives import CollectiveCost, CollectiveKind, Topology
from shardwise.collectives.arrays import minimum
from shardwise.collectives.work import Work, settle
from shardwise.cost.compute.operators import OperatorRole, gradient_share
from shardwise.cost.compute.recompute import run_again_share
from shardwise.cost.step.stage_time import timed_layer
from shardwise.cost.traffic.traffic import Traffic, Window, in_passes, priced
from shardwise.layout.groups import expected_destinations, expert_runs
from shardwise.layout.network import level_names, spanned
from shardwise.layout.payloads import Pass, Payload, Role, sent_backward, sent_forward
from shardwise.layout.pieces import EXCHANGED_CHUNKS
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import MixtureOfExperts


def expert_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Dispatch and combine of the routed tokens of every mixture-of-experts layer."""
    model, strategy, recipe = job.model, job.strategy, job.training.recipe
    mixture = next((kind for kind, _ in contents.held if model.experts_of(kind)), None)
    if model.moe is None or strategy.ep == 1 or mixture is None:
        return []
    topology = spanned(job.cluster, expert_runs(strategy), "strategy.ep", "all")
    if topology is None:
        return []
    # Tensor-parallel ranks with the same tokens (no sequence parallelism) each send their share of them to every rank
    # that splits an expert.
    copies = 1 if strategy.sequence_parallel else min(strategy.tp, strategy.expert_tensor_parallel)
    region = job.computed_tokens / strategy.tp * copies
    calls = contents.moe_layers * job.microbatches
    again = run_again_share(job, contents)
    if "experts" in job.recomputed_operators:
        again = gradient_share(model, job.training.tuning)
    # DeepSeek-V3 dispatches in the 8-bit format that the expert's first matmul reads; combining stays in 16 bit.
    narrow = min(recipe.linear_input, recipe.communication) if job.stack.fp8_dispatch else recipe.communication
    sizes = {Role.DISPATCH: narrow, Role.COMBINE: recipe.communication}
    traffics = []
    for role, element in sizes.items():
        token_bytes = region * model.hidden * element
        for payload, more in ((sent_forward(role), again), (sent_backward(role), 0.0)):
            traffic = _exchange(job, model.moe, topology, payload, token_bytes, calls * (1 + more))
            window: Window = payload.in_pass if strategy.overlap.ep else "none"
            alone = 1 - _share_beside_chunks(job, mixture, traffic) if job.stack.ep_overlap == "chunks" else 0.0
            traffics.append(replace(traffic, window=window, repeated=more / (1 + more), unhideable=alone))
    return in_passes(job, traffics)


def beside_other_microbatches(pp: int, microbatches: Any) -> Any:
    """Share of the exchanges that have another microbatch beside them: not while the pipeline fills or empties.

    One microbatch's forward pass runs beside the backward pass of another (Megatron-LM, pipeline_parallel/
    combined_1f1b.py). The first forward and the last backward passes are alone: one of each without a pipeline, else as
    many as fill it, on average ``pp`` (interleaved: (v·pp - 1) chunks, and the one ahead).
    """
    return 1 - minimum(1.0, pp / microbatches)


def _share_beside_chunks(job: Job, kind: LayerRecord, traffic: Traffic) -> float:
    """Share of an exchange that fits beside the computation of other chunks of the same tokens.

    Of n chunks each dispatch but the first has the experts of the chunk before beside it, each combine but the last
    those of the chunk after; the first dispatch has the shared expert. Backward passes are the mirror image.
    """
    experts, shared = _experts_seconds(job, kind, traffic.payload.in_pass)
    chunk, others = float(traffic.cost.seconds) / EXCHANGED_CHUNKS, EXCHANGED_CHUNKS - 1
    if not chunk:
        return 0.0
    beside = others * min(chunk, experts / EXCHANGED_CHUNKS)
    if traffic.payload.role is Role.DISPATCH:
        beside += min(chunk, shared)
    return beside / (EXCHANGED_CHUNKS * chunk)


def _experts_seconds(job: Job, kind: LayerRecord, which: Pass) -> tuple[float, float]:
    """The matmuls of a layer's routed experts, and of its shared expert, for one microbatch."""
    by_role = {OperatorRole.EXPERTS: 0.0, OperatorRole.MLP: 0.0}
    for operator, seconds in timed_layer(job, kind):
        if operator.role in by_role:
            by_role[operator.role] += float(seconds.forward if which == "forward" else seconds.backward)
    return by_role[OperatorRole.EXPERTS], by_role[OperatorRole.MLP]


def _exchange(
    job: Job, moe: MixtureOfExperts, topology: Topology, payload: Payload, token_bytes: float, count: float
) -> Traffic:
    size = token_bytes * moe.top_k
    if job.strategy.dispatch == "all-to-all":
        return priced("ep", payload, CollectiveKind.ALL_TO_ALL, size, count, topology, job.strategy.collective)
    cost = deduplicated_cost(topology, token_bytes, moe)
    return Traffic("ep", payload, CollectiveKind.ALL_TO_ALL, size, count, cost, level_names(topology))


def places_of_levels(topology: Topology, moe: MixtureOfExperts) -> Iterator[tuple[int, int, int | None]]:
    """Of each level, outermost first: its number, the places experts are spread over, and the most a token may visit.

    Node-limited routing puts one group of experts on each of the places it counts (DeepSeek-V3: 4 of 8 nodes).
    """
    places = 1
    for index in reversed(range(len(topology.levels))):
        places *= topology.levels[index].shape.size
        yield index, places, moe.groups_used if 1 < moe.groups == places else None


def deduplicated_cost(topology: Topology, token_bytes: float, moe: MixtureOfExperts) -> CollectiveCost:
    """Two-level exchange: each level carries every token once per distinct member it visits there.

    The levels are forwarded under each other, so the slowest sets the time; latencies add.
    """
    used: dict[int, Work] = {}
    sent = 0.0
    for index, places, limit in places_of_levels(topology, moe):
        shape = topology.levels[index].shape
        width = shape.size
        visited = expected_destinations(moe.experts, places, moe.top_k, limit)
        block = token_bytes * visited / width  # for each member of the level, including this device
        sent += block * (width - 1)
        used[index] = Work(
            hops=shape.farthest_hops, bytes=block * shape.exchange_load * topology.sharing(index), steps=1
        )
    volume = Work(steps=len(used), sent_bytes=sent, received_bytes=sent, total_bytes=sent * topology.size)
    return settle(topology, used, volume, "deduplicated", exact=False, overlapped=True)
