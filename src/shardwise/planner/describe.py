"""Strategies in words."""

from __future__ import annotations

from shardwise.planner.constraints import offload_name
from shardwise.spec.strategy import Strategy


def strategy_words(strategy: Strategy) -> str:
    """All that is not plain about a strategy: "tp 8 · pp 4 (interleaved 2) · dp 16 · ZeRO-1 · selective recompute"."""
    words = []
    if strategy.tp > 1:
        words.append(f"tp {strategy.tp}" + ("" if strategy.sequence_parallel else " without SP"))
    if strategy.cp > 1:
        words.append(f"cp {strategy.cp} ({strategy.context_method})")
    if strategy.pp > 1:
        chunks = f" {strategy.interleave}" if strategy.schedule == "interleaved" else ""
        words.append(f"pp {strategy.pp} ({strategy.schedule}{chunks})")
    words.append(f"dp {strategy.data_parallel}")
    if strategy.ep > 1:
        split = strategy.expert_tensor_parallel
        words.append(f"ep {strategy.ep}" + (f" × {split}" if split > 1 else ""))
    words.append(sharding_words(strategy))
    words.append(f"microbatch {strategy.microbatch}")
    words.append(recompute_words(strategy))
    if strategy.offload.any:
        words.append(f"offload {offload_name(strategy.offload)}")
    words += less_communication_words(strategy)
    if strategy.order[-1] != "pp" and strategy.pp > 1:
        words.append("-".join(strategy.order))
    return " · ".join(word for word in words if word)


def less_communication_words(strategy: Strategy) -> list[str]:
    """How gradients are compressed and how often workers meet, where that is not the plain way."""
    meeting, words = strategy.synchronise, []
    if strategy.compression.is_used:
        words.append(f"{strategy.compression.method} gradients")
    if not meeting.every_step:
        words.append(f"async {meeting.staleness}" if meeting.is_async else f"{meeting.method} {meeting.inner_steps}")
    return words


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
    layers = "" if strategy.recompute_layers is None else f" of {strategy.recompute_layers} layers per rank"
    return f"{strategy.recompute} recompute{layers}"
