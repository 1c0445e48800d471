"""Ranks, coordinates and groups of any strategy, against an enumeration of all coordinates that knows no strides."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.layout.groups import (
    Division,
    coordinate,
    coordinates,
    division_of,
    group_runs,
    local_rank,
    node_of,
    rank_at,
    shape_runs,
)
from shardwise.layout.mesh import mesh_divisions, mesh_shapes
from shardwise.layout.sharding import dense_ranks, divided_over, expert_ranks, expert_shards
from shardwise.spec.errors import SpecError
from shardwise.spec.less_communication import Synchronise
from shardwise.spec.strategy import DIMENSIONS, Strategy

ORDERS = list(permutations(DIMENSIONS))
DENSE_NAMES = {"tp", "cp", "dp", "pp", "stage", "sequence", "kv_copies", "replicate", "shard"}
EXPERT_NAMES = {"expert_replicate", "expert_shard", "ep", "expert_tp"}


def divisor_of(draw: st.DrawFn, number: int) -> int:
    return draw(st.sampled_from([one for one in range(1, number + 1) if number % one == 0]))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Strategy, int]:
    """A strategy of at most some hundred ranks whose groups are whole, and a number of key-value heads."""
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in DIMENSIONS)
    expert_tp = divisor_of(draw, tp * cp * dp)
    strategy = Strategy(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=divisor_of(draw, tp * cp * dp // expert_tp),
        expert_tp=expert_tp,
        zero=draw(st.sampled_from((0, 1, 2, 3))),
        shard_group=divisor_of(draw, cp * dp),
        order=draw(st.sampled_from(ORDERS)),
        synchronise=Synchronise(method=draw(st.sampled_from(("every-step", "local-sgd")))),
    )
    return strategy, divisor_of(draw, tp)


def enumerated(strategy: Strategy) -> list[dict[str, int]]:
    """The coordinates of every rank: the last of the order varies slowest."""
    outermost_first = strategy.order[::-1]
    places = product(*(range(strategy.degree(name)) for name in outermost_first))
    return [dict(zip(outermost_first, one)) for one in places]


def together(ranks: Iterable[int], alike: Callable[[int], Hashable]) -> Division:
    """Ranks that are alike, in ascending order, in groups that are sorted."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for rank in ranks:
        found[alike(rank)].append(rank)
    return tuple(sorted(map(tuple, found.values())))


def expected(strategy: Strategy, key_value_heads: int) -> dict[str, Division]:
    """Every group as the ranks that agree in everything else."""
    places, world = enumerated(strategy), range(strategy.world)

    def free(*names: str) -> Division:
        return together(world, lambda rank: tuple(places[rank][name] for name in DIMENSIONS if name not in names))

    def cut(groups: Division, names: list[str], sizes: list[int]) -> dict[str, Division]:
        """Groups laid out as an array of these sizes, outermost first, and cut along each of its dimensions."""
        index = {}
        for number, ranks in enumerate(groups):
            assert len(ranks) == math.prod(sizes)
            index |= {rank: (number, *at) for rank, at in zip(ranks, product(*map(range, sizes)))}
        return {
            name: together(world, lambda rank, axis=axis: index[rank][:axis] + index[rank][axis + 1 :])  # type: ignore[misc]
            for axis, name in enumerate(names, 1)
        }

    shards = strategy.shard_group or strategy.cp * strategy.data_parallel if strategy.zero else 1
    held_alike = strategy.tp * strategy.cp * strategy.data_parallel // (strategy.expert_tensor_parallel * strategy.ep)
    expert_sharded = expert_shards(strategy, shards)
    stage, dense = free("tp", "cp", "dp"), free("cp", "dp")
    return {
        **{name: free(name) for name in DIMENSIONS},
        "stage": stage,
        "sequence": free("tp", "cp"),
        **cut(free("tp"), ["_", "kv_copies"], [key_value_heads, strategy.tp // key_value_heads]),
        **cut(dense, ["replicate", "shard"], [strategy.gradient_group // shards, shards]),
        **cut(
            stage,
            ["expert_replicate", "expert_shard", "ep", "expert_tp"],
            [held_alike // expert_sharded, expert_sharded, strategy.ep, strategy.expert_tensor_parallel],
        ),
        "worker": free("tp", "cp", "pp"),
    }


@settings(max_examples=examples(200), deadline=None)
@given(layouts())
def test_coordinates_are_those_of_an_enumeration_and_lead_back_to_the_rank(layout: tuple[Strategy, int]) -> None:
    strategy, _ = layout
    places = enumerated(strategy)
    assert len(places) == strategy.world
    for rank, place in enumerate(places):
        assert coordinates(strategy, rank) == place
        assert list(coordinates(strategy, rank)) == list(strategy.order)
        assert rank_at(strategy, place) == rank
        assert all(coordinate(strategy, name, rank) == place[name] for name in DIMENSIONS)


@settings(max_examples=examples(200), deadline=None)
@given(layouts())
def test_every_named_group_is_that_of_an_enumeration(layout: tuple[Strategy, int]) -> None:
    strategy, heads = layout
    found, wanted = mesh_divisions(strategy, heads), expected(strategy, heads)
    assert set(found) == DENSE_NAMES | EXPERT_NAMES | (set() if strategy.synchronise.every_step else {"worker"})
    for name, groups in found.items():
        assert groups == wanted[name], name
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(strategy.world))
        assert len({len(ranks) for ranks in groups}) == 1


def inside(inner: Division, outer: Division) -> bool:
    """Whether every group of one division lies in a group of the other."""
    home = {rank: set(ranks) for ranks in outer for rank in ranks}
    return all(set(ranks) <= home[ranks[0]] for ranks in inner)


@settings(max_examples=examples(100), deadline=None)
@given(layouts())
def test_groups_nest(layout: tuple[Strategy, int]) -> None:
    strategy, heads = layout
    found = mesh_divisions(strategy, heads)
    assert all(inside(found[name], found["stage"]) for name in (DENSE_NAMES | EXPERT_NAMES) - {"pp"})
    assert inside(found["kv_copies"], found["tp"]) and inside(found["tp"], found["sequence"])
    assert math.prod(len(found[name][0]) for name in EXPERT_NAMES) == len(found["stage"][0])
    assert len(found["shard"][0]) * len(found["replicate"][0]) == strategy.gradient_group
    # Two ranks of a stage meet in at most one of its expert groups.
    for rank in range(strategy.world):
        mine = [next(ranks for ranks in found[name] if rank in ranks) for name in sorted(EXPERT_NAMES)]
        others = [other for ranks in mine for other in ranks if other != rank]
        assert len(others) == len(set(others))


@settings(max_examples=examples(200), deadline=None)
@given(layouts())
def test_runs_are_the_same_groups(layout: tuple[Strategy, int]) -> None:
    """What the network is priced by, where a group has equal distances, and what the engine makes groups of."""
    strategy, heads = layout
    found = mesh_divisions(strategy, heads)
    for name, shape in mesh_shapes(strategy, heads).items():
        try:
            runs = shape_runs(strategy, shape, "strategy")
        except SpecError:
            continue
        assert division_of(strategy.world, runs) == found[name], name
    for name in DIMENSIONS:
        assert division_of(strategy.world, group_runs(strategy, (name,))) == found[name]


@settings(max_examples=examples(200), deadline=None)
@given(layouts())
def test_shards_and_their_copies_are_the_same_groups(layout: tuple[Strategy, int]) -> None:
    strategy, heads = layout
    shards = divided_over(strategy)
    found = mesh_divisions(strategy, heads)
    for prefix, ranks_of in (("", dense_ranks), ("expert_", expert_ranks)):
        try:
            held = ranks_of(strategy, shards)
        except SpecError:
            continue
        assert division_of(strategy.world, held.sharded) == found[f"{prefix}shard"]
        assert division_of(strategy.world, held.replicas) == found[f"{prefix}replicate"]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 16), st.integers(0, 200))
def test_ranks_of_a_node_are_numbered_on_end(node_devices: int, rank: int) -> None:
    assert 0 <= local_rank(rank, node_devices) < node_devices
    assert node_of(rank, node_devices) * node_devices + local_rank(rank, node_devices) == rank
    assert node_of(rank + node_devices, node_devices) == node_of(rank, node_devices) + 1


def test_the_innermost_dimension_has_neighbouring_ranks() -> None:
    strategy = Strategy(tp=2, cp=1, dp=2, pp=2)
    assert mesh_divisions(strategy)["tp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh_divisions(strategy)["pp"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [coordinate(strategy, "pp", rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    inner = Strategy(dp=2, pp=2, order=("pp", "tp", "cp", "dp"))
    assert [coordinate(inner, "pp", rank) for rank in range(4)] == [0, 1, 0, 1]


@settings(max_examples=examples(200), deadline=None)
@given(layouts())
def test_the_shards_of_experts_are_a_whole_part_of_their_copies(layout: tuple[Strategy, int]) -> None:
    strategy, _ = layout
    shards = divided_over(strategy)
    found = expert_shards(strategy, shards)
    assert strategy.expert_data_parallel % found == 0
    assert found * strategy.gradient_group <= max(strategy.gradient_group, strategy.expert_data_parallel * shards)


def test_shards_of_experts_that_would_be_no_whole_number_are_rounded_down() -> None:
    strategy = Strategy(dp=18, ep=2, zero=3)
    assert [expert_shards(strategy, shards) for shards in (1, 2, 3, 6, 9, 18)] == [1, 1, 1, 3, 3, 9]
