"""Compressed sums of gradients: what a codec may be off by, what error feedback keeps, the same bits on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effort import examples
from engine.workers import on_ranks
from shardwise.engine.compression import codec_of, compressed_sum
from shardwise.spec.less_communication import Compression

EXCHANGED = ("bf16", "fp16", "int8", "fp8", "1bit")
SHAPES = [torch.Size(one) for one in ((24, 10), (7,), (3, 16, 12), (40, 40), (2, 2))]
ELEMENTS = sum(shape.numel() for shape in SHAPES)


def drawn(seed: int, elements: int = ELEMENTS, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(elements, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", EXCHANGED)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**31), blocks=st.integers(1, 5), size=st.sampled_from([8, 64]), power=st.integers(-8, 4))
def test_a_codec_is_off_by_no_more_than_it_says(method: str, seed: int, blocks: int, size: int, power: int) -> None:
    codec = codec_of(Compression(method=method, block=size))  # type: ignore[arg-type]
    values = drawn(seed, blocks * size, 10.0**power).view(-1, codec.block)
    encoded = codec.encode(values)
    assert encoded.shape == (len(values), codec.bytes_per_block) and encoded.dtype == torch.uint8
    off = (codec.decode(encoded) - values).abs()
    largest = values.abs().amax(dim=1, keepdim=True)
    bound = {
        "bf16": values.abs() * 2**-8,
        "fp16": values.abs() * 2**-11 + 2**-25,
        "int8": largest / 254 * 1.001,
        "fp8": torch.maximum(values.abs() / 16, largest * 2**-10 / 448) * 1.001,
        "1bit": largest + values.abs().mean(dim=1, keepdim=True),
    }[method]
    assert bool((off <= bound).all())


@pytest.mark.parametrize("method", EXCHANGED)
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(method: str) -> None:
    codec = codec_of(Compression(method=method, block=8))  # type: ignore[arg-type]
    for bad in (torch.nan, torch.inf, -torch.inf):
        values = torch.ones(8).view(-1, codec.block)
        values.view(-1)[0] = bad
        assert not torch.isfinite(codec.decode(codec.encode(values))).all()
    assert not codec.decode(codec.encode(torch.zeros(8).view(-1, codec.block))).any()


def test_signs_carry_the_mean_size() -> None:
    codec = codec_of(Compression(method="1bit", block=8))
    values = torch.tensor([[1.0, -3.0, 2.0, -2.0, 0.0, 4.0, -4.0, 0.0]])
    assert codec.decode(codec.encode(values)).tolist() == [[2.0, -2.0, 2.0, -2.0, 2.0, 2.0, -2.0, 2.0]]


def summed(method: str, feedback: bool, steps: int, spoilt: int | None = None) -> dict[str, Any]:
    rank = dist.get_rank()
    compression = Compression(method=method, rank=2, block=16, error_feedback=feedback)  # type: ignore[arg-type]
    group = dist.group.WORLD
    assert group is not None
    reduction = compressed_sum(compression, SHAPES, group, torch.device("cpu"))
    assert reduction is not None
    found = []
    for step in range(steps):
        flat = drawn(100 * step + rank)
        if step == spoilt and rank == 0:
            flat[3] = torch.nan
        reduction.start(flat).wait()
        found.append(flat)
    return {"sums": found, "states": reduction.states, "bytes": reduction.sent_bytes}


def expected(step: int, ranks: int) -> Tensor:
    total: Tensor = torch.stack([drawn(100 * step + rank) for rank in range(ranks)]).sum(dim=0)
    return total


def kept_back(method: str, states: list[dict[str, Tensor]]) -> Tensor:
    """All that error feedback holds on all ranks, in the order of the bucket."""
    if method != "powersgd":
        own = torch.stack([one["own"] for one in states]).sum(dim=0).view(-1)
        pieces = torch.cat([one["sum"] for one in states]).view(-1)
        return (own + pieces)[:ELEMENTS]
    parts = [
        torch.stack([one.get(f"error_{number}", torch.zeros(shape)) for one in states]).sum(dim=0).view(-1)
        for number, shape in enumerate(SHAPES)
    ]
    return torch.cat(parts)


@pytest.mark.quick(5)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("method", [*EXCHANGED, "powersgd"])
def test_all_ranks_have_the_same_bits_and_nothing_is_lost(method: str, ranks: int) -> None:
    """What was sent and what is kept back are together what was given, step after step."""
    steps = 4
    found = on_ranks(ranks, summed, method, True, steps)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0]["sums"], other["sums"]))
    sent = torch.stack(found[0]["sums"]).sum(dim=0)
    given_in_all = torch.stack([expected(step, ranks) for step in range(steps)]).sum(dim=0)
    kept = kept_back(method, [one["states"] for one in found])
    torch.testing.assert_close(sent + kept, given_in_all, rtol=1e-4, atol=1e-4)
    assert kept.abs().max() > 1e-4


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", [*EXCHANGED, "powersgd"])
def test_without_error_feedback_nothing_is_kept_back(method: str) -> None:
    (one, other) = on_ranks(2, summed, method, False, 1)
    assert torch.equal(one["sums"][0], other["sums"][0])
    assert all(name.startswith("right") for name in one["states"])
    off = (one["sums"][0] - expected(0, 2)).norm() / expected(0, 2).norm()
    assert off < {"bf16": 0.005, "fp16": 0.001, "int8": 0.02, "fp8": 0.06, "1bit": 0.95, "powersgd": 0.95}[method]


@pytest.mark.parametrize("method", [*EXCHANGED, "powersgd"])
def test_a_step_that_is_not_finite_is_so_everywhere_and_leaves_nothing_behind(method: str) -> None:
    found = on_ranks(2, summed, method, True, 3, 1)
    for one in found:
        assert [bool(torch.isfinite(total).all()) for total in one["sums"]] == [True, False, True]
        assert all(torch.isfinite(state).all() for state in one["states"].values())


def test_bytes_are_counted_as_they_leave() -> None:
    """Whole blocks for every rank; of the thin factors what an all-reduce sends."""
    blocks = -(-ELEMENTS // 16 // 2) * 2
    for method, block_bytes in (("int8", 20), ("fp8", 20), ("1bit", 6)):
        for one in on_ranks(2, summed, method, True, 3):
            assert one["bytes"] == 3 * 2 * blocks * block_bytes // 2
    for method in ("bf16", "fp16"):
        for one in on_ranks(2, summed, method, True, 1):
            assert one["bytes"] == 2 * -(-ELEMENTS // 2) * 2
    thin = 2 * (24 + 10) + 3 * 2 * (16 + 12) + 2 * (40 + 40) + 7 + 4
    for one in on_ranks(2, summed, "powersgd", True, 1):
        assert one["bytes"] == thin * 4


def test_powersgd_finds_what_has_low_rank() -> None:
    """A matrix of rank 2 is sent exactly from the second step on: the iteration starts where it ended."""
    for sums in on_ranks(2, low_rank_sums):
        exact, found = sums
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def low_rank_sums() -> tuple[Tensor, Tensor]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    compression = Compression(method="powersgd", rank=2, error_feedback=False)
    reduction = compressed_sum(compression, [torch.Size((30, 20))], group, torch.device("cpu"))
    assert reduction is not None
    left, right = drawn(1, 60).view(30, 2), drawn(2, 40).view(2, 20)
    for _ in range(2):
        flat = (left @ right).reshape(-1) * (rank + 1)
        reduction.start(flat).wait()
    return (left @ right).reshape(-1) * 3, flat
