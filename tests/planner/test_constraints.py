"""What the user fixes, bounds and excludes: how it is read, what contradicts, and which cells of a table it means."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from planner.cases import MODELS, NETWORKS, job_of, within
from planner.search.test_cells import priced
from planner.test_offers import EXCLUDED, TEXTS, has, matters
from shardwise.planner.constraints import (
    OFFLOADS,
    Allowed,
    Constraints,
    allowed,
    field_name,
    parse_constraints,
    shown_value,
)
from shardwise.planner.plan import Plan, plan, required
from shardwise.planner.request import Request
from shardwise.planner.search.supported import Mask
from shardwise.spec.errors import SpecError


@pytest.mark.parametrize(
    ("text", "values", "others"),
    [
        ("tp=8", (8,), (1, 4, 16)),
        ("pp=2..4", (2, 3, 4), (1, 5)),
        ("zero=..1", (0, 1), (2, 3)),
        ("microbatch=4..", (4, 1000), (1, 3)),
        ("shard-group=all", (None,), (2,)),
        ("sp=false", (False,), (True,)),
        ("order=tp-dp-cp-pp", (("tp", "dp", "cp", "pp"),), (("tp", "cp", "dp", "pp"),)),
        ("offload=optimizer", (OFFLOADS["optimizer"],), (OFFLOADS["none"], OFFLOADS["states"])),
        ("schedule=zb-h1", ("zb-h1",), ("1f1b",)),
    ],
)
def test_a_constraint_allows_its_values_and_no_others(text: str, values: tuple[object, ...], others: object) -> None:
    (read,) = parse_constraints(text).values()
    assert all(value in read for value in values)
    assert not any(value in read for value in others)  # type: ignore[attr-defined]


def test_a_value_is_shown_as_it_is_written() -> None:
    for name, text in (("tp", "8"), ("offload", "states"), ("order", "tp-dp-cp-pp"), ("sequence_parallel", "true")):
        (value,) = allowed(name, text).values or ()
        assert shown_value(value) == text


@pytest.mark.parametrize(
    "text",
    ["tp", "tp=", "tp=x", "tp=0", "zero=4", "tp=8..2", "tp=2,tp=4", "tensor=2", "schedule=1f2b", "order=tp-dp",
     "sp=maybe", "microbatch=-1", "offload=everything", "tp=1.5"],
)  # fmt: skip
def test_what_is_no_constraint_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_constraints(text)
    assert "\n" not in str(caught.value)


def test_short_names_are_known() -> None:
    assert [field_name(word) for word in ("sp", "mbs", "--shard-group")] == [
        "sequence_parallel",
        "microbatch",
        "shard_group",
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [("tp=4", "tp=8"), ("tp=..2", "tp=4"), ("pp=1..2", "pp=4.."), ("schedule=zbv", "schedule=1f1b")],
)
def test_constraints_that_nothing_satisfies_are_refused_in_one_line(first: str, second: str) -> None:
    with pytest.raises(SpecError, match="cannot be both") as caught:
        Constraints(parse_constraints(first)).with_allowed(parse_constraints(second))
    assert "\n" not in str(caught.value)


def test_constraints_that_overlap_leave_what_satisfies_both() -> None:
    both = Constraints(parse_constraints("tp=2..8")).with_allowed({"tp": Allowed((1, 2, 4))})
    assert both.candidates("tp", (1, 2, 4, 8)) == (2, 4)
    ranges = Constraints(parse_constraints("tp=..4")).with_allowed(parse_constraints("tp=2.."))
    assert ranges.candidates("tp", (1, 2, 4, 8)) == (2, 4)


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (within(tp="3"), "3"),
        (within(tp="4", dp="16"), "16"),
        (within(pp="16"), "16"),
        (within(microbatch="7"), "7"),
        (within(cp="2", pp="5"), "5"),
        (Constraints(parse_constraints("recompute=full"), (parse_constraints("recompute=full"),)), "full"),
        (Constraints(parse_constraints("pp=2"), (parse_constraints("pp=2,zero=0..3"),)), "pp"),
    ],
)
def test_a_request_that_no_layout_satisfies_is_answered_in_one_line(constraints: Constraints, words: str) -> None:
    request = Request(job_of(MODELS["dense"], NETWORKS["flat"], 64, seq=2048), constraints)
    with pytest.raises(SpecError) as caught:
        required(plan(request), request)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_devices_are_counted_for_what_is_only_priced_too() -> None:
    """DualPipe fits on more devices, whether or not an engine runs it there."""
    constraints = within(schedule="dualpipe", pp="2", cp="1", microbatch="1", zero="1")
    job = job_of("llama3-70b", "dgx-h100:1", 256, seq=2048)
    request = Request(job, constraints, offload=False, any_priced=True)
    with pytest.raises(SpecError, match=r"use 32 devices, or use devices with"):
        required(plan(request), request)


@pytest.mark.parametrize("options", [{"memory_bytes": 0.0}, {"memory_bytes": -1.0}])
def test_a_cap_on_memory_that_holds_nothing_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(SpecError):
        Request(job_of(MODELS["dense"], NETWORKS["flat"], 64, seq=2048), **options)  # type: ignore[arg-type]


def test_a_request_without_a_batch_is_refused() -> None:
    with pytest.raises(SpecError, match="global_batch"):
        Request(job_of(MODELS["dense"], NETWORKS["flat"], None, seq=2048))


@pytest.mark.slow
def test_a_field_is_searched_only_within_its_values() -> None:
    """Both ways: what is allowed is found, what is excluded is not."""
    job = job_of(MODELS["dense"], NETWORKS["two"], 64, seq=2048)
    plain = within(microbatch="1", schedule="1f1b", recompute="none", pp="1,2,4")
    seen = {}
    for name, constraints in {
        "all": plain,
        "only": plain.with_allowed(parse_constraints("zero=3,tp=2")),
        "without": Constraints(plain.allowed, (parse_constraints("zero=3,tp=2"),)),
    }.items():
        found = plan(Request(job, constraints))
        assert isinstance(found, Plan)
        seen[name] = found.search.fitting
    assert seen["only"] > 0
    assert seen["all"] == seen["only"] + seen["without"]


# -- masks -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 7])
@pytest.mark.parametrize("idle", [False, True])
def test_a_mask_marks_the_cells_that_match_one_by_one(number: int, idle: bool) -> None:
    _, pieces = priced(number)
    random = Random(number)
    entries = [parse_constraints(text) for text in EXCLUDED]
    entries += [
        {name: allowed(name, random.choice(TEXTS[name])) for name in random.sample(sorted(set(TEXTS) - {"order"}), 2)}
        for _ in range(10)
    ]
    marked = 0
    for entry in entries:
        mask = Mask(entry, idle=idle)
        for piece in random.sample(pieces, 4):
            cells = mask.cells(piece)
            for _ in range(8):
                column, row = (random.randrange(size) for size in piece.memory_bytes.shape)
                strategy = piece.strategy(column, row)
                matched = cells is not None and bool(cells[column, row])
                by_itself = [has(strategy, *one) if matters(strategy, one[0]) else idle for one in entry.items()]
                assert matched == all(by_itself)
                marked += matched
    assert marked > 50


def test_an_order_is_told_apart_only_where_ranks_move() -> None:
    _, pieces = priced(0)
    mask = Mask({"order": Allowed((("tp", "cp", "pp", "dp"),))}, idle=True)
    for piece in pieces[::7]:
        cells = mask.cells(piece)
        for row in range(0, piece.memory_bytes.shape[1], 97):
            strategy = piece.strategy(0, row)
            alike = strategy.order != ("tp", "cp", "dp", "pp") or 1 in (strategy.pp, strategy.data_parallel)
            assert (cells is not None and bool(np.all(cells[:, row]))) == alike
