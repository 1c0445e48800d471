"""Strategies in words; those that behave differently have different words."""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby
from typing import Any

from shardwise.planner.constraints import offload_name
from shardwise.spec.job import Job
from shardwise.spec.strategy import DIMENSIONS, Offload, Overlap, Strategy
from shardwise.spec.units import readable_flops


def strategy_words(strategy: Strategy) -> str:
    """What a strategy sets: "tp 8 · pp 4 (interleaved 2) · dp 16 · ZeRO-1 · selective recompute"; no defaults."""
    words = []
    if strategy.tp > 1:
        words.append(degree_words(strategy, "tp") + ("" if strategy.sequence_parallel else " without SP"))
    if strategy.cp > 1:
        words.append(f"cp {strategy.cp} ({strategy.context_method})")
    if strategy.pp > 1:
        words.append(f"pp {strategy.pp} ({schedule_words(strategy)})")
    words.append(degree_words(strategy, "dp"))
    if strategy.ep > 1 or strategy.expert_tensor_parallel != strategy.tp:
        split = strategy.expert_tensor_parallel
        words.append(f"ep {strategy.ep}" + (f" × {split}" if split > 1 else ""))
    words += [sharding_words(strategy), f"microbatch {strategy.microbatch}"]
    words += [recompute_words(strategy), offload_words(strategy)]
    words += [*less_communication_words(strategy), *communication_words(strategy), order_words(strategy)]
    return " · ".join(word for word in words if word)


def change_words(before: Strategy, after: Strategy) -> str:
    """The change from ``before`` to ``after`` as advice: "halve tp to 4 and double dp to 32"."""
    for name in ("tp", "cp", "pp", "ep", "microbatch"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            scaled = _scaled("the microbatch" if name == "microbatch" else name, old, new)
            if name in ("ep", "microbatch"):
                return scaled
            return f"{scaled} and {_scaled('dp', before.data_parallel, after.data_parallel)}"
    for field in fields(Overlap):
        if getattr(before.overlap, field.name) != getattr(after.overlap, field.name):
            return f"overlap {field.name} communication"
    advice = {
        "recompute": "recompute nothing" if after.recompute == "none" else f"use {after.recompute} recompute",
        "zero": f"{'raise' if after.zero > before.zero else 'lower'} zero to {after.zero}",
        "shard_group": f"shard inside a node (shard_group {after.shard_group})",
        "keep_parameters": "keep gathered parameters between microbatches",
        "accumulate": "accumulate gradients locally",
        "dispatch": "send each token once per node (dispatch: deduplicated)",
        "offload": "offload the optimizer",
    }
    changed = (words for name, words in advice.items() if getattr(before, name) != getattr(after, name))
    return next(changed, strategy_words(after))  # any other change: the whole strategy


def _scaled(what: str, before: int, after: int) -> str:
    return f"{'halve' if after < before else 'double'} {what} to {after}"


def schedule_words(strategy: Strategy) -> str:
    """The schedule of a pipeline, with the layers of its stages if the strategy lists them: "zbv, layers 9-8×2-7"."""
    chunks = f" {strategy.interleave}" if strategy.schedule_record.chooses_chunks else ""
    layers = ""
    if isinstance(strategy.stage_layers, tuple):
        layers = f", layers {_in_turn(strategy.stage_layers)}"
    return f"{strategy.schedule}{chunks}{layers}"


def degree_words(strategy: Strategy, name: str) -> str:
    """The degree of a dimension: "tp 8"; per stage if stages differ: "tp 4-2×2"; with shares if replicas differ."""
    of_stages = {"tp": strategy.stage_tp, "dp": strategy.stage_dp}.get(name)
    shares = f" in shares {_in_turn(strategy.dp_shares)}" if name == "dp" and strategy.dp_shares is not None else ""
    return f"{name} {strategy.degree(name) if of_stages is None else _in_turn(of_stages)}{shares}"


def _in_turn(numbers: tuple[int, ...]) -> str:
    """The numbers with runs of equal ones written once: "9-8×2-7"."""
    runs = ((number, len(list(same))) for number, same in groupby(numbers))
    return "-".join(f"{number}×{times}" if times > 1 else str(number) for number, times in runs)


def less_communication_words(strategy: Strategy) -> list[str]:
    """How gradients are compressed and how often workers synchronise, if not the default."""
    sync, words = strategy.synchronise, []
    if strategy.compression.is_used:
        chosen = _unusual(strategy.compression, "method")
        words.append(f"{strategy.compression.method} gradients" + (f" ({', '.join(chosen)})" if chosen else ""))
    if not sync.every_step:
        times = sync.staleness if sync.is_async else sync.inner_steps
        chosen = _unusual(sync, "method", "staleness", "inner_steps")
        words.append(f"{sync.method} {times}" + (f" ({', '.join(chosen)})" if chosen else ""))
    return words


def communication_words(strategy: Strategy) -> list[str]:
    """How communication differs from the default."""
    words = []
    if strategy.ep > 1 and strategy.dispatch != "all-to-all":
        words.append(f"{strategy.dispatch} dispatch")
    usual = Overlap()
    changed = [
        field.name for field in fields(Overlap) if getattr(strategy.overlap, field.name) != getattr(usual, field.name)
    ]
    for hidden, word in ((True, "overlaps"), (False, "does not overlap")):
        names = [name for name in changed if getattr(strategy.overlap, name) is hidden and _has(strategy, name)]
        words += [f"{word} {', '.join(names)}"] if names else []
    if strategy.collective != "auto":
        words.append(f"by {strategy.collective}")
    if strategy.bucket is not None:
        words.append(f"buckets of {strategy.bucket:g} bytes")
    return words


def _has(strategy: Strategy, name: str) -> bool:
    """Whether a dimension communicates at all."""
    if name == "offload":
        return strategy.offload.any
    return (strategy.gradient_group if name == "dp" else int(getattr(strategy, name))) > 1


def sharding_words(strategy: Strategy) -> str:
    if not strategy.zero:
        return ""
    words = f"ZeRO-{strategy.zero}"
    if strategy.keep_parameters and strategy.zero == 3:
        words += " kept"
    if strategy.accumulate == "local" and strategy.zero > 1:
        words += " local"
    return words + (f" over {strategy.shard_group}" if strategy.shard_group else "")


def recompute_words(strategy: Strategy) -> str:
    if strategy.recompute == "none":
        return ""
    named = strategy.recompute == "selective" and strategy.recompute_operators != ("attention",)
    operators = f" of {', '.join(strategy.recompute_operators)}" if named else ""
    layers = "" if strategy.recompute_layers is None else f" of {strategy.recompute_layers} layers per rank"
    return f"{strategy.recompute} recompute{operators}{layers}"


def offload_words(strategy: Strategy) -> str:
    """What is kept outside the device: "offload optimizer", or shares of it: "offload optimizer 0.5"."""
    offload = strategy.offload
    if not offload.any:
        return ""
    name = offload_name(offload)
    if name == "own":
        kinds = ("optimizer", "gradients", "weights", "activations")
        name = ", ".join(f"{kind} {getattr(offload, kind):g}" for kind in kinds if getattr(offload, kind))
    return f"offload {name}" + ("" if offload.target == Offload().target else f" to {offload.target}")


def order_words(strategy: Strategy) -> str:
    """The rank order of the dimensions in use, if it is not the default."""
    used = [name for name in strategy.order if strategy.degree(name) > 1]
    usual = [name for name in DIMENSIONS if strategy.degree(name) > 1]
    return "" if used == usual else "-".join(strategy.order)


def _unusual(spec: Any, *mentioned: str) -> list[str]:
    """Fields of a part of the strategy that differ from their defaults, except those already ``mentioned``."""
    usual = type(spec)()
    names = (field.name for field in fields(spec) if field.name not in mentioned)
    return [f"{name} {getattr(spec, name)}" for name in names if getattr(spec, name) != getattr(usual, name)]


def peak_words(job: Job) -> str:
    """The peak that utilisation is measured against, which is that of the data type of the matmuls."""
    data_type = job.training.recipe.compute
    return f"the {data_type} peak, {readable_flops(job.cluster.device.peak_flops(data_type))}/s a device"
