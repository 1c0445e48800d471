"""The groups of ranks that communicate: as runs of ranks at equal distances, which a network is priced by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Strategy


class RankRun(NamedTuple):
    """``degree`` ranks at equal distances of ``stride``."""

    stride: int
    degree: int


def group_runs(strategy: Strategy, dimensions: Sequence[str]) -> tuple[RankRun, ...]:
    """The ranks of one group over several dimensions, as runs, innermost first and merged where adjacent."""
    ordered = [name for name in strategy.order if name in dimensions]
    return _merged([RankRun(strategy.stride(name), strategy.degree(name)) for name in ordered])


def _merged(runs: Sequence[RankRun]) -> tuple[RankRun, ...]:
    merged: list[RankRun] = []
    for run in runs:
        if run.degree == 1:
            continue
        if merged and merged[-1].stride * merged[-1].degree == run.stride:
            merged[-1] = RankRun(merged[-1].stride, merged[-1].degree * run.degree)
        else:
            merged.append(run)
    return tuple(merged)


def part_of(runs: Sequence[RankRun], skip: int, degree: int, field: str) -> tuple[RankRun, ...]:
    """``degree`` members of a group, innermost first, after a factor ``skip`` that others take."""
    taken: list[RankRun] = []
    for run in runs:
        passed = min(skip, run.degree)
        here = min(degree, run.degree // passed)
        if run.degree % passed or skip % passed or (run.degree // passed) % here or degree % here:
            raise SpecError(
                field, f"{degree} cuts across the other dimensions", "choose degrees that divide each other"
            )
        if here > 1:
            taken.append(RankRun(run.stride * passed, here))
        skip //= passed
        degree //= here
    return _merged(taken)


def expert_runs(strategy: Strategy) -> tuple[RankRun, ...]:
    """The ranks that one layer's experts are spread over: ``expert_tp`` skipped, ``ep`` taken."""
    ranks = group_runs(strategy, ("tp", "cp", "dp"))
    return part_of(ranks, strategy.expert_tensor_parallel, strategy.ep, "strategy.ep")


def expert_data_runs(strategy: Strategy) -> tuple[RankRun, ...]:
    """The ranks that hold the same experts."""
    ranks = group_runs(strategy, ("tp", "cp", "dp"))
    inner = strategy.expert_tensor_parallel * strategy.ep
    return part_of(ranks, inner, strategy.expert_data_parallel, "strategy.ep")


def expert_tensor_runs(strategy: Strategy) -> tuple[RankRun, ...]:
    """The ranks that split one expert's matrices."""
    ranks = group_runs(strategy, ("tp", "cp", "dp"))
    return part_of(ranks, 1, strategy.expert_tensor_parallel, "strategy.expert_tp")
