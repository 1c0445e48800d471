"""What must hold between the parts of a job, each broken rule with the nearest value that would hold."""

from __future__ import annotations

from dataclasses import replace

from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


def completed_strategy(cluster: Cluster, strategy: Strategy) -> Strategy:
    """The strategy with ``dp`` filled in: all devices that the other dimensions leave."""
    if strategy.dp is not None:
        return strategy
    others = strategy.tp * strategy.cp * strategy.pp
    if cluster.devices % others:
        raise SpecError(
            "strategy",
            f"tp {strategy.tp} × cp {strategy.cp} × pp {strategy.pp} = {others} does not divide "
            f"the cluster's {cluster.devices} devices",
            _nearest_devices(others, cluster.devices),
        )
    return replace(strategy, dp=cluster.devices // others)


def check_model_fits(model: Model, strategy: Strategy, training: Training) -> None:
    """Raises SpecError for the first rule that the strategy breaks whatever the cluster is."""
    _check_heads(model, strategy)
    _check_stages(model, strategy)
    _check_sequence(training, strategy)


def check_job(model: Model, cluster: Cluster, strategy: Strategy, training: Training) -> None:
    """Raises SpecError for the first rule that the complete job breaks."""
    _check_world(cluster, strategy)
    _check_experts(model, strategy)
    _check_sharding(strategy)
    _check_batch(training, strategy)


def _check_world(cluster: Cluster, strategy: Strategy) -> None:
    if strategy.world == cluster.devices:
        return
    degrees = " × ".join(f"{name} {strategy.degree(name)}" for name in strategy.order)
    others = strategy.world // strategy.data_parallel
    if cluster.devices % others == 0:
        remedy = f"use dp {cluster.devices // others}, or {strategy.world} devices"
    else:
        remedy = f"use {strategy.world} devices, or other degrees"
    raise SpecError(
        "strategy",
        f"{degrees} = {strategy.world} ranks, but the cluster has {cluster.devices} devices",
        remedy,
    )


def _check_heads(model: Model, strategy: Strategy) -> None:
    if model.heads % strategy.tp:
        raise _not_dividing("strategy.tp", strategy.tp, f"{model.heads} query heads", divisors(model.heads))
    per_rank = model.heads // strategy.tp
    if strategy.context_method == "ulysses" and per_rank % strategy.cp:
        raise _not_dividing(
            "strategy.cp", strategy.cp, f"{per_rank} query heads per rank (ulysses)", divisors(per_rank)
        )
    if model.key_value_heads % strategy.tp and strategy.tp % model.key_value_heads:
        valid = [t for t in divisors(model.heads) if not (model.key_value_heads % t and t % model.key_value_heads)]
        raise _not_dividing("strategy.tp", strategy.tp, f"{model.key_value_heads} key-value heads", valid)
    widths = [("ffn", model.ffn)] if model.moe is None or model.moe_layers < model.layers else []
    if model.moe and model.moe.shared_ffn:
        widths.append(("shared expert ffn", model.moe.shared_ffn))
    for what, width in widths:
        if width % strategy.tp:
            raise _not_dividing("strategy.tp", strategy.tp, f"{what} {width}", divisors(width))


def _check_experts(model: Model, strategy: Strategy) -> None:
    if model.moe is None:
        for name, degree in (("ep", strategy.ep), ("expert_tp", strategy.expert_tp or 1)):
            if degree > 1:
                raise SpecError(f"strategy.{name}", f"{degree}, but {model.name} has no experts", f"use {name} 1")
        return
    if model.moe.experts % strategy.ep:
        raise _not_dividing("strategy.ep", strategy.ep, f"{model.moe.experts} experts", divisors(model.moe.experts))
    if model.moe.ffn % strategy.expert_tensor_parallel:
        raise _not_dividing(
            "strategy.expert_tp",
            strategy.expert_tensor_parallel,
            f"expert ffn {model.moe.ffn}",
            divisors(model.moe.ffn),
        )
    ranks = strategy.tp * strategy.cp * strategy.data_parallel
    if ranks % (strategy.ep * strategy.expert_tensor_parallel):
        valid = [d for d in divisors(ranks) if ranks % (d * strategy.expert_tensor_parallel) == 0] or [1]
        raise _not_dividing(
            "strategy.ep",
            strategy.ep,
            f"the {ranks} ranks of a stage (tp·cp·dp) with expert_tp {strategy.expert_tensor_parallel}",
            valid,
        )


def _check_stages(model: Model, strategy: Strategy) -> None:
    stages = strategy.pp * strategy.chunks_per_rank
    if stages > model.layers:
        raise SpecError("strategy.pp", f"{stages} stages for {model.layers} layers", f"use at most {model.layers}")
    if isinstance(strategy.stage_layers, tuple):
        if sum(strategy.stage_layers) != model.layers:
            raise SpecError(
                "strategy.stage_layers",
                f"add up to {sum(strategy.stage_layers)}",
                f"{model.name} has {model.layers}",
            )
        if min(strategy.stage_layers) < 1:
            raise SpecError("strategy.stage_layers", "has a stage without layers", "give each at least 1")
    elif strategy.stage_layers == "even" and model.layers % stages:
        valid = [d for d in divisors(model.layers) if d % strategy.chunks_per_rank == 0]
        valid = sorted({d // strategy.chunks_per_rank for d in valid}) or [1]
        error = _not_dividing("strategy.pp", strategy.pp, f"{model.layers} layers", valid)
        raise SpecError(error.field, error.problem, error.remedy + ", or stage_layers: balanced")


def _check_sequence(training: Training, strategy: Strategy) -> None:
    if training.seq % strategy.cp:
        raise _not_dividing("strategy.cp", strategy.cp, f"sequence length {training.seq}", divisors(training.seq))
    per_rank = training.seq // strategy.cp
    if strategy.sequence_parallel and strategy.tp > 1 and per_rank % strategy.tp:
        raise _not_dividing(
            "strategy.tp",
            strategy.tp,
            f"{per_rank} tokens of a sequence (sequence parallel)",
            divisors(per_rank),
        )


def _check_sharding(strategy: Strategy) -> None:
    group = strategy.shard_group
    if group is None:
        return
    if strategy.zero == 0:
        raise SpecError("strategy.shard_group", f"{group} needs ZeRO", "set zero to 1, 2 or 3")
    if strategy.gradient_group % group:
        raise _not_dividing(
            "strategy.shard_group",
            group,
            f"the {strategy.gradient_group} ranks of cp·dp",
            divisors(strategy.gradient_group),
        )


def _check_batch(training: Training, strategy: Strategy) -> None:
    multiple = strategy.data_parallel * strategy.microbatch
    sequences = training.sequences(multiple)
    if sequences % multiple:
        low = sequences // multiple * multiple
        nearest = f"use {low + multiple}" if low == 0 else f"use {low} or {low + multiple}"
        raise SpecError(
            "training.global_batch",
            f"{sequences} sequences do not divide over dp {strategy.data_parallel} × microbatch {strategy.microbatch}",
            nearest,
        )
    microbatches = sequences // multiple
    if strategy.schedule == "interleaved" and strategy.pp > 1 and microbatches % strategy.pp:
        raise SpecError(
            "training.global_batch",
            f"{microbatches} microbatches are no multiple of pp {strategy.pp}, which interleaving needs",
            f"use {-(-microbatches // strategy.pp) * strategy.pp * multiple} sequences",
        )


def stage_layer_counts(model: Model, strategy: Strategy) -> tuple[int, ...]:
    """Layers of every stage (pp × chunks of them, in model order)."""
    stages = strategy.pp * strategy.chunks_per_rank
    if isinstance(strategy.stage_layers, tuple):
        return strategy.stage_layers
    if strategy.stage_layers == "balanced" and model.layers % stages:
        return _balanced(model.layers, stages)
    return (model.layers // stages,) * stages


def _balanced(layers: int, stages: int) -> tuple[int, ...]:
    """As even as possible, the spare layers in the middle: the ends also hold embedding and loss."""
    each, spare = divmod(layers, stages)
    first = (stages - spare) // 2
    return tuple(each + (first <= index < first + spare) for index in range(stages))


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _not_dividing(field: str, value: int, what: str, valid: list[int]) -> SpecError:
    return SpecError(field, f"{value} does not divide {what}", f"use {_around(value, valid)}")


def _around(value: int, valid: list[int]) -> str:
    below = max((v for v in valid if v < value), default=None)
    above = min((v for v in valid if v > value), default=None)
    return " or ".join(str(v) for v in (below, above) if v is not None)


def _nearest_devices(others: int, devices: int) -> str:
    low = devices // others * others
    return f"use {low} or {low + others} devices" if low else f"use {others} devices or smaller degrees"
