"""Sums over ranks against the same sums in one process: values, bits, formats, sizes, order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.workers import on_ranks
from shardwise.engine.collectives import reductions
from shardwise.engine.collectives.reductions import all_gather, all_reduce_sum, reduce_scatter_sum

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def given(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(elements, generator=generator, dtype=torch.float64) * 10
    return values.to(dtype)


def added_in_order(ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
    """From the first rank to the last; 16-bit numbers in fp32 and rounded once."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = given(0, elements, dtype).to(wide)
    for rank in range(1, ranks):
        total = total + given(rank, elements, dtype).to(wide)
    return total.to(dtype)


def scattered(elements: int, dtype: torch.dtype, in_background: bool, at_once: int) -> Tensor:
    reductions.TEMPORARY_BYTES = at_once
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, output = given(rank, elements * world, dtype), torch.empty(elements, dtype=dtype)
    work = reduce_scatter_sum(output, mine, dist.group.WORLD, async_op=in_background)
    if in_background:
        assert work is not None
        work.wait()
    reductions.TEMPORARY_BYTES = 64 * 2**20
    assert torch.equal(mine, given(rank, elements * world, dtype))
    return output


@pytest.mark.quick(7)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_reduce_scatter_adds_in_the_order_of_the_ranks(world: int, dtype: torch.dtype) -> None:
    for elements, in_background, at_once in ((5, False, 2**20), (1000, True, 2**20), (1000, False, 300), (0, False, 9)):
        expected = added_in_order(world, elements * world, dtype).view(world, elements)
        for rank, found in enumerate(on_ranks(world, scattered, elements, dtype, in_background, at_once)):
            assert torch.equal(found, expected[rank])


def reduced(shape: tuple[int, ...], dtype: torch.dtype, in_background: bool) -> Tensor:
    tensor = given(dist.get_rank(), int(torch.Size(shape).numel()), dtype).view(shape)
    work = all_reduce_sum(tensor, dist.group.WORLD, async_op=in_background)
    if work is not None:
        work.wait()
    return tensor


@pytest.mark.quick(7)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("in_background", [False, True])
def test_an_all_reduce_is_the_same_on_every_rank(world: int, dtype: torch.dtype, in_background: bool) -> None:
    for shape in ((), (7, 3)):
        expected = added_in_order(world, int(torch.Size(shape).numel()), dtype).view(shape)
        found = on_ranks(world, reduced, shape, dtype, in_background)
        assert all(torch.equal(one, found[0]) for one in found)
        assert torch.allclose(found[0].double(), expected.double(), rtol=1e-5)


def many_at_once() -> list[Tensor]:
    """Several in flight, waited for in the other order, with buffers that are lent again."""
    rank, outputs, works = dist.get_rank(), [], []
    for number in range(6):
        outputs.append(torch.empty(100))
        mine = torch.full((200,), float(number + 10 * rank))
        works.append(reduce_scatter_sum(outputs[-1], mine, dist.group.WORLD, async_op=True))
    for work in reversed(works):
        assert work is not None
        work.wait()
    return outputs


def test_several_in_flight() -> None:
    for found in on_ranks(2, many_at_once):
        assert [one.unique().tolist() for one in found] == [[2.0 * number + 10] for number in range(6)]


def gathered(in_place: bool) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    output = torch.zeros(world * 3)
    mine = output[rank * 3 : rank * 3 + 3] if in_place else torch.empty(3)
    mine.fill_(rank + 1)
    all_gather(output, mine, dist.group.WORLD)
    return output


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_all_gather(world: int, in_place: bool) -> None:
    for found in on_ranks(world, gathered, in_place):
        assert torch.equal(found, torch.arange(1.0, world + 1).repeat_interleave(3))


def lent_memory() -> list[int]:
    """A lent tensor comes back when it is let go, and is lent again; never two at a time."""
    scratch = reductions.SCRATCH
    scratch.free.clear()
    first, second = scratch.lend(1000, torch.float32), scratch.lend(1000, torch.float32)
    places = [first.data_ptr(), second.data_ptr()]
    part = first[3:]  # does not keep it: whoever lends keeps the whole
    del first, part
    third = scratch.lend(500, torch.bfloat16)
    return [*places, third.data_ptr(), len(scratch.free)]


def test_scratch_memory_is_lent_again() -> None:
    first, second, third, free = lent_memory()
    assert first != second and free in (0, 1)
    assert third == first or free == 1


def test_the_fake_backend_shows_the_collective_itself() -> None:
    for found in on_ranks(1, on_fake_backend):
        assert found == ["fake", "reduce_scatter"]


def on_fake_backend() -> list[str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    ours = reductions.on_gloo(dist.group.WORLD, "cpu")
    reduce_scatter_sum(torch.empty(2), torch.empty(16), dist.group.WORLD)
    all_reduce_sum(torch.empty(5, dtype=torch.bfloat16), dist.group.WORLD)
    return [dist.get_backend(), "exchange" if ours else "reduce_scatter"]
