"""Optimizer states kept and updated outside of the device's memory: gradients go out, new weights come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.engine.offload.store import GRADIENT, MASTER, Incoming, Store, StoredRegion, host_tensor
from shardwise.engine.offload.streamed import StreamedUpdate, UpdatedWeights
from shardwise.engine.optim.updates import Update
from shardwise.engine.parameters import local
from shardwise.layout.payloads import Payload, Phase, Role, sent_backward, sent_forward
from shardwise.layout.pieces import update_chunk


@dataclass(frozen=True)
class FlatRow:
    """A parameter's place in the row of all local elements."""

    parameter: nn.Parameter
    begin: int
    size: int  # number of its elements, which follow each other
    group: int  # of the optimizer, by number


def rows_of(groups: Sequence[dict[str, Any]]) -> list[FlatRow]:
    """The rows of all matrices. Vectors stay on the device: their short copies would queue behind long ones."""
    rows: list[FlatRow] = []
    begin = 0
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter.dim() > 1:
                assert local(parameter).is_contiguous(), "parts of it are written as parts of a row"
                size = local(parameter).numel()
                rows.append(FlatRow(parameter, begin, size, number))
                begin += size
    return rows


def whole_rows(rows: Sequence[FlatRow], share: float, most: int) -> int:
    """How many leading elements come nearest to a share of all, in whole parameters and no more than ``most``."""
    wanted = share * sum(row.size for row in rows)
    ends = [0, *(row.begin + row.size for row in rows)]
    return min((end for end in ends if end <= most), key=lambda end: abs(end - wanted))


# Elements that the host updates at a time: 4 MiB of every state, which a disk reads at full speed.
CHUNK_ELEMENTS = 2**20
BYTES = 4  # states are fp32


class StoredStates:
    """States ``names`` of the first ``elements`` of the ``rows``, in a region of the store.

    In host memory this is ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840); on a disk, with a few states in host memory
    at a time, ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857). All elements of a rank's parameters form one
    row, in the order of the optimizer's groups. AdamW and SGD work element by element, so the row may be cut anywhere.
    The weights of the first ``weights`` elements, and the gradient sums of the first ``gradients``, are here instead of
    on the device; both counts end at the end of a parameter. Without elements no store is needed.
    """

    def __init__(
        self, rows: Sequence[FlatRow], names: Sequence[str], store: Store | None, elements: int, weights: int = 0,
        gradients: int = 0,
    ) -> None:  # fmt: skip
        self.rows, self.states, self._store = rows, tuple(names), store
        self.weights, self.gradients = weights, gradients
        self.elements = 0
        self.summed: dict[nn.Parameter, Tensor] = {}  # norms of the gradients that are here in this step
        self._row = {row.parameter: row for row in rows}
        self._starts: dict[str, int] = {}  # where in the region, in elements
        self._region: StoredRegion | None = None
        self._cuts: set[int] = set()  # places in the row that no chunk crosses
        self.streamed = StreamedUpdate(self) if store is not None and store.updates_on_device else None
        self.resize(elements)

    @property
    def store(self) -> Store:
        assert self._store is not None, "made without a store"
        return self._store

    def count(self, parameter: nn.Parameter) -> int:
        """How many of a parameter's first local elements have their states here."""
        return self._first(parameter, self.elements)

    def has_weights(self, parameter: nn.Parameter) -> bool:
        return self._first(parameter, self.weights) > 0

    def has_gradients(self, parameter: nn.Parameter) -> bool:
        return self._first(parameter, self.gradients) > 0

    def _first(self, parameter: nn.Parameter, elements: int) -> int:
        row = self._row.get(parameter)
        return 0 if row is None else min(max(elements - row.begin, 0), row.size)

    def _sizes(self, elements: int) -> dict[str, int]:
        """Elements of everything that is here."""
        apart = {MASTER: self.weights, GRADIENT: self.gradients}
        return dict.fromkeys(self.states, elements) | {name: size for name, size in apart.items() if size}

    def resize(self, elements: int) -> None:
        """Makes room for ``elements``: old states are kept, new ones are zero.

        Everything is written now, so that a full disk is noticed before the first step.
        """
        self.settle()
        old, starts, had = self._region, self._starts, self._sizes(self.elements)
        sizes = self._sizes(elements)
        self.elements = elements if sizes else 0
        self._starts = dict(zip(sizes, accumulate(sizes.values(), initial=0)))
        new = self._region = self.store.region(BYTES * sum(sizes.values())) if self.elements else None
        for name, size in sizes.items() if new is not None else ():
            for begin, end in _parts(0, size, CHUNK_ELEMENTS):
                values = torch.zeros(end - begin)
                if old is not None and begin < had[name]:
                    kept = values[: min(end, had[name]) - begin]
                    old.read(BYTES * (starts[name] + begin), kept).wait()
                new.write(self._place(name, begin), values).wait()  # type: ignore[union-attr]
        if old is not None:
            self.store.take_back(old)
        if self.streamed is not None:
            self.streamed.make_slots()

    def read(self, parameter: nn.Parameter, name: str, start: int = 0) -> Tensor:
        """A copy in host memory of the stored elements from ``start`` on."""
        self.settle()
        count = self._row[parameter].size if name == MASTER and self.weights else self.count(parameter)
        values = torch.empty(count - start)
        if self._region is not None and values.numel():
            self._region.read(self._place(name, self._row[parameter].begin + start), values).wait()
        return values

    def write(self, parameter: nn.Parameter, name: str, values: Tensor, start: int = 0) -> None:
        self.settle()
        if self._region is not None and values.numel():
            values = values.detach().to(torch.float32).contiguous()
            self._region.write(self._place(name, self._row[parameter].begin + start), values).wait()
            if self.streamed is not None:
                self.streamed.drop()

    def cut_units(self, units: Iterable[Sequence[nn.Parameter]]) -> None:
        """Cuts chunks so that none holds weights of two units, since units are fetched one after the other."""
        self._cuts = {min(self._row[parameter].begin for parameter in unit) for unit in units}
        if self.streamed is not None:
            self.streamed.make_slots()

    def bring_weights(self, parameters: Sequence[nn.Parameter], phase: Phase) -> list[Incoming]:
        """Starts to copy stored weights into the parameters' own memory, after an update that is still due."""
        assert self._region is not None
        streamed, copies = self.streamed, list[Incoming]()
        updated: Set[nn.Parameter] = frozenset() if streamed is None else streamed.deliver(parameters)
        if streamed is not None and updated:
            copies.append(UpdatedWeights(streamed, updated))
        for parameter in parameters:
            if parameter in updated:
                continue
            if streamed is not None:
                streamed.stored_of(parameter, self.store.lanes.stream(out=False))
            copies.append(self._region.bring(self._place(MASTER, self._row[parameter].begin), local(parameter)))
            self.store.lanes.moved[Payload(Role.WEIGHTS_FROM_HOST, phase)] += local(parameter).nbytes
        return copies

    def gradient_place(self, parameter: nn.Parameter) -> tuple[StoredRegion, int]:
        assert self._region is not None
        return self._region, self._place(GRADIENT, self._row[parameter].begin)

    def settle(self) -> None:
        """Waits for updates in flight: the host is about to read or write what is stored."""
        if self.streamed is not None:
            self.streamed.settle()

    def update(self, updates: Sequence[Update]) -> None:
        """One step of every group, in host memory: chunk k+1 is read and chunk k−1 written while k is computed."""
        chunks = list(self.chunks(CHUNK_ELEMENTS))
        slots: list[_Slot] = []
        for number, chunk in enumerate(chunks):
            if number == 0:
                slots.append(_Slot(self, chunk))
            if number + 1 < len(chunks):
                # At most three chunks are in memory: the one before the last is written before the next is read.
                if len(slots) > 1:
                    slots.pop(0).wait()
                slots.append(_Slot(self, chunks[number + 1]))
            (slots[-2] if number + 1 < len(chunks) else slots[-1]).update(updates[chunk.group])
        for slot in slots:
            slot.wait()

    def _place(self, name: str, element: int) -> int:
        return BYTES * (self._starts[name] + element)

    def chunks(self, most: int) -> Iterator[StateChunk]:
        """Chunks of at most ``most`` elements, those of the smallest group first."""
        groups: dict[int, list[FlatRow]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        for group, rows in sorted(groups.items(), key=lambda group: sum(row.size for row in group[1])):
            first, last = rows[0].begin, min(rows[-1].begin + rows[-1].size, self.elements)
            inside = {cut for cut in (self.weights, self.gradients, *self._cuts) if first < cut < last}
            cuts = sorted({first, last, *inside})
            at_once = update_chunk(self.elements, most)
            for start, stop in pairwise(cuts):
                for begin, end in _parts(start, stop, at_once):
                    yield StateChunk(begin, end, group, tuple(_pieces(rows, begin, end)))

    def names_of(self, chunk: StateChunk) -> list[str]:
        return [name for name, size in self._sizes(self.elements).items() if chunk.begin < size]

    def copy_in(self, chunk: StateChunk, here: Mapping[str, Tensor], *, sent_ahead: bool) -> None:
        """Copies the chunk's states to the device; ``sent_ahead``: for the update after the next backward pass."""
        ahead, later = sent_backward(Role.FIRST_STATES_FROM_HOST), sent_forward(Role.STATES_FROM_HOST)
        payload = ahead if sent_ahead else later
        for name, tensor in here.items():
            tensor.copy_(self._in_memory(name, chunk), non_blocking=True)
            self.store.lanes.moved[payload] += tensor.nbytes

    def copy_out(self, chunk: StateChunk, here: Mapping[str, Tensor]) -> None:
        for name, tensor in here.items():
            self._in_memory(name, chunk).copy_(tensor, non_blocking=True)
            self.store.lanes.moved[sent_forward(Role.STATES_TO_HOST)] += tensor.nbytes

    def _in_memory(self, name: str, chunk: StateChunk) -> Tensor:
        assert self._region is not None
        there = self._region.in_memory(self._place(name, chunk.begin), BYTES * (chunk.end - chunk.begin))
        assert there is not None
        return there.view(torch.float32)

    def _fetch(self, name: str, begin: int, end: int) -> tuple[Tensor, Any]:
        """States of some elements in host memory; from a disk, with the copy that reads them."""
        assert self._region is not None
        place, size = self._place(name, begin), BYTES * (end - begin)
        there = self._region.in_memory(place, size)
        if there is not None:
            return there.view(torch.float32), None
        values = torch.empty(end - begin)
        role = Role.GRADIENTS_FROM_DISK if name == GRADIENT else Role.STATES_FROM_DISK
        self.store.lanes.moved[sent_backward(role)] += size
        return values, self._region.read(place, values)

    def _send(self, name: str, begin: int, values: Tensor) -> Any:
        assert self._region is not None
        place, size = self._place(name, begin), BYTES * values.numel()
        if self._region.in_memory(place, size) is not None:
            return None
        self.store.lanes.moved[sent_forward(Role.STATES_TO_DISK)] += size
        return self._region.write(place, values)


class StatePiece(NamedTuple):
    """The part of a chunk that belongs to one parameter: its elements ``start`` to ``stop``."""

    parameter: nn.Parameter
    start: int
    stop: int
    at: int  # where in the chunk they begin

    @property
    def inside(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)

    def of(self, tensor: Tensor) -> Tensor:
        return local(tensor).reshape(-1)[self.start : self.stop]


class StateChunk(NamedTuple):
    """Elements ``begin`` to ``end`` of the row of all, which are updated together."""

    begin: int
    end: int
    group: int
    pieces: tuple[StatePiece, ...]


class _Slot:
    """A chunk in flight: read when made, updated, written back."""

    def __init__(self, stored: StoredStates, chunk: StateChunk) -> None:
        self.stored, self.chunk = stored, chunk
        self.pieces = [
            piece for piece in chunk.pieces if piece.parameter.grad is not None or piece.parameter in stored.summed
        ]
        fetched = {name: stored._fetch(name, chunk.begin, chunk.end) for name in stored.names_of(chunk)}
        self.states = {name: values for name, (values, _) in fetched.items()}
        self.summed = self.states.pop(GRADIENT, torch.empty(0))
        self.copies = [copy for _, copy in fetched.values() if copy is not None]
        gradients = [
            (piece, piece.of(piece.parameter.grad)) for piece in self.pieces if piece.parameter.grad is not None
        ]
        self.gradient = self._down(Role.LAST_GRADIENTS_TO_HOST, gradients)
        if MASTER in self.states:
            self.values = self.states[MASTER]
        else:
            self.values = self._down(
                Role.WEIGHTS_TO_HOST, [(piece, piece.of(piece.parameter)) for piece in self.pieces]
            )

    def update(self, update: Update) -> None:
        self.wait()
        if self.pieces:
            own, summed = self.gradient.float(), self.stored.summed
            gradients = [(self.summed if piece.parameter in summed else own)[piece.inside] for piece in self.pieces]
            places = [piece.inside for piece in self.pieces]
            states = {
                name: [values[place] for place in places] for name, values in self.states.items() if name != MASTER
            }
            update([self.values[place] for place in places], gradients, states)
        self._up()
        sent = (self.stored._send(name, self.chunk.begin, values) for name, values in self.states.items())
        self.copies += [copy for copy in sent if copy is not None]

    def wait(self) -> None:
        for copy in self.copies:
            copy.wait()
        self.copies = []

    def _down(self, role: Role, pieces: list[tuple[StatePiece, Tensor]]) -> Tensor:
        if not pieces:
            return torch.empty(0)
        lanes = self.stored.store.lanes
        values = host_tensor(self.chunk.end - self.chunk.begin, pieces[0][1].dtype, lanes.device)
        targets = [(values[piece.inside], tensor) for piece, tensor in pieces]
        lanes.moved[sent_backward(role)] += sum(tensor.numel() * tensor.element_size() for _, tensor in targets)
        self.copies.append(lanes.out(lambda: _copy_all(targets), values, *(tensor for _, tensor in targets)))
        return values

    def _up(self) -> None:
        pieces = [piece for piece in self.pieces if not self.stored.has_weights(piece.parameter)]
        if not pieces:
            return
        lanes, dtype = self.stored.store.lanes, pieces[0].parameter.dtype
        values = self.values.to(dtype)
        targets = [(piece.of(piece.parameter), values[piece.inside]) for piece in pieces]
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in targets)
        lanes.moved[sent_forward(Role.UPDATED_WEIGHTS_FROM_HOST)] += size
        self.copies.append(lanes.back(lambda: _copy_all(targets), values))


def _copy_all(targets: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in targets:
        target.copy_(source, non_blocking=True)


def _parts(begin: int, end: int, elements: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, elements):
        yield start, min(start + elements, end)


def _pieces(rows: Sequence[FlatRow], begin: int, end: int) -> Iterator[StatePiece]:
    for row in rows:
        first, last = max(begin, row.begin), min(end, row.begin + row.size)
        if first < last:
            yield StatePiece(row.parameter, first - row.begin, last - row.begin, first - begin)
