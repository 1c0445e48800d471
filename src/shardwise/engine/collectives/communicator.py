"""Runs schedules on the tensors of a process group, by messages from rank to rank; and messages around a ring."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.schedule import CollectiveKind, Schedule
from shardwise.engine.collectives.program import (
    IN_PLACE,
    INPUT,
    OUTPUT,
    STAGING,
    Add,
    OwnRound,
    Program,
    Receive,
    Send,
    Start,
    Step,
    TensorRegion,
    Wait,
    ordered,
    program_of,
)
from shardwise.engine.collectives.reductions import (
    NARROW,
    Completion,
    Pending,
    all_reduce_sum,
    backend_of,
    reduce_scatter_sum,
)
from shardwise.engine.mesh import Mesh
from shardwise.engine.profiler_ranges import sent, waited
from shardwise.layout.gradient_schedules import UNNAMED, choose, gradient_groups
from shardwise.layout.groups import RankRun
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

MOST_PROGRAMS = 256
KEPT_STAGING_BYTES = 128 * 2**20
# Tags on gloo: none that other messages of the group use, and different ones for successive collectives.
FIRST_TAG, MESSAGES, COLLECTIVES = 2**24, 2**12, 2**10


class Communicator:
    """Collectives of one group, run in the order of the calls, which must be the same on all ranks.

    On gloo a collective with ``async_op`` runs on a thread of its own, which mostly waits without holding the GIL, so
    that the backward pass computes meanwhile. On a GPU everything is enqueued on the current stream.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._programs: dict[tuple[int, int], _Prepared] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._count = 0
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def run(
        self, schedule: Schedule, input: Tensor | None, output: Tensor | None = None, async_op: bool = False
    ) -> Pending | None:
        """What the backend's own collective of the schedule's kind would do, sums only.

        All-reduce, broadcast and reduce change ``input``; on other ranks than its root a reduce leaves it as it was.
        All-gather, reduce-scatter and all-to-all go from ``input`` to ``output``, in equal blocks; gather has an
        output on the root only and scatter an input; send_recv passes every input on to the next rank. The root is
        rank 0 of the group.
        """
        assert schedule.n == self.group.size()
        tensors = _flat(schedule.kind, input, output)
        prepared = self._prepare(schedule, _elements(schedule, tensors))
        on_cpu = next(iter(tensors.values())).device.type == "cpu"
        if not on_cpu or backend_of(self.group, "cpu") != "gloo":
            self._in_rounds(prepared.program, tensors)
            return Completion() if async_op else None
        self._count += 1
        tag = FIRST_TAG + self._count % COLLECTIVES * MESSAGES
        if not async_op and (self._last is None or self._last.done()):
            self._step(prepared, tensors, tag)
            return None
        self._thread = self._thread or ThreadPoolExecutor(1, "collectives")
        self._last = self._thread.submit(self._step, prepared, tensors, tag)
        if async_op:
            return Completion(self._last.result)
        self._last.result()
        return None

    def _prepare(self, schedule: Schedule, elements: int) -> _Prepared:
        key = id(schedule), elements
        prepared = self._programs.get(key)
        if prepared is None:
            while len(self._programs) >= MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            prepared = self._programs[key] = _Prepared(schedule, self.group.rank(), elements)
        return prepared

    def _with_staging(self, program: Program, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        like = next(iter(tensors.values()))
        needed = program.staging_elements * like.element_size()
        if like.device.type != "cpu":
            return {**tensors, STAGING: like.new_empty(program.staging_elements)}
        staging = self._staging
        if staging.numel() < needed:
            staging = torch.empty(needed, dtype=torch.uint8)
            if needed <= KEPT_STAGING_BYTES:
                self._staging = staging
        return {**tensors, STAGING: staging[:needed].view(like.dtype)}

    def _step(self, prepared: _Prepared, tensors: dict[str, Tensor], tag: int) -> None:
        """On gloo: runs each step as soon as its messages have arrived; tags number the messages."""
        buffers = self._with_staging(prepared.program, tensors)
        works: dict[Any, Any] = {}
        with torch.no_grad():
            for step in prepared.steps:
                match step:
                    case Start(Receive() as receive):
                        into = [_part(buffers, receive.region)]
                        works[receive] = self.group.recv(into, receive.peer, tag + receive.number % MESSAGES), into
                    case Start(Send() as send):
                        source = [_packed(buffers, send.source, send.packed)]
                        works[send] = self.group.send(source, send.peer, tag + send.number % MESSAGES), source
                    case Wait(message):
                        works.pop(message)[0].wait()
                    case Add(target, sources):
                        _add(buffers, target, sources)

    def _in_rounds(self, program: Program, tensors: dict[str, Tensor]) -> None:
        """On NCCL: enqueues the messages of each round as one operation; the host waits for nothing."""
        buffers = self._with_staging(program, tensors)
        with torch.no_grad():
            for copy in program.copies:
                _add(buffers, copy.target, copy.sources)
            for own_round in program.rounds:
                self._round(own_round, buffers)

    def _round(self, own_round: OwnRound, buffers: dict[str, Tensor]) -> None:
        operations = []
        for send in own_round.sends:
            source = _packed(buffers, send.source, send.packed)
            operations.append(dist.P2POp(dist.isend, source, group=self.group, group_peer=send.peer))
        for receive in own_round.receives:
            into = _part(buffers, receive.region)
            operations.append(dist.P2POp(dist.irecv, into, group=self.group, group_peer=receive.peer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for arrival in own_round.arrivals:
            if arrival.sources:
                _add(buffers, arrival.target, arrival.sources)


class _Prepared:
    """A schedule for one rank and size; ``schedule`` is kept alive so that no other gets its id."""

    def __init__(self, schedule: Schedule, rank: int, elements: int) -> None:
        self.schedule = schedule
        self.program = program_of(schedule, rank, elements)
        self.steps: tuple[Step, ...] = ordered(self.program)


def _flat(kind: CollectiveKind, input: Tensor | None, output: Tensor | None) -> dict[str, Tensor]:
    if kind in IN_PLACE:
        assert input is not None
        return {OUTPUT: input.detach().view(-1)}
    given = {INPUT: input, OUTPUT: output}
    return {name: tensor.detach().view(-1) for name, tensor in given.items() if tensor is not None}


def _elements(schedule: Schedule, tensors: dict[str, Tensor]) -> int:
    """Of the tensor, or of one block."""
    kind = schedule.kind
    if kind in IN_PLACE or kind in (CollectiveKind.SCATTER, CollectiveKind.REDUCE_SCATTER):
        return tensors[OUTPUT].numel()
    elements = tensors[INPUT].numel()
    return elements // schedule.n if kind is CollectiveKind.ALL_TO_ALL else elements


def _part(buffers: dict[str, Tensor], region: TensorRegion) -> Tensor:
    return buffers[region.buffer][region.start : region.stop]


def _packed(buffers: dict[str, Tensor], source: TensorRegion, pieces: tuple[TensorRegion, ...]) -> Tensor:
    part = _part(buffers, source)
    if pieces:
        torch.cat([_part(buffers, piece) for piece in pieces], out=part)
    return part


def _add(buffers: dict[str, Tensor], into: TensorRegion, summands: Sequence[TensorRegion]) -> None:
    """Adds in order; more than two 16-bit summands in fp32, rounded once. ``into`` may be one of the first two."""
    target, sources = _part(buffers, into), [_part(buffers, region) for region in summands]
    if len(sources) == 1:
        if target.data_ptr() != sources[0].data_ptr():
            target.copy_(sources[0])
        return
    if len(sources) > 2 and target.dtype in NARROW:
        total = sources[0].float()
        for source in sources[1:]:
            total += source
        target.copy_(total)
        return
    torch.add(sources[0], sources[1], out=target)
    for source in sources[2:]:
        target += source


class RingMessages:
    """Messages around a ring in the background: each rank sends to the next and receives from the one before it.

    One message each way at a time. ``tag`` tells apart the messages of several rings in flight on gloo.
    """

    def __init__(self, group: dist.ProcessGroup, dimension: str, what: str, tag: int = 0) -> None:
        self.group, self.dimension, self.what, self.tag = group, dimension, what, tag
        self._works: list[dist.Work] = []
        self._sending: Tensor | None = None

    def start(self, sending: Tensor, arriving: Tensor) -> None:
        rank, size = self.group.rank(), self.group.size()
        with sent(self.dimension, self.what, sending):
            self._works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sending, group=self.group, tag=self.tag, group_peer=(rank + 1) % size),
                    dist.P2POp(dist.irecv, arriving, group=self.group, tag=self.tag, group_peer=(rank - 1) % size),
                ]
            )
        self._sending = sending  # kept until it is sent

    def wait(self) -> None:
        """On a GPU only the stream waits."""
        with waited(self.dimension, self.what):
            for work in self._works:
                work.wait()
        self._works, self._sending = [], None


# -- How gradients are summed: by the backend, or by the schedule that `strategy.collective` names -
# "auto" takes the backend's own unless one of our schedules is predicted to be faster for this size on the network that
# the group spans.


RUN_ON = ("gloo", "nccl")


class GradientSums:
    """Sums over the groups of a mesh; without a job, by the backend's own collectives."""

    def __init__(self, mesh: Mesh, job: Job | None = None) -> None:
        self.job = job
        self._runs: dict[dist.ProcessGroup, tuple[RankRun, ...]] = {}
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        self._chosen: dict[tuple[dist.ProcessGroup, CollectiveKind, int], Schedule | None] = {}
        if job is not None:
            self._runs = {
                mesh.group(group.name): group.runs for group in gradient_groups(job) if mesh.size(group.name) > 1
            }

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> Pending | None:
        """Starts to sum ``tensor`` in place."""
        schedule = self._schedule(group, CollectiveKind.ALL_REDUCE, tensor)
        if schedule is None:
            return all_reduce_sum(tensor, group, async_op=True, in_fp32=True)
        return self._communicator(group).run(schedule, tensor, async_op=True)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False, *, in_fp32: bool = False
    ) -> Pending | None:
        """Like `reduce_scatter_sum`: with ``async_op``, ``output`` must not be read before `wait`."""
        schedule = self._schedule(group, CollectiveKind.REDUCE_SCATTER, input)
        if schedule is None or output.dtype != input.dtype:
            return reduce_scatter_sum(output, input, group, async_op, in_fp32=in_fp32)
        if not async_op:
            return self._communicator(group).run(schedule, input, output)
        summed = torch.empty_like(output)
        work = self._communicator(group).run(schedule, input, summed, async_op=True)
        assert work is not None

        def write() -> None:
            work.wait()
            output.copy_(summed)

        return Completion(write)

    def _communicator(self, group: dist.ProcessGroup) -> Communicator:
        if group not in self._communicators:
            self._communicators[group] = Communicator(group)
        return self._communicators[group]

    def _schedule(self, group: dist.ProcessGroup, kind: CollectiveKind, tensor: Tensor) -> Schedule | None:
        """The schedule for a tensor, or None; the same on all ranks, since it depends only on what all of them know."""
        runs = self._runs.get(group)
        if runs is None or self.job is None or backend_of(group, tensor.device.type) not in RUN_ON:
            return None
        size = tensor.numel() * tensor.element_size()
        key = group, kind, size
        if key not in self._chosen:
            wanted = self.job.strategy.collective
            try:
                self._chosen[key] = choose(kind, size, self.job.cluster, runs, wanted).schedule
            except SpecError:
                if wanted not in UNNAMED:
                    raise
                self._chosen[key] = None  # a group across the levels of the cluster, for which no network is described
        return self._chosen[key]
