"""Optimizer states outside of the device's memory, updated there: gradients go down, new weights come up.

That is ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840); with the states on a disk, of which a few are in host memory
at a time, ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857). All elements of a rank's parameters stand in one
row, in the order of the optimizer's groups; the states of the first ones are here. AdamW and SGD work on single
elements, so any cut is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.elementwise import Update
from shardwise.engine.offload.store import Region, Store

CHUNK_ELEMENTS = 2**20  # updated at a time: 4 MiB of every state, which a disk reads at full speed
MASTER = "master"
BYTES = 4  # states are fp32


@dataclass(frozen=True)
class Row:
    """A parameter's local elements in the row of all: ``begin`` to ``begin + size``, of group ``group``."""

    parameter: nn.Parameter
    begin: int
    size: int
    group: int


def rows_of(groups: Sequence[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    begin = 0
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            assert local(parameter).is_contiguous(), "parts of it are written as parts of a row"
            size = local(parameter).numel()
            rows.append(Row(parameter, begin, size, number))
            begin += size
    return rows


class StoredStates:
    """States ``names`` of the first ``elements`` of the ``rows``, in a region of the store."""

    def __init__(self, rows: Sequence[Row], names: Sequence[str], store: Store, elements: int) -> None:
        self.rows, self.names, self.store = rows, tuple(names), store
        self.elements = 0
        self._row = {row.parameter: row for row in rows}
        self._region: Region | None = None
        self.resize(elements)

    def count(self, parameter: nn.Parameter) -> int:
        """How many of a parameter's first local elements are here."""
        row = self._row.get(parameter)
        return 0 if row is None else min(max(self.elements - row.begin, 0), row.size)

    def resize(self, elements: int) -> None:
        """Room for ``elements``: what is in both stays, what is new is zero.

        It is written at once: a disk that is too full says so before the first step.
        """
        old, had = self._region, self.elements
        self.elements = elements if self.names else 0
        new = self._region = self.store.region(BYTES * elements * len(self.names)) if self.elements else None
        for name in self.names if new is not None else ():
            for begin, end in _parts(0, elements):
                values = torch.zeros(end - begin)
                if old is not None and begin < had:
                    kept = values[: min(end, had) - begin]
                    old.read(BYTES * (self.names.index(name) * had + begin), kept).wait()
                new.write(self._place(name, begin), values).wait()  # type: ignore[union-attr]
        if old is not None:
            self.store.take_back(old)

    def read(self, parameter: nn.Parameter, name: str, start: int = 0) -> Tensor:
        """The elements that are here from ``start`` on, as a copy in host memory."""
        values = torch.empty(self.count(parameter) - start)
        if self._region is not None and values.numel():
            self._region.read(self._place(name, self._row[parameter].begin + start), values).wait()
        return values

    def write(self, parameter: nn.Parameter, name: str, values: Tensor, start: int = 0) -> None:
        if self._region is not None and values.numel():
            values = values.detach().to(torch.float32).contiguous()
            self._region.write(self._place(name, self._row[parameter].begin + start), values).wait()

    def update(self, updates: Sequence[Update]) -> None:
        """One step of every group, in host memory: chunk k+1 comes and chunk k−1 leaves while k is computed."""
        chunks = list(self._chunks())
        slots: list[_Slot] = []
        for number, chunk in enumerate(chunks):
            if number == 0:
                slots.append(_Slot(self, chunk))
            if number + 1 < len(chunks):
                # Three chunks at most are in memory: the one before the last has left when the next one comes.
                if len(slots) > 1:
                    slots.pop(0).left()
                slots.append(_Slot(self, chunks[number + 1]))
            (slots[-2] if number + 1 < len(chunks) else slots[-1]).update(updates[chunk.group])
        for slot in slots:
            slot.left()

    def _place(self, name: str, element: int) -> int:
        return BYTES * (self.names.index(name) * self.elements + element)

    def _chunks(self) -> Iterator[_Chunk]:
        for group in sorted({row.group for row in self.rows}):
            rows = [row for row in self.rows if row.group == group]
            for begin, end in _parts(rows[0].begin, min(rows[-1].begin + rows[-1].size, self.elements)):
                yield _Chunk(begin, end, group, tuple(_pieces(rows, begin, end)))

    def _fetch(self, name: str, begin: int, end: int) -> tuple[Tensor, Any]:
        """States of some elements in host memory; those of a disk with the copy that brings them."""
        assert self._region is not None
        place, size = self._place(name, begin), BYTES * (end - begin)
        there = self._region.in_memory(place, size)
        if there is not None:
            return there.view(torch.float32), None
        values = torch.empty(end - begin)
        self.store.lanes.moved["states from disk"] += size
        return values, self._region.read(place, values)

    def _send(self, name: str, begin: int, values: Tensor) -> Any:
        assert self._region is not None
        place, size = self._place(name, begin), BYTES * values.numel()
        if self._region.in_memory(place, size) is not None:
            return None
        self.store.lanes.moved["states to disk"] += size
        return self._region.write(place, values)


@dataclass(frozen=True)
class _Piece:
    """Elements ``start`` to ``stop`` of a parameter, at ``at`` of a chunk."""

    parameter: nn.Parameter
    start: int
    stop: int
    at: int

    @property
    def inside(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)

    def of(self, tensor: Tensor) -> Tensor:
        return local(tensor).reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class _Chunk:
    begin: int
    end: int
    group: int
    pieces: tuple[_Piece, ...]


class _Slot:
    """A chunk on its way: fetched when made, updated, sent back."""

    def __init__(self, stored: StoredStates, chunk: _Chunk) -> None:
        self.stored, self.chunk = stored, chunk
        self.pieces = [one for one in chunk.pieces if one.parameter.grad is not None]
        found = {name: stored._fetch(name, chunk.begin, chunk.end) for name in stored.names}
        self.states = {name: values for name, (values, _) in found.items()}
        self.copies = [copy for _, copy in found.values() if copy is not None]
        gradients = [(one, one.of(one.parameter.grad)) for one in self.pieces if one.parameter.grad is not None]
        self.gradient = self._down("gradients to host, after the last microbatch", gradients)
        if MASTER in self.states:
            self.values = self.states[MASTER]
        else:
            self.values = self._down(
                "weights to host, for the update", [(one, one.of(one.parameter)) for one in self.pieces]
            )

    def update(self, update: Update) -> None:
        self._wait()
        if self.pieces:
            gradient, cut = self.gradient.float(), [one.inside for one in self.pieces]
            states = {name: [values[one] for one in cut] for name, values in self.states.items() if name != MASTER}
            update([self.values[one] for one in cut], [gradient[one] for one in cut], states)
        self._up()
        sent = (self.stored._send(name, self.chunk.begin, values) for name, values in self.states.items())
        self.copies += [copy for copy in sent if copy is not None]

    def left(self) -> None:
        """Waits until everything is where it belongs."""
        self._wait()

    def _wait(self) -> None:
        for copy in self.copies:
            copy.wait()
        self.copies = []

    def _down(self, what: str, pieces: list[tuple[_Piece, Tensor]]) -> Tensor:
        lanes = self.stored.store.lanes
        dtype = pieces[0][1].dtype if pieces else torch.float32
        pinned = lanes.device.type == "cuda"
        values = torch.empty(self.chunk.end - self.chunk.begin, dtype=dtype, pin_memory=pinned)
        targets = [(values[one.inside], tensor) for one, tensor in pieces]
        lanes.moved[what] += sum(tensor.numel() * tensor.element_size() for _, tensor in targets)
        self.copies.append(lanes.out(lambda: _copy_all(targets), values, *(tensor for _, tensor in targets)))
        return values

    def _up(self) -> None:
        if not self.pieces:
            return
        lanes, dtype = self.stored.store.lanes, self.pieces[0].parameter.dtype
        values = self.values.to(dtype)
        targets = [(one.of(one.parameter), values[one.inside]) for one in self.pieces]
        lanes.moved["updated weights from host"] += sum(tensor.numel() * tensor.element_size() for _, tensor in targets)
        self.copies.append(lanes.back(lambda: _copy_all(targets), values))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that data parallelism may have divided."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _copy_all(targets: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in targets:
        target.copy_(source, non_blocking=True)


def _parts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, end)


def _pieces(rows: Sequence[Row], begin: int, end: int) -> Iterator[_Piece]:
    for row in rows:
        first, last = max(begin, row.begin), min(end, row.begin + row.size)
        if first < last:
            yield _Piece(row.parameter, first - row.begin, last - row.begin, first - begin)
