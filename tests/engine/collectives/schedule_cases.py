"""Shared by the tests of collectives: schedules to try, what each must end with, and many of them in one call."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import CollectiveKind, Schedule, Topology, build_schedule, pairs
from shardwise.collectives.build import pipelined
from shardwise.engine.collectives import Communicator

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
# Of numbers around 10, some of which cancel, after up to 7 roundings.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 5e-2, torch.float16: 6e-3}
ROOTED = (CollectiveKind.REDUCE, CollectiveKind.GATHER)


def topologies(n: int) -> list[Topology]:
    """Every kind of network of ``n`` devices, tori and hierarchies for every way to write n as a product."""
    single = [getattr(Topology, name)(n, 1e9, 1e-5) for name in ("line", "ring", "tree", "switch", "fully_connected")]
    ways = [(inner, n // inner) for inner in range(2, n) if n % inner == 0]
    grids = [getattr(Topology, name)(pair, 1e9, 1e-5) for pair in ways for name in ("mesh", "torus")]
    levels = [Topology.hierarchical(pair, [1e9, 1e8], [1e-5, 1e-3]) for pair in ways]
    deep = [Topology.hierarchical([2, 2, 2], [1e9, 1e8, 1e7], [0, 0, 0])] if n == 8 else []
    return [*single, *grids, *levels, *deep]


def schedules(n: int) -> Iterator[Schedule]:
    """Every schedule of every collective for ``n`` ranks."""
    for topology in topologies(n):
        for kind in CollectiveKind:
            for pair in pairs(kind, topology.name):
                if pair.has_schedule:
                    yield build_schedule(kind, topology, pair.algorithm)


@dataclass(frozen=True)
class Result:
    """``wrong`` names the cases whose values differ from the reference; ``bits`` of what all ranks must have alike."""

    wrong: list[str]
    bits: list[int]


def run_all(seed: int, in_rounds: bool, device: str = "cpu") -> Result:
    """Every schedule for the world and for a part of it, on tensors of random sizes and formats."""
    random = Random(seed)
    world = dist.get_world_size()
    members = sorted(random.sample(range(world), random.randint(2, world)))
    part = dist.new_group(members)
    wrong: list[str] = []
    bits: list[int] = []
    for ranks, group in ((list(range(world)), dist.group.WORLD), (members, part)):
        if dist.get_rank() not in ranks:
            bits += [0]
            for _ in schedules(len(ranks)):
                _draw(random)
            continue
        assert group is not None
        communicator = Communicator(group)
        total = 0
        for schedule in schedules(len(ranks)):
            elements, dtype, pieces, in_background = _draw(random)
            one = pipelined(schedule, pieces)
            result, expected = _case(communicator, one, elements, dtype, in_background, in_rounds, device)
            if not _close(result, expected):
                wrong.append(f"{one.algorithm} {one.kind} of {elements} {dtype} on {len(ranks)}, {pieces} pieces")
            if schedule.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST):
                total = _bits(result, total)
        bits.append(total)
    return Result(wrong, bits)


def _draw(random: Random) -> tuple[int, torch.dtype, int, bool]:
    elements = random.choice((0, 1, 2, random.randint(3, 40), random.randint(100, 5000)))
    return elements, random.choice(TYPES), random.choice((1, 1, 2, 5)), random.random() < 0.3


def given(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(elements, generator=generator, dtype=torch.float64) * 10).to(dtype)


def _case(
    communicator: Communicator,
    schedule: Schedule,
    elements: int,
    dtype: torch.dtype,
    in_background: bool,
    in_rounds: bool,
    device: str,
) -> tuple[Tensor, Tensor]:
    """What a rank has afterwards and what it should have; nothing of either where it gets nothing."""
    kind, n, rank = schedule.kind, schedule.n, communicator.group.rank()
    tensors = [None if one is None else one.to(device) for one in inputs_and_output(kind, n, rank, elements, dtype)]
    untouched = [None if one is None else one.clone() for one in tensors]
    if in_rounds:
        prepared = communicator._prepare(schedule, elements)
        flat = [None if one is None else one.view(-1) for one in tensors]
        from shardwise.engine.collectives import communicator as module

        communicator._in_rounds(prepared.program, module._flat(kind, *flat))
    else:
        work = communicator.run(schedule, *tensors, async_op=in_background)
        if work is not None:
            work.wait()
    input, output = tensors
    if output is not None and input is not None:
        assert torch.equal(input, untouched[0]), f"{kind} changed its input"
    result = input if output is None else output
    expected = reference(kind, n, rank, elements, dtype)
    if expected is None:
        return torch.empty(0), torch.empty(0)
    assert result is not None
    return result.cpu(), expected


def inputs_and_output(
    kind: CollectiveKind, n: int, rank: int, elements: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    block, whole = torch.full((elements,), 99, dtype=dtype), torch.full((n * elements,), 99, dtype=dtype)
    match kind:
        case CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE | CollectiveKind.BROADCAST:
            return given(rank, elements, dtype), None
        case CollectiveKind.ALL_GATHER:
            return given(rank, elements, dtype), whole
        case CollectiveKind.GATHER:
            return given(rank, elements, dtype), whole if rank == 0 else None
        case CollectiveKind.SCATTER:
            return given(rank, n * elements, dtype) if rank == 0 else None, block
        case CollectiveKind.REDUCE_SCATTER:
            return given(rank, n * elements, dtype), block
        case CollectiveKind.ALL_TO_ALL:
            return given(rank, n * elements, dtype), whole
        case CollectiveKind.SEND_RECV:
            return given(rank, elements, dtype), block


def reference(kind: CollectiveKind, n: int, rank: int, elements: int, dtype: torch.dtype) -> Tensor | None:
    own = slice(rank * elements, (rank + 1) * elements)
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return _sum(n, elements, dtype)
        case CollectiveKind.REDUCE:
            return _sum(n, elements, dtype) if rank == 0 else given(rank, elements, dtype)
        case CollectiveKind.BROADCAST:
            return given(0, elements, dtype)
        case CollectiveKind.ALL_GATHER:
            return torch.cat([given(other, elements, dtype) for other in range(n)])
        case CollectiveKind.GATHER:
            return torch.cat([given(other, elements, dtype) for other in range(n)]) if rank == 0 else None
        case CollectiveKind.SCATTER:
            return given(0, n * elements, dtype)[own]
        case CollectiveKind.REDUCE_SCATTER:
            return _sum(n, n * elements, dtype)[own]
        case CollectiveKind.ALL_TO_ALL:
            return torch.cat([given(other, n * elements, dtype)[own] for other in range(n)])
        case CollectiveKind.SEND_RECV:
            return given(rank - 1, elements, dtype) if rank else None


def _sum(n: int, elements: int, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype.is_floating_point else dtype
    return torch.stack([given(rank, elements, dtype).to(wide) for rank in range(n)]).sum(0).to(wide)


def _close(result: Tensor, expected: Tensor) -> bool:
    if result.shape != expected.shape:
        return False
    if not result.dtype.is_floating_point:
        return torch.equal(result, expected.to(result.dtype))
    tolerance = TOLERANCE.get(result.dtype, 0.0)
    return bool(((result.double() - expected.double()).abs() <= tolerance * (10 + expected.double().abs())).all())


def _bits(tensor: Tensor, before: int) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes(), before)
