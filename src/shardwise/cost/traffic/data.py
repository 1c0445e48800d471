"""Data parallelism: gradient reduction, what ZeRO gathers, and parameter servers.

ZeRO-1 and 2 reduce-scatter gradients and all-gather updated parameters: the bytes of one all-reduce. ZeRO-3
gathers parameters in the forward and again in the backward pass: 1.5 times that, and the gathers repeat for
every microbatch unless the gathered parameters are kept (Rajbhandari et al. 2020, section 7). PowerSGD sends two thin
matrices for every matrix, and the rest as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardwise.collectives import CollectiveCost, CollectiveKind, Topology, collective_cost, p2p_latency
from shardwise.collectives.arrays import is_array, minimum, select
from shardwise.collectives.cost import cheapest_where
from shardwise.cost.traffic.lists import ListCopies
from shardwise.cost.traffic.traffic import Traffic, collective_price
from shardwise.layout.gradient_schedules import (
    PAYS_BELOW,
    UNNAMED,
    Choice,
    choose,
    gradient_groups,
    measured_schedules,
    named_on,
)
from shardwise.layout.network import level_names, neighbours_of, network, spanned
from shardwise.layout.payloads import Pass, Payload, Role, Share, sent_backward, sent_forward
from shardwise.layout.pieces import ServerPlan
from shardwise.layout.sharding import Sharding, SharedRanks, dense_ranks, divided_over, expert_ranks, sharding_of
from shardwise.layout.stages import RankContents
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.less_communication import Compression, Synchronise, low_rank
from shardwise.spec.model import Matrix, Model
from shardwise.spec.schedules import schedule_record
from shardwise.spec.strategy import Strategy

if TYPE_CHECKING:
    from shardwise.cost.analysis import Analysis


# -- The price of a gradient reduction: by the backend's collective, or by our schedule where the engine runs one
# The backend's is priced as the cluster's library runs it, ours as our executor does. Where `calibrate` has measured
# our executor (``schedules`` of every level of a cluster), a named algorithm is priced by it, and "auto" takes the
# cheaper.


def gradient_price(
    kind: CollectiveKind,
    size_bytes: Any,
    network: Topology,
    ours: Topology | None,
    algorithm: str,
    lists: ListCopies | None = None,
) -> CollectiveCost:
    """``ours`` is `measured_schedules`; sizes are one number or an array."""
    cost = _uncopied_price(kind, size_bytes, network, ours, algorithm)
    return cost if lists is None else lists.added_to(cost, kind, size_bytes, network.size)


def _uncopied_price(
    kind: CollectiveKind, size_bytes: Any, network: Topology, ours: Topology | None, algorithm: str
) -> CollectiveCost:
    if ours is not None and algorithm not in UNNAMED:
        return collective_price(kind, size_bytes, ours, named_on(algorithm, ours))
    backend = collective_price(kind, size_bytes, network, algorithm)
    if ours is None or algorithm != "auto":
        return backend
    own = collective_price(kind, size_bytes, ours, "auto")
    pays = own.seconds < PAYS_BELOW * backend.seconds
    if not is_array(size_bytes):
        return own if pays else backend
    return cheapest_where([backend, own], [~pays, pays])


@dataclass(frozen=True)
class GradientTime:
    """Seconds per step of a gradient reduction, alone on the network, by the chosen schedule and by the backend."""

    payload: Payload
    choice: Choice
    times: float

    @property
    def seconds(self) -> float:
        return self.times * self.choice.seconds

    @property
    def backend_seconds(self) -> float:
        return self.times * self.choice.backend_seconds


def gradient_times(analysis: Analysis) -> list[GradientTime]:
    """Every gradient reduction that one of our schedules takes over from the backend."""
    job, times = analysis.job, []
    runs_of = {(group.share, group.kind): group.runs for group in gradient_groups(job)}
    for traffic in analysis.dimension_traffics("dp"):
        runs = runs_of.get((traffic.payload.share, traffic.kind))
        if runs is None or traffic.payload.role not in (Role.GRADIENTS, Role.LATE_GRADIENTS):
            continue
        try:
            choice = choose(traffic.kind, traffic.size_bytes, job.cluster, runs, job.strategy.collective)
        except SpecError:  # priced by the cheapest, and refused by the engine
            continue
        if choice.schedule is not None:
            times.append(GradientTime(traffic.payload, choice, traffic.count))
    return times


# -- what is sent ---------------------------------------------------------------------------------


def _thin(rank: int, parameters: float, matrices: Iterator[tuple[float, float, float]]) -> tuple[float, float]:
    """Elements of the two sums under powersgd: left factors with what is not a matrix, and right factors.

    ``matrices``: how many there are, rows and columns.
    """
    left = right = replaced = 0.0
    for count, rows, columns in matrices:
        width = low_rank(rank, rows, columns)
        if width:
            left += count * rows * width
            right += count * columns * width
            replaced += count * rows * columns
    return left + parameters - replaced, right


def _dense_matrices(model: Model, strategy: Strategy, contents: RankContents) -> Iterator[tuple[float, float, float]]:
    """How many matrices there are, and their rows and columns on a device."""
    tp, moe = strategy.tp, model.moe
    shared = model.mlp_matrices(moe.shared_ffn) if moe and moe.shared_ffn else ()
    for kind, count in contents.held:
        for matrix in model.mixer_matrices(kind):
            yield (count, *_cut(matrix, tp))
    for matrix in model.mlp_matrices(model.ffn):
        yield (contents.layers - contents.moe_layers, *_cut(matrix, tp))
    for matrix in (*shared, *(model.router_matrices if moe else ())):
        yield (contents.moe_layers, *_cut(matrix, tp))
    vocabulary = (model.vocab / tp, float(model.hidden))
    if contents.has_embedding:
        yield (1, *vocabulary)
        if model.positions == "learned":
            yield (1, model.max_seq, model.hidden)
    if contents.has_head and not (model.tied_embeddings and contents.has_embedding):
        yield (1, *vocabulary)


def _expert_matrices(model: Model, strategy: Strategy, contents: RankContents) -> Iterator[tuple[float, float, float]]:
    if model.moe is None:
        return
    for matrix in model.mlp_matrices(model.moe.ffn):
        count = contents.moe_layers * model.moe.experts / strategy.ep
        yield (count, *_cut(matrix, strategy.expert_tensor_parallel))


def _cut(matrix: Matrix, tensor: int) -> tuple[float, float]:
    rows, columns, share = float(matrix.outputs), float(matrix.inputs), matrix.share(tensor)
    if matrix.split == "column":
        rows *= share
    elif matrix.split == "row":
        columns *= share
    return rows, columns


def data_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Collectives over the ranks that hold the same parameters: cp·dp, and expert data parallelism."""
    strategy, shards = job.strategy, divided_over(job.strategy)
    once = sharding_of(strategy).gathers_once
    dense_units, expert_units = communication_units(job, contents, strategy.gradient_group, gathers_once=once)
    dense, experts = sent_parameters(job, strategy, contents)
    traffics = _group_traffic(job, Share.DENSE, dense.over(dense_units), dense_units, dense_ranks(strategy, shards))
    if contents.experts or contents.frozen_experts:
        each = experts.over(expert_units)
        traffics += _group_traffic(job, Share.EXPERTS, each, expert_units, expert_ranks(strategy, shards))
    return traffics


class SentParameters(NamedTuple):
    """Numbers of parameters that are sent together, or arrays of them for several kinds of rank."""

    all: Any
    in_layers: Any  # all but embedding and head
    first_factors: Any = 0.0  # elements of the left factors under powersgd, and of what is not a matrix
    second_factors: Any = 0.0  # elements of the right factors under powersgd
    in_blocks: Any = 0.0  # all, rounded up to whole blocks for every rank, under other compression
    multiplied: Any = 0.0  # those that an FP8 recipe multiplies in FP8
    tensors: Any = 1.0  # weights of layers
    whole: Any = 1.0  # the share of all of a rank's parameters that these are
    frozen: Any = 0.0  # bytes of frozen weights in layers, which are gathered for every use or never
    frozen_ends: Any = 0.0  # the same of embedding and head
    frozen_above: Any = 0.0  # of ``frozen``, what is gathered for a backward pass too

    def broadcasts(self, owners: Any) -> Any:
        """How many it takes where every owner sends all its weights at once; a share of one, if these are a part."""
        return minimum(self.tensors, self.whole * owners)

    def over(self, units: Any) -> SentParameters:
        """Those of one of so many equal units."""
        return SentParameters(*(figure / units for figure in self))


def sent_parameters(job: Job, strategy: Strategy, contents: RankContents) -> tuple[SentParameters, SentParameters]:
    """Of the dense parameters and of the experts of a rank."""
    thin, model, rank = [(contents.dense, 0.0), (contents.experts, 0.0)], job.model, strategy.compression.rank
    if job.strategy.compression.method == "powersgd" and job.training.tuning.everything:
        thin = [
            _thin(rank, contents.dense, _dense_matrices(model, strategy, contents)),
            _thin(rank, contents.experts, _expert_matrices(model, strategy, contents)),
        ]
    whole = strategy.compression.in_blocks
    dense = whole(contents.dense, strategy.gradient_group)
    experts = whole(contents.experts, strategy.expert_data_parallel)
    in_fp8 = contents.layer_matrices, contents.experts * job.stack.fp8_experts
    tensors, recipe = tensors_of(model, strategy, contents), job.recipe
    frozen = (contents.frozen_matrices * recipe.frozen_gathered, contents.frozen_others * recipe.gathered)
    above = contents.frozen_above * recipe.frozen_gathered
    in_experts = (contents.frozen_experts, 0.0, contents.frozen_experts_above)
    of_experts = (parameters * recipe.of_experts.frozen_gathered for parameters in in_experts)
    return (
        SentParameters(
            contents.dense, contents.layer_matrices, *thin[0], dense, in_fp8[0], tensors[0], 1.0, *frozen, above
        ),
        SentParameters(contents.experts, contents.experts, *thin[1], experts, in_fp8[1], tensors[1], 1.0, *of_experts),
    )


def tensors_of(model: Model, strategy: Strategy, contents: RankContents) -> tuple[float, float]:
    """How many weights a rank's layers have, without biases, and its experts; at least one."""
    of_mlp = len(model.mlp_matrices(model.ffn))
    each = len(model.attention_matrices) + of_mlp + model.norms_per_layer
    experts = model.moe.experts / strategy.ep if model.moe else 0.0
    return max(1.0, contents.layers * each), max(1.0, contents.moe_layers * experts * of_mlp)


_PARAMETERS_OF_A_LAYER = 12  # weight and bias of four matmuls and two norms, as in GPT-3


def communication_units(job: Job, contents: RankContents, ranks: int, *, gathers_once: bool) -> tuple[int, int]:
    """How many pieces of the dense parameters, and of the experts, are reduced or gathered one after the other.

    ``ranks`` is the number of data-parallel ranks. A piece is a layer; as many layers as fill a bucket, where the
    strategy or the stack has a size for buckets; or a single weight or bias, where the stack gathers every parameter by
    itself.
    """
    layers, moe_layers = max(1, contents.layers), max(1, contents.moe_layers)
    if job.stack.per_parameter_gathers:
        return layers * _PARAMETERS_OF_A_LAYER, moe_layers
    elements: float = job.stack.bucket_per_rank * ranks if gathers_once else 0
    if job.strategy.bucket is not None:
        elements = job.strategy.bucket / job.training.recipe.weight
    if not elements:
        return layers, moe_layers
    each = (contents.dense / layers, contents.experts / moe_layers)
    dense, experts = (math.ceil(elements / size) if size else 1 for size in each)
    return math.ceil(layers / dense), math.ceil(moe_layers / experts)


class GradientWire(NamedTuple):
    """How data parallelism sends gradients and parameters."""

    gradient: float  # bytes of an element of a gradient that is reduced
    weight: float  # bytes of a parameter that is gathered
    gather_hides: bool  # whether a pass can hide the gather of updated parameters
    ends_once: bool = False  # embedding and head are gathered once for both passes
    sums_once: bool = False
    """Copies of gradient shards are summed once a step, even where gradients are reduced for every microbatch."""
    compression: Compression = Compression()  # that of whole gradients
    synchronise: Synchronise = Synchronise()  # when workers synchronise
    narrower: float = 0.0  # bytes saved for each parameter that is gathered for every use and multiplied in FP8
    owned: bool = False  # every parameter has one owner under ZeRO-1 (`Stack.owned_parameters`)
    forward_passes: int = 1  # of a microbatch, for each of which weights are gathered
    frozen: bool = False  # gradients of frozen weights in layers are reduced too, in 16 bits (`Stack.flat_parameters`)


def wire_bytes(job: Job, pp: int) -> GradientWire:
    """What the stack sends; parameters that it gathers in the optimizer's step are waited for."""
    recipe, stack = job.training.recipe, job.stack
    gradient = min(recipe.gradient, 2.0) if stack.gradient_reduce == "bf16" else recipe.gradient
    narrow = stack.parameter_gather == "fp8" and recipe.compute in ("fp8", "fp4")
    fsdp = stack.sharded_parameters == "fp32 shards"
    gathered = 1.0 if narrow else recipe.weight
    late, compression = not (stack.per_parameter_shards or stack.owned_parameters), job.strategy.compression
    narrower = job.recipe.gathered - job.recipe.gathered_for_every_use
    return GradientWire(
        gradient, gathered, late, fsdp, fsdp and pp == 1, compression, job.strategy.synchronise, narrower,
        stack.owned_parameters, job.training.forward_passes, job.recipe.frozen_gradients,
    )  # fmt: skip


@dataclass(frozen=True)
class DataLine:
    """One collective over the shards or the replicas of a group of parameters, once per unit (a layer, or a bucket)."""

    payload: Payload
    kind: CollectiveKind
    over: Literal["shards", "replicas"]
    unit_bytes: Any
    times: Any  # how often a step sends all units
    window_share: Any
    last_only: bool

    @property
    def window(self) -> Pass:
        """The pass that it may run under."""
        return self.payload.in_pass

    def communicator(self, library: str, share: Share, *, gathers_once: bool) -> str:
        """What it takes turns on with another line of its pass, if there is one.

        NCCL runs the collectives of a communicator one after the other, on whatever streams (its author in NVIDIA/nccl
        issue 574). In a backward pass under ZeRO-3, weights are gathered and gradients reduced over the same ranks, by
        one communicator (pytorch/pytorch pull request 186335): one waits for the latencies of the other too.
        """
        alone = gathers_once or self.window != "backward" or self.over != "shards"
        return "" if library != "nccl" or alone else f"{share.value}communicator"

    def by_schedules(self, ranks: SharedRanks) -> bool:
        """Whether the engine may run a schedule of ours for it: sums of gradients, not those between shard groups."""
        sums = self.payload.role in (Role.GRADIENTS, Role.GRADIENT_SHARDS)
        return sums and self.kind is (CollectiveKind.REDUCE_SCATTER if ranks.sharded else CollectiveKind.ALL_REDUCE)


def data_lines(
    sharding: Sharding,
    unit: SentParameters,
    shards: Any,
    wire: GradientWire,
    microbatches: Any,
    last: Any,
) -> list[DataLine]:
    """What one group of parameters sends; ``last`` is the share of a pass in which gradients are complete.

    Numbers of one strategy, or columns of a table of them.
    """
    gradient, weight = wire.gradient, wire.weight
    always = sharding.reduced_to_shards(shards) if wire.ends_once else sharding.gradients_sharded
    reductions, share = select(always, microbatches, 1), select(always, 1.0, last)
    gathers, gather_share = (1, last if wire.gather_hides else 0.0) if sharding.gathers_once else (microbatches, 1.0)
    whole, part = unit.all * gradient, unit.all * gradient / shards
    again = not (sharding.gathers_once or sharding.offload.weights)
    less = unit.multiplied * wire.narrower if again else 0.0
    frozen, frozen_ends = (0.0, 0.0) if sharding.gathers_once else (unit.frozen, unit.frozen_ends)
    gathered = unit.all * weight - less + frozen + frozen_ends
    if wire.frozen:
        whole = whole + frozen
    owned = wire.owned and sharding.gathers_once
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE if owned else CollectiveKind.REDUCE_SCATTER
    # A broadcast passes on as many bytes as a gather, over as many hops.
    pieces = unit.broadcasts(shards) if owned else 1
    late = not sharding.gradients_sharded
    sums, sum_share, sums_late = (1, last, True) if wire.sums_once else (reductions, share, late)
    lines = [
        DataLine(sent_backward(Role.GRADIENTS), scatter, "shards", whole, reductions, share, late),
        DataLine(
            sent_forward(Role.PARAMETERS),
            gather,
            "shards",
            gathered / pieces,
            (gathers if sharding.gathers_once else gathers * wire.forward_passes) * pieces,
            gather_share,
            sharding.gathers_once,
        ),
    ]
    if wire.synchronise.every_step:
        lines += [
            DataLine(sent_backward(role), kind, "replicas", size, sums, sum_share, sums_late)
            for role, kind, size in _sums(unit, part, wire.compression)
        ]
    else:
        lines.append(_meeting(unit, part, wire.synchronise))
    if not sharding.gathers_once:
        in_layers = unit.in_layers * weight - less + unit.frozen_above
        once_more = in_layers if wire.ends_once else gathered - frozen + unit.frozen_above
        lines.insert(0, DataLine(sent_backward(Role.PARAMETERS), gather, "shards", once_more, microbatches, 1.0, False))
    return lines


def _sums(unit: SentParameters, part: Any, compression: Compression) -> list[tuple[Role, CollectiveKind, Any]]:
    """Collectives that sum gradients over replicas: one all-reduce, or what compression replaces it by.

    Codes: an all-to-all gives each rank the codes of its piece, which it adds up; the sums are gathered as codes.
    Powersgd: the first factors are summed, then the second, which are computed from that sum.
    """
    reduce = CollectiveKind.ALL_REDUCE
    if not compression.is_used:
        return [(Role.GRADIENT_SHARDS, reduce, part)]
    if compression.method == "powersgd":
        return [
            (Role.FIRST_FACTORS, reduce, 4 * unit.first_factors),
            (Role.SECOND_FACTORS, reduce, 4 * unit.second_factors),
        ]
    codes = unit.in_blocks * compression.element_bytes
    return [
        (Role.GRADIENT_CODES, CollectiveKind.ALL_TO_ALL, codes),
        (Role.CODES_OF_SUMS, CollectiveKind.ALL_GATHER, codes),
    ]


def _meeting(unit: SentParameters, part: Any, synchronise: Synchronise) -> DataLine:
    """What workers send if they do not sum their gradients in every step.

    Either weights once in several steps, which nothing hides; or gradients, asynchronously, which hide under all of the
    steps until they are used. A forward pass takes half as long as a backward pass, so a step is 1.5 backward passes.
    """
    reduce = CollectiveKind.ALL_REDUCE
    if synchronise.is_async:
        under = 1.5 * synchronise.staleness
        return DataLine(sent_backward(Role.LATE_GRADIENTS), reduce, "replicas", part, 1, under, False)
    often = 1 / synchronise.inner_steps
    return DataLine(sent_backward(Role.WORKERS_WEIGHTS), reduce, "replicas", 4 * unit.all, often, 0.0, True)


def last_share(pp: int, schedule: str, microbatches: Any) -> Any:
    """Share of a pass in which gradients are complete: that of the last microbatch; the last round, if in rounds."""
    return minimum(1.0, schedule_record(schedule).rounds(pp) / microbatches)


def _group_traffic(job: Job, share: Share, unit: SentParameters, units: int, ranks: SharedRanks) -> list[Traffic]:
    strategy, m = job.strategy, job.microbatches
    last = last_share(strategy.pp, strategy.schedule, m)
    traffics = []
    wire, sharding, library = wire_bytes(job, strategy.pp), sharding_of(strategy), job.cluster.library
    hides = strategy.overlap.dp and not job.stack.has_adapter_units(job.training, strategy)
    for line in data_lines(sharding, unit, ranks.shards, wire, m, last):
        runs = ranks.sharded if line.over == "shards" else ranks.replicas
        topology = spanned(job.cluster, runs, "strategy.dp", neighbours_of(job.cluster.library, line.kind))
        if topology is None or not line.unit_bytes:  # frozen, for one
            continue
        ours = measured_schedules(job.cluster, runs) if line.by_schedules(ranks) else None
        payload = line.payload._replace(share=share)
        if payload.role is Role.GRADIENT_SHARDS and ranks.shards == 1:
            payload = payload._replace(role=Role.GRADIENTS)
        traffics.append(
            Traffic(
                "dp",
                payload,
                line.kind,
                line.unit_bytes,
                line.times * units,
                gradient_price(line.kind, line.unit_bytes, topology, ours, strategy.collective, ListCopies.of(job)),
                level_names(topology),
                window=line.window if hides else "none",
                window_share=line.window_share,
                last_only=line.last_only,
                unhideable=1 / units,
                communicator=line.communicator(library, share, gathers_once=sharding.gathers_once),
            )
        )
    return traffics


# -- Parameter servers: which weights each server keeps, what crosses its link, and how long that takes
# Workers push gradients to the servers, which update the weights; workers pull these (Li et al., OSDI 2014). All
# workers' bytes cross a server's link, those of an all-reduce are spread over all links: with one server and n workers
# it carries n·G in and n·W out, a ring 2·(n−1)/n·G each way at every rank. With as many servers as workers, each with a
# link of its own, both carry about the same (Jiang et al., OSDI 2020, section 3).


@dataclass(frozen=True)
class ServerPrice:
    """Seconds of one step's exchange, beside those of an all-reduce of the same gradients.

    ``synchronous``: all push, then all pull. ``saturated``: what the busiest link needs for one gradient of every
    worker, both directions at once; asynchronous workers cannot be faster, however little they compute.
    ``unhindered``: one worker alone with the servers.
    """

    synchronous: float
    saturated: float
    unhindered: float
    all_reduce: CollectiveCost

    def asynchronous(self, compute_seconds: float) -> float:
        """A step of every worker: computing and exchanging by itself, unless the servers' links are the limit."""
        return max(compute_seconds + self.unhindered, self.saturated)


def server_price(plan: ServerPlan, cluster: Cluster) -> ServerPrice:
    """Over the outermost network of ``cluster``, whose devices are the workers; each server has a link like theirs."""
    topology = network(cluster)
    level = topology.levels[-1]

    def over_link(size_bytes: float) -> float:
        return float(p2p_latency(size_bytes, level).latency)

    reduced = collective_cost(CollectiveKind.ALL_REDUCE, plan.elements * plan.gradient_bytes, topology, "auto")
    return ServerPrice(
        synchronous=over_link(plan.push_bytes) + over_link(plan.pull_bytes),
        saturated=max(over_link(plan.push_bytes), over_link(plan.pull_bytes)),
        unhindered=over_link(plan.elements * plan.gradient_bytes) + over_link(plan.elements * plan.weight_bytes),
        all_reduce=reduced,
    )
