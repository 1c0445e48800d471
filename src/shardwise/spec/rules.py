"""What must hold between the parts of a job, each broken rule with the nearest value that would hold."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from shardwise.spec.clusters import mixed_kinds
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import TARGETS, Tuning
from shardwise.spec.hardware import Cluster
from shardwise.spec.kinds import across_kinds
from shardwise.spec.model import Model
from shardwise.spec.parameters import trained_parameters
from shardwise.spec.run import Run
from shardwise.spec.schedules import PLAIN
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


def completed_strategy(cluster: Cluster, strategy: Strategy) -> Strategy:
    """The strategy with ``dp`` filled in: all devices that the other dimensions leave."""
    if strategy.dp is not None:
        return strategy
    others = strategy.tp * strategy.cp * strategy.pp if strategy.stage_tp is None else strategy.world
    if cluster.devices % others:
        degrees = f"tp {strategy.tp} × cp {strategy.cp} × pp {strategy.pp} = {others}"
        if strategy.stage_tp is not None:
            degrees = f"the {others} ranks of all stages at dp 1: their number"
        low = cluster.devices // others * others
        remedy = f"use {low} or {low + others} devices" if low else f"use {others} devices or smaller degrees"
        raise SpecError("strategy", f"{degrees} does not divide the cluster's {cluster.devices} devices", remedy)
    return replace(strategy, dp=cluster.devices // others)


def check_model_fits(model: Model, strategy: Strategy, training: Training) -> None:
    """Raises SpecError for the first rule that the strategy breaks whatever the cluster is."""
    _check_tuning(model, training)
    for stage in _of_stages(strategy):
        _check_heads(model, stage, training)
    _check_stages(model, strategy)
    for stage in _of_stages(strategy):
        _check_sequence(model, stage, training)


def _of_stages(strategy: Strategy) -> list[Strategy]:
    """The strategy as the pipeline ranks see it, one of each kind."""
    if not strategy.has_unlike_stages:
        return [strategy]
    return list(dict.fromkeys(map(strategy.of_stage, range(strategy.pp))))


def _check_tuning(model: Model, training: Training) -> None:
    """Raises SpecError for adapters or trained parts that the model has no place for."""
    adapters = training.adapters
    if adapters is not None:
        built = {matrix.role for matrix in (*model.attention_matrices, *model.mlp_matrices(model.ffn))}
        for index, name in enumerate(adapters.targets):
            if built.isdisjoint(TARGETS[name]):
                names = ", ".join(target for target, roles in TARGETS.items() if not built.isdisjoint(roles))
                path = f"training.adapters.targets[{index}]"
                raise SpecError(path, f"{model.name} has no {name}", f"choose of {names}")
        beyond = next((layer for layer in adapters.layers if layer >= model.layers), None)
        if beyond is not None:
            remedy = f"use 0 to {model.layers - 1}"
            raise SpecError("training.adapters.layers", f"{beyond} is beyond the {model.layers} layers", remedy)
        if adapters.experts and model.moe is None:
            raise SpecError("training.adapters.experts", f"true, but {model.name} has no experts", "leave it out")
    for index, pattern in enumerate(training.tuning.patterns):
        path, text = f"training.trained[{index}]", training.trained[index]
        if pattern.part in ("experts", "router") and model.moe is None:
            raise SpecError(path, f"{text}, but {model.name} has no experts", "leave it out")
        if pattern.part == "head" and model.tied_embeddings:
            raise SpecError(path, f"{text}, but the head of {model.name} is its embedding", "use embedding")
        if pattern.layers_only and pattern.first >= model.layers:
            raise SpecError(path, f"{text} is beyond the {model.layers} layers", f"use 0 to {model.layers - 1}")
    if model.moe is None or not training.freezes:
        return
    if adapters is not None and not _trained(model, Tuning(adapters)):
        problem = f"{', '.join(adapters.targets)}, which {model.name} has in its experts alone"
        raise SpecError("training.adapters.targets", problem, "add experts: true, or name others")
    if adapters is None and not _trained(model, training.tuning):
        problem = f"{', '.join(training.trained)}, of which {model.name} has nothing"
        raise SpecError("training.trained", problem, "name other parts, such as experts or norms")


@lru_cache(maxsize=64)
def _trained(model: Model, tuning: Tuning) -> int:
    """As `trained_parameters`; a planner asks for every strategy."""
    return trained_parameters(model, tuning)


def check_job(model: Model, cluster: Cluster, strategy: Strategy, training: Training) -> None:
    """Raises SpecError for the first rule that the complete job breaks."""
    _check_world(cluster, strategy)
    mixed = mixed_kinds(cluster)
    if mixed is not None:
        across_kinds(mixed, strategy)
    for stage in _of_stages(strategy):
        _check_experts(model, stage)
        _check_sharding(stage)
    _check_batch(training, strategy)


def check_emulation(emulation: Emulation | None, strategy: Strategy) -> None:
    """Raises SpecError if the virtual nodes do not have as many ranks as the job."""
    if emulation is None or emulation.world == strategy.world:
        return
    shape = f"{emulation.nodes}x{emulation.ranks_per_node}"
    problem = f"{shape} are {emulation.world} ranks, but the job has {strategy.world}"
    raise SpecError("run.emulate", problem, f"use a cluster of {emulation.world} devices, or other nodes")


def check_workers(run: Run, strategy: Strategy) -> None:
    """Raises SpecError for policies that need all ranks to agree in every step where they do not synchronise then."""
    if strategy.synchronise.every_step or strategy.data_parallel == 1:
        return
    if run.spikes.factor is not None or run.non_finite.policy != "skip":
        field = "run.spikes.factor" if run.spikes.factor is not None else "run.non_finite.policy"
        problem = f"with strategy.synchronise: {strategy.synchronise.method} every worker sees its own losses"
        raise SpecError(field, problem, "leave it out")


def _check_world(cluster: Cluster, strategy: Strategy) -> None:
    if strategy.world == cluster.devices:
        return
    if strategy.has_unlike_stages:
        problem = f"the stages have {strategy.world} ranks together, but the cluster has {cluster.devices} devices"
        raise SpecError("strategy", problem, f"use {strategy.world} devices, or other stage_tp and stage_dp")
    degrees = " × ".join(f"{name} {strategy.degree(name)}" for name in strategy.order)
    others = strategy.world // strategy.data_parallel
    remedy = f"use {strategy.world} devices, or other degrees"
    if cluster.devices % others == 0:
        remedy = f"use dp {cluster.devices // others}, or {strategy.world} devices"
    problem = f"{degrees} = {strategy.world} ranks, but the cluster has {cluster.devices} devices"
    raise SpecError("strategy", problem, remedy)


def _check_heads(model: Model, strategy: Strategy, training: Training) -> None:
    tp, kv_heads = strategy.tp, model.key_value_heads
    broken = [f"{model.heads} query heads"] if model.heads % tp else []
    broken += [f"{kv_heads} key-value heads"] if kv_heads % tp and tp % kv_heads else []
    broken += [f"{what} {width}" for what, width in _split_widths(model) if width % tp]
    broken += [f"{model.delta.key_heads} key heads of delta nets"] if model.delta and model.delta.key_heads % tp else []
    if model.delta and strategy.cp > 1:
        problem = f"{strategy.cp}, but states of delta nets are not passed between context ranks yet"
        raise SpecError("strategy.cp", problem, "use cp 1")
    if broken:
        raise _not_dividing("strategy.tp", tp, broken[0], _valid_tp(model, strategy, training))
    per_rank = model.heads // tp
    if strategy.context_method == "ulysses" and per_rank % strategy.cp:
        what = f"{per_rank} query heads per rank (ulysses)"
        raise _not_dividing("strategy.cp", strategy.cp, what, _valid_cp(model, strategy, training))


def _split_widths(model: Model) -> list[tuple[str, int]]:
    """Widths of the MLPs that tensor parallelism cuts."""
    widths = [("ffn", model.ffn)] if model.moe is None or model.moe_layers < model.layers else []
    return [*widths, ("shared expert ffn", model.moe.shared_ffn)] if model.moe and model.moe.shared_ffn else widths


def _valid_tp(model: Model, strategy: Strategy, training: Training) -> list[int]:
    """Every tp that the model and the sequence allow; 1 always is."""
    kv_heads, widths = model.key_value_heads, [width for _, width in _split_widths(model)]
    if model.moe and strategy.expert_tp is None:
        widths.append(model.moe.ffn)
    if strategy.sequence_parallel and training.seq % strategy.cp == 0:
        widths.append(training.seq // strategy.cp)
    heads = math.gcd(model.heads, model.delta.key_heads) if model.delta else model.heads
    repeated = (tp for tp in divisors(heads) if not (kv_heads % tp and tp % kv_heads))
    return [tp for tp in repeated if not any(width % tp for width in widths)]


def _valid_cp(model: Model, strategy: Strategy, training: Training) -> list[int]:
    """Every cp that the sequence allows, and the heads where they are exchanged."""
    heads = model.heads // strategy.tp if strategy.context_method == "ulysses" else 0
    tokens = training.seq // strategy.tp if strategy.sequence_parallel else training.seq
    return [cp for cp in divisors(training.seq) if heads % cp == 0 and tokens % cp == 0]


def _check_experts(model: Model, strategy: Strategy) -> None:
    if model.moe is None:
        for name, degree in (("ep", strategy.ep), ("expert_tp", strategy.expert_tp or 1)):
            if degree > 1:
                raise SpecError(f"strategy.{name}", f"{degree}, but {model.name} has no experts", f"use {name} 1")
        return
    ranks, expert_tp = strategy.tp * strategy.cp * strategy.data_parallel, strategy.expert_tensor_parallel
    if model.moe.ffn % expert_tp or ranks % expert_tp:
        what = f"expert ffn {model.moe.ffn}" if model.moe.ffn % expert_tp else f"the {ranks} ranks of a stage"
        valid = [degree for degree in divisors(model.moe.ffn) if ranks % (degree * strategy.ep) == 0] or [1]
        raise _not_dividing("strategy.expert_tp", expert_tp, what, valid)
    valid = [degree for degree in divisors(model.moe.experts) if ranks % (degree * expert_tp) == 0]
    if model.moe.experts % strategy.ep:
        raise _not_dividing("strategy.ep", strategy.ep, f"{model.moe.experts} experts", valid)
    if ranks % (strategy.ep * expert_tp):
        what = f"the {ranks} ranks of a stage (tp·cp·dp) with expert_tp {expert_tp}"
        raise _not_dividing("strategy.ep", strategy.ep, what, valid)


def _check_stages(model: Model, strategy: Strategy) -> None:
    stages, chunks = strategy.stages, strategy.chunks_per_rank
    times = f" × {chunks} chunks" if chunks > 1 else ""
    if chunks > model.layers:
        can_shrink = strategy.interleave > 1 and model.layers > 1
        field, remedy = ("interleave", f"at most {model.layers}") if can_shrink else ("schedule", PLAIN)
        raise SpecError(f"strategy.{field}", f"{chunks} chunks for {model.layers} layers", f"use {remedy}")
    if isinstance(strategy.stage_layers, tuple):
        if sum(strategy.stage_layers) != model.layers:
            problem = f"add up to {sum(strategy.stage_layers)}"
            raise SpecError("strategy.stage_layers", problem, f"{model.name} has {model.layers}")
        # The first and the last stage may hold nothing but the embedding or the loss.
        if min(strategy.stage_layers) < 0 or 0 in strategy.stage_layers[1:-1]:
            raise SpecError("strategy.stage_layers", "has a stage without layers", "give each at least 1")
    elif strategy.stage_layers == "even" and model.layers % stages:
        valid = [degree // chunks for degree in divisors(model.layers) if degree % chunks == 0]
        nearest = [_around(strategy.pp, valid)] if valid else []
        balanced = ["stage_layers: balanced"] if stages <= most_stages(model.layers, chunks) else []
        remedy = ", or ".join(nearest + balanced) or f"at most {model.layers // chunks}"
        raise SpecError("strategy.pp", f"{strategy.pp}{times} does not divide {model.layers} layers", f"use {remedy}")
    elif stages > most_stages(model.layers, chunks):
        remedy = f"use at most {most_stages(model.layers, chunks) // chunks}"
        raise SpecError("strategy.pp", f"{strategy.pp}{times} for {model.layers} layers", remedy)


def sequence_note(model: Model, training: Training) -> str | None:
    """A note for sequences longer than those a model with rotary positions was trained for."""
    known = bool(model.source) or model.max_seq != Model.max_seq  # otherwise max_seq is only the default
    if model.positions != "rope" or training.seq <= model.max_seq or not known:
        return None
    return (
        f"sequences of {training.seq:,} tokens are longer than the {model.max_seq:,} of {model.name}: rotary positions "
        "extrapolate, but weights trained on shorter sequences may not (model.max_seq)"
    )


def _check_sequence(model: Model, strategy: Strategy, training: Training) -> None:
    if model.positions == "learned" and training.seq > model.max_seq:
        problem = f"{training.seq:,} tokens, but {model.name} has {model.max_seq:,} learned positions"
        raise SpecError("training.seq", problem, f"use {model.max_seq} or fewer")
    if training.seq % strategy.cp:
        what = f"sequence length {training.seq}"
        raise _not_dividing("strategy.cp", strategy.cp, what, _valid_cp(model, strategy, training) or [1])
    per_rank = training.seq // strategy.cp
    if strategy.sequence_parallel and strategy.tp > 1 and per_rank % strategy.tp:
        what = f"{per_rank} tokens of a sequence (sequence parallel)"
        raise _not_dividing("strategy.tp", strategy.tp, what, _valid_tp(model, strategy, training))


def _check_sharding(strategy: Strategy) -> None:
    group = strategy.shard_group
    if group is None:
        return
    if strategy.zero == 0:
        raise SpecError("strategy.shard_group", f"{group} needs ZeRO", "set zero to 1, 2 or 3")
    if strategy.gradient_group % group:
        what = f"the {strategy.gradient_group} ranks of cp·dp"
        raise _not_dividing("strategy.shard_group", group, what, divisors(strategy.gradient_group))


def _check_batch(training: Training, strategy: Strategy) -> None:
    shares = strategy.dp_shares
    if shares is not None and len(shares) != strategy.data_parallel:
        problem = f"names {len(shares)} data-parallel ranks"
        raise SpecError("strategy.dp_shares", problem, f"give {strategy.data_parallel}")
    multiple = strategy.shares * strategy.microbatch
    sequences = training.sequences(strategy.batch_multiple)
    if sequences % multiple:
        whole = strategy.batch_multiple
        low = sequences // whole * whole
        nearest = f"use {low + whole}" if low == 0 else f"use {low} or {low + whole}"
        replicas = f"dp {strategy.data_parallel}" if shares is None else f"{strategy.shares} dp_shares"
        degrees = f"{replicas} × microbatch {strategy.microbatch}"
        raise SpecError("training.global_batch", f"{sequences} sequences do not divide over {degrees}", nearest)
    microbatches = sequences // multiple * min(shares or (1,))
    rounds = strategy.schedule_record.rounds(strategy.pp)
    if sequences % strategy.batch_multiple:
        problem = f"{microbatches} microbatches are not a multiple of pp {rounds}"
        remedy = f"use {-(-sequences // strategy.batch_multiple) * strategy.batch_multiple} sequences"
        raise SpecError("training.global_batch", f"{problem}, which schedule {strategy.schedule} needs", remedy)


def stage_layer_counts(model: Model, strategy: Strategy) -> tuple[int, ...]:
    """Layers of every stage (pp × chunks of them, in model order)."""
    stages = strategy.stages
    if isinstance(strategy.stage_layers, tuple):
        return strategy.stage_layers
    if strategy.stage_layers == "balanced":
        return _balanced(model.layers, stages, model.mtp_layers)
    return (model.layers // stages,) * stages


def most_stages(layers: int, chunks: int) -> int:
    """Stages that layers are divided over: of several on a rank, the first may hold the embedding alone, the last the
    loss."""
    return layers + 2 if chunks > 1 else layers


def _balanced(layers: int, stages: int, beside_head: int = 0) -> tuple[int, ...]:
    """As even as possible, the spare layers in the middle: the ends also hold embedding and loss.

    Layers of prediction modules, ``beside_head``, are layers of the last stage. With a stage or two more than layers
    the ends hold none, as in Llama 3 (arXiv 2407.21783, section 3.3.2: 126 layers, 128 chunks).
    """
    if beside_head and 1 < stages <= layers:
        last = max(0, (layers + beside_head) // stages - beside_head)
        return (*_balanced(layers - last, stages - 1), last)
    each, spare = divmod(layers, stages)
    first = (stages - spare) // 2
    return tuple(each + (first <= index < first + spare) for index in range(stages))


def divisors(number: int) -> list[int]:
    """The divisors of ``number``: all of them up to 10^12, of a larger number those next to its ends."""
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _not_dividing(field: str, value: int, what: str, valid: list[int]) -> SpecError:
    return SpecError(field, f"{value} does not divide {what}", f"use {_around(value, valid)}")


def _around(value: int, valid: list[int]) -> str:
    below = max((v for v in valid if v < value), default=None)
    above = min((v for v in valid if v > value), default=None)
    return " or ".join(str(v) for v in (below, above) if v is not None)
