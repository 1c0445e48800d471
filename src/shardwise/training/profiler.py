"""What a rank records: the collectives that it has begun, and a few steps in detail."""

from __future__ import annotations

import os
import select
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler as autograd_profiler

from shardwise.engine.labels import backend_operation, layer_name, of_backend, step_name
from shardwise.engine.mesh import own
from shardwise.engine.parameters import local
from shardwise.engine.profiler_ranges import named, nvtx_ranges
from shardwise.engine.torch_private import (
    DeviceType,
    disable_profiler,
    enable_profiler,
    flight_entries,
    inside_every_call,
    prepare_profiler,
    process_groups,
    profiler_kinds,
)
from shardwise.engine.trainer import Trainer
from shardwise.layout.groups import node_of
from shardwise.layout.stages import built_layers
from shardwise.run.attempt import STACKS_SIGNAL
from shardwise.run.records import HOST, STREAMS, Collective, Flight, FlightRecord, GroupRecord, NamedRange, RankRecord
from shardwise.spec.run import Profile, StepWindow

# -- PyTorch's flight recorder: which collectives each group has begun and ended ---------------------
# gloo records collectives, NCCL messages too. Reading it involves no other rank: a thread can write it while the rank
# is blocked.

_BUFFER = "TORCH_FR_BUFFER_SIZE"
USUAL, PROFILED = 512, 20_000  # entries in the buffer; a profile needs those of all its steps
KEPT = 64  # collectives of a group in a record
PERIOD_SECONDS = 30.0  # between two records, aligned on all ranks; one costs a few milliseconds
_SECOND_SECONDS = 5.0  # until the second record, for short runs
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}  # others take 1
_UNNAMED = {"undefined": "", "default_pg": "all ranks"}  # descriptions that PyTorch gives


def record_collectives(entries: int = USUAL) -> None:
    """Makes backends record; called before the process group is created. The user's own setting stays."""
    os.environ.setdefault(_BUFFER, str(entries))


@dataclass(frozen=True)
class BackendEntry:
    backend: str
    group: str
    meaning: str
    members: tuple[int, ...]  # ranks of its group
    is_message: bool  # between two of the members
    collective: Collective


def backend_log() -> Iterator[BackendEntry]:
    """What the backends' logs still hold of existing groups, oldest first for each backend."""
    members = {group.group_name: tuple(dist.get_process_group_ranks(group)) for group in process_groups()}
    for entry in flight_entries():
        name, meaning = entry["process_group"]
        if name not in members:
            continue
        sizes = zip(entry["input_sizes"], entry["input_dtypes"])
        yield BackendEntry(
            entry["profiling_name"].partition(":")[0],
            name,
            _UNNAMED.get(meaning, meaning),
            members[name],
            entry["is_p2p"],
            Collective(
                number=entry["collective_seq_id"],
                operation=backend_operation(entry["profiling_name"]),
                bytes=sum(prod(size) * _BYTES.get(kind, 1) for size, kind in sizes),
                done=entry["retired"],
                at_ns=entry["time_created_ns"],
            ),
        )


def take_record(rank: int) -> FlightRecord:
    """The last collectives of every group of this process."""
    now = time.time()
    kept: dict[tuple[str, str, tuple[int, ...]], deque[Collective]] = defaultdict(lambda: deque(maxlen=KEPT))
    for entry in backend_log():
        if len(entry.members) > 1 and not entry.is_message:
            # On GPUs a group has two backends, each of which counts its own collectives.
            kept[f"{entry.backend} {entry.group}", entry.meaning, entry.members].append(entry.collective)
    return FlightRecord(rank, now, tuple(GroupRecord(*group, tuple(some)) for group, some in kept.items()))


@contextmanager
def flights_watched(folder: Path, rank: int, requests: int | None) -> Iterator[None]:
    """Writes this rank's record to ``folder`` now and then, when `STACKS_SIGNAL` comes, and when the block fails."""
    watch = _FlightWatch(folder, rank, requests)
    try:
        yield
    except Exception:
        watch.write()
        raise
    finally:
        watch.close()


class _FlightWatch:
    """Writes records in a thread, since the training thread may be blocked in a collective.

    The file ``requests`` gets a byte for every signal.
    """

    def __init__(self, folder: Path, rank: int, requests: int | None) -> None:
        self._folder, self._rank, self._requests = folder, rank, requests
        self._ended = threading.Event()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="flight", daemon=True)
        self._thread.start()

    def write(self) -> None:
        with suppress(OSError, RuntimeError):  # a full disk; a process group that is being destroyed
            take_record(self._rank).write(self._folder)

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        self.write()  # once a rank has a record, the launcher waits for a newer one
        seconds = _SECOND_SECONDS
        while True:
            requested = self._requested_within(seconds)
            if self._ended.is_set():
                return
            if requested is not False:
                self.write()
            seconds = PERIOD_SECONDS - time.time() % PERIOD_SECONDS

    def _requested_within(self, seconds: float) -> bool | None:
        """None if the time has passed; False if another signal came."""
        if self._requests is None:
            self._ended.wait(seconds)
            return None
        if not select.select([self._requests], [], [], seconds)[0]:
            return None
        return int(STACKS_SIGNAL) in os.read(self._requests, 4096)


# -- a few steps: every phase, layer and collective, on a clock shared by all ranks ------------------


@contextmanager
def layers_named(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Names the forward pass of every layer by its number while the block runs.

    Data parallelism gathers before a layer's range begins and frees after it ends; in a compiled layer both are inside.
    """
    undo = []
    for stage in stages:
        layers: Any = getattr(stage, "layers", None)
        for index, layer in layers.items() if isinstance(layers, nn.ModuleDict) else ():
            undo.append(inside_every_call(layer, partial(named, layer_name(index))))
    try:
        yield
    finally:
        for end in undo:
            end()


_BARRIERS = 11


def clock_offset() -> tuple[int, int]:
    """This rank's wall clock minus rank 0's, and the possible error, in nanoseconds; all ranks call it together.

    Ranks of a machine share a clock. Others leave a barrier at nearly the same moment: the median over several counts.
    """
    left = []
    for _ in range(_BARRIERS):
        dist.barrier()
        left.append(time.time_ns())
    clocks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(clocks, (_machine(), left))
    machine, first = clocks[0]
    if machine and machine == _machine():
        return 0, 0
    offsets = [mine - other for mine, other in zip(left, first)]
    middle = int(statistics.median(offsets))
    return middle, int(statistics.median(abs(offset - middle) for offset in offsets))


def _machine() -> str:
    """An id of the running kernel (boot id); empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return ""


@contextmanager
def recorded(device: torch.device) -> Iterator[Callable[[int], list[NamedRange]]]:
    """Records the named ranges of a block; afterwards gives them in seconds since a moment in nanoseconds.

    The engine names passes, layers and collectives, the backend its own work. Operators are left out: recording one
    takes as long as a small one runs.
    """
    kinds: Any = profiler_kinds
    activities = {kinds.ProfilerActivity.CPU}
    if device.type == "cuda":
        activities.add(kinds.ProfilerActivity.CUDA)
    # The public class has no scopes, but makes the settings, which differ between versions.
    settings = autograd_profiler.profile(use_kineto=True, use_device="cuda" if device.type == "cuda" else None)
    config = settings.config(create_trace_id=False)  # type: ignore[no-untyped-call]
    prepare_profiler(config, activities)
    enable_profiler(config, activities, {kinds.RecordScope.USER_SCOPE})
    events: list[Any] = []
    try:
        yield lambda zero_ns: _ranges(events, zero_ns)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        events += disable_profiler().events()


def _ranges(events: list[Any], zero_ns: int) -> list[NamedRange]:
    """The ranges in the order of their starts, each before those inside it."""
    host, lanes = threading.get_native_id(), dict[Any, int]()

    def lane(event: Any) -> int:
        """A small number for a thread; HOST for the calling one, which trains."""
        if event.device_type() != DeviceType.CPU:
            return STREAMS + int(event.device_resource_id())
        thread = int(event.device_resource_id())
        # gloo's sends and receives begin on the training thread and end there much later: they get their own lane.
        if thread == host and not of_backend(event.name()):
            return HOST
        return lanes.setdefault((thread, of_backend(event.name())), len(lanes) + 1)

    ranges = [
        NamedRange(event.name(), (event.start_ns() - zero_ns) / 1e9, (event.end_ns() - zero_ns) / 1e9, lane(event))
        for event in events
        if event.duration_ns() > 0
    ]
    return sorted(ranges, key=lambda span: (span.start, -span.end))


def flights(begin_ns: int, end_ns: int, zero_ns: int) -> tuple[Flight, ...]:
    """The backend's log (PyTorch's flight recorder) between two moments, in seconds since a third.

    gloo logs only collectives, without durations.
    """
    return tuple(
        Flight(
            entry.collective.operation, entry.members, entry.collective.bytes, (entry.collective.at_ns - zero_ns) / 1e9
        )
        for entry in backend_log()
        if begin_ns <= entry.collective.at_ns <= end_ns and entry.backend != "nccl"  # never compared with a plan yet
    )


class WindowOfSteps:
    """`step` wraps every step of a run, counted from 1; those in ``window`` are named, between `_begin` and `_end`."""

    def __init__(self, trainer: Trainer[Any], window: StepWindow) -> None:
        self.trainer, self.window = trainer, window
        self._open: ExitStack | None = None

    def covers(self, number: int) -> bool:
        """Whether a step is in the window; also one that is repeated within it."""
        return self.window.has(number) or self._open is not None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if not self.covers(number):
            yield
            return
        if self._open is None:
            self._begin()
        with named(step_name(number)):
            yield
        if self._place(number) == self.window.last:
            self._end()

    def _place(self, number: int) -> int:
        """The step's counterpart in the first window."""
        return number

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class Profiler(WindowOfSteps):
    """Records the steps of ``window`` and writes them to ``folder``.

    With ``every`` the window recurs after that many steps, and its record replaces the previous one.
    """

    def __init__(self, trainer: Trainer[Any], window: Profile, folder: Path, every: int | None = None) -> None:
        super().__init__(trainer, window)
        self.folder, self.every = folder, every
        self._ranges: Callable[[int], list[NamedRange]] = lambda zero_ns: []
        self._offset_ns = self._error_ns = 0

    def covers(self, number: int) -> bool:
        """Whether a step, counted from 1, is recorded; none is if the run begins in the middle of the window."""
        return self._place(number) == self.window.first or self._open is not None

    def _place(self, number: int) -> int:
        beyond = number - self.window.first
        return number if self.every is None or beyond < 0 else self.window.first + beyond % self.every

    def _begin(self) -> None:
        self._offset_ns, self._error_ns = clock_offset()
        self._open = ExitStack()
        self._open.enter_context(layers_named(self.trainer.stages.values()))
        self._ranges = self._open.enter_context(recorded(self.trainer.device))

    def _end(self) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None
        ranges = self._ranges(0)
        zero: list[Any] = [min((span.start for span in ranges), default=0.0)]
        dist.broadcast_object_list(zero, 0)
        zero_ns = int(zero[0] * 1e9) + self._offset_ns
        begin, end = (int(1e9 * moment) for moment in (ranges[0].start, max(span.end for span in ranges)))
        self._record(self._ranges(zero_ns), flights(begin, end, zero_ns)).write(self.folder)
        dist.barrier()  # the folder is complete when any rank continues

    def _record(self, ranges: list[NamedRange], backend: tuple[Flight, ...]) -> RankRecord:
        trainer, job, rank = self.trainer, self.trainer.job, dist.get_rank()
        layers = built_layers(job)
        ranks_per_node = job.cluster.node_devices if job.run.emulate is None else job.run.emulate.ranks_per_node
        return RankRecord(
            rank=rank,
            node=node_of(rank, ranks_per_node),
            device=trainer.device.type,
            clock_error=self._error_ns / 1e9,
            groups={name: own(division) for name, division in trainer.mesh.divisions.items()},
            stages={stage: tuple(layers[stage]) for stage in trainer.stages},
            memory=state_bytes(trainer),
            ranges=tuple(ranges),
            flights=backend,
        )


def state_bytes(trainer: Trainer[Any]) -> dict[str, int]:
    """Bytes on this rank's device between two steps: weights and optimizer states."""
    weights = [local(held.parameter) for held in trainer.parameters]
    # Sharded weights are also the fp32 masters: counted once.
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    states = {
        value.untyped_storage().data_ptr(): value
        for of_parameter in trainer.optimizer.state.values()
        for value in (local(state) for state in of_parameter.values() if isinstance(state, torch.Tensor))
    }
    return {
        # Offloaded weights have no storage here.
        "weights": sum(min(weight.nbytes, weight.untyped_storage().nbytes()) for weight in weights),
        "optimizer": sum(state.nbytes for place, state in states.items() if place not in known),
    }


# -- NVTX ranges in some steps of a run, for nsys and other GPU tools --------------------------------


class NvtxSteps(WindowOfSteps):
    """The steps of ``window`` have ranges, between cudaProfilerStart and Stop.

    nsys with `--capture-range=cudaProfilerApi` records from the first process that starts to the first that stops. So
    all ranks begin together, and end once the devices of all are done.
    """

    def _begin(self) -> None:
        self._meet()
        self._open = ExitStack()
        self._open.callback(torch.cuda.profiler.stop)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._open.enter_context(layers_named(self.trainer.stages.values()))
        self._open.enter_context(nvtx_ranges())

    def _end(self) -> None:
        assert self._open is not None
        self._meet()
        self._open.close()
        self._open = None

    def _meet(self) -> None:
        """Waits until all ranks are here and their devices idle."""
        torch.cuda.synchronize(self.trainer.device)
        dist.barrier()
        torch.cuda.synchronize(self.trainer.device)  # the barrier is a kernel of its own
