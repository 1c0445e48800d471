"""Attention over the ranks of a sequence equals attention in one process: output and all three gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from engine.context.cases import (
    METHODS,
    Case,
    arguments_of,
    attend_of,
    gradients_of,
    inputs_of,
    worst_deviation,
)
from engine.workers import on_ranks
from shardwise.engine.context.blocks import MATH, BlockKernel
from shardwise.engine.context.sequence import check_sequence, cut_sequence, join_sequence
from shardwise.spec.errors import SpecError

TOLERANCE = 1e-5  # max |a − b| / max |b|, fp32
BF16_TOLERANCE = 1e-2  # one process in bf16 is 4e-3 away from fp32


def check(world: int, cases: list[Case], tolerance: float = TOLERANCE) -> None:
    by_case = zip(cases, zip(*on_ranks(world, worst_deviation, cases), strict=True), strict=True)
    wrong = {str(case): max(found) for case, found in by_case if not max(found) < tolerance}
    assert not wrong


def plain(method: str) -> list[Case]:
    return [
        Case(method, causal=causal, batch=batch, key_heads=key_heads)
        for causal in (True, False)
        for batch in (1, 3)
        for key_heads in (1, 2, 4)
    ]


@pytest.mark.quick(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [2, 4])
def test_causal_and_whole_attention_with_grouped_heads(method: str, world: int) -> None:
    check(world, plain(method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [2, 4])
def test_values_of_another_width_than_keys(method: str, world: int) -> None:
    """As in latent attention (MLA): 12 + 8 features of a key, 16 of a value; and the other way round."""
    widths = [Case(method, causal, key_heads=4, features=20) for causal in (True, False)]
    check(world, [*widths, Case(method, key_heads=4, value_features=24)])


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", ["all-gather", "ulysses"])
@pytest.mark.parametrize("world", [2, 4])
def test_windows_and_packed_documents(method: str, world: int) -> None:
    cases = [
        Case(method, causal, window=window, documents=documents)
        for causal in (True, False)
        for window in (None, 1, 5, 12, 100)
        for documents in (True, False)
    ]
    check(world, cases)


@pytest.mark.parametrize("method", METHODS)
def test_sinks(method: str) -> None:
    """Of the gradient of a head's sink each rank has the share of its own queries, or heads."""
    cases = [
        Case(method, causal, sinks=True, documents=documents) for causal in (True, False) for documents in (True, False)
    ]
    check(4, cases if method == "ring" else [*cases, Case(method, window=5, sinks=True)])


@pytest.mark.parametrize("world", [2, 4])
def test_documents_cut_across_the_blocks_of_the_ring(world: int) -> None:
    check(
        world,
        [Case("ring", causal, documents=True, window=window) for causal in (True, False) for window in (None, 100)],
    )


@pytest.mark.parametrize("method", METHODS)
def test_bf16(method: str) -> None:
    half = Case(method, dtype=torch.bfloat16)
    cases = [half, replace(half, causal=False), replace(half, documents=True)]
    check(4, cases, BF16_TOLERANCE)


def test_without_overlap() -> None:
    check(4, [Case(method, overlap=False) for method in METHODS])


def written_out(query: torch.Tensor, value: torch.Tensor, biased: bool) -> BlockKernel:
    return MATH


def with_own_kernel(cases: list[Case]) -> list[float]:
    return worst_deviation(cases, written_out)


def test_another_kernel_takes_the_place_of_the_fused_one() -> None:
    cases = [Case(method, documents=documents) for method in ("ring", "all-gather") for documents in (True, False)]
    assert max(max(found) for found in on_ranks(2, with_own_kernel, cases)) < TOLERANCE


# -- documents ---------------------------------------------------------------------------------------


def gathers_of_documents(method: str) -> list[int]:
    """How often documents were gathered: after three layers, after the tensor was overwritten, for another one."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    case = Case(method, documents=True)
    attend, counts, gathered = attend_of(method, group), [], [0]
    whole = attend.documents  # type: ignore[attr-defined]
    once = whole._gather

    def counting(documents: torch.Tensor) -> torch.Tensor:
        gathered[0] += 1
        return once(documents)

    whole._gather = counting
    tensors = tuple(cut_sequence(tensor, rank, size, method) for tensor in inputs_of(case))
    documents = arguments_of(case).documents
    assert documents is not None
    arguments = replace(arguments_of(case), documents=cut_sequence(documents, rank, size, method))
    for _ in range(3):
        gradients_of(attend, tensors, arguments)
    counts.append(gathered[0])
    assert arguments.documents is not None
    arguments.documents.zero_()
    one_document = gradients_of(attend, tensors, arguments)
    counts.append(gathered[0])
    apart = gradients_of(attend, tensors, replace(arguments, documents=None))
    assert all(torch.allclose(mine, other, atol=1e-6) for mine, other in zip(one_document, apart, strict=True))
    gradients_of(attend, tensors, replace(arguments, documents=arguments.documents.clone()))
    return [*counts, gathered[0]]


@pytest.mark.parametrize("method", METHODS)
def test_documents_are_gathered_once_for_all_layers(method: str) -> None:
    assert on_ranks(2, gathers_of_documents, method) == [[1, 2, 3]] * 2


# -- the cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_joining_undoes_cutting(method: str, size: int) -> None:
    whole = torch.arange(2 * 24 * 5).view(2, 24, 5)
    assert torch.equal(join_sequence([cut_sequence(whole, rank, size, method) for rank in range(size)], method), whole)


def test_who_holds_what() -> None:
    tokens = torch.arange(8)[None]
    assert [cut_sequence(tokens, rank, 2, "ring").tolist() for rank in (0, 1)] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert cut_sequence(tokens, 1, 2, "ulysses").tolist() == [[4, 5, 6, 7]]


def test_every_rank_sees_as_many_pairs_in_zigzag() -> None:
    seen = {len(cut_sequence(torch.arange(24)[None], r, 4, "ring")[0]) for r in range(4)}
    pairs = {int((cut_sequence(torch.arange(24)[None], r, 4, "ring") + 1).sum()) for r in range(4)}
    assert seen == {6} and len(pairs) == 1


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq", "method"), [(12, "ring"), (12, "all-gather"), (10, "ulysses")])
def test_a_sequence_that_does_not_divide_is_refused(seq: int, method: str) -> None:
    with pytest.raises(SpecError, match=r"^strategy.cp: 4 with .* use a multiple of (8|4) as training.seq$"):
        check_sequence(seq, 4, method)
    with pytest.raises(SpecError):
        cut_sequence(torch.zeros(1, seq), 0, 4, method)
    check_sequence(seq, 1, method)


def refusal(case: Case) -> str:
    try:
        worst_deviation([case])
    except SpecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case("ring", window=5), "strategy.context_method: ring does not support a window of 5 keys"),
        (Case("ulysses", heads=6, key_heads=6), "strategy.cp: 4 does not divide 6 query heads"),
        (Case("ulysses", heads=12, key_heads=6), "strategy.cp: 4 neither divides 6 key-value heads nor repeats them"),
    ],
)
def test_what_cannot_be_done_is_refused(case: Case, problem: str) -> None:
    assert all(problem in text for text in on_ranks(4, refusal, case))
