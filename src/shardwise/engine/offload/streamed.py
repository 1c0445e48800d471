"""Stored states updated on the device, chunk by chunk: one is read while another is updated and a third written back.

Where a GPU's copy engines read the host's pinned memory this takes less time than an update by the host's processors,
and the host neither computes nor waits. Nothing else waits either: the next forward pass begins at once, and each of
its layers waits for the chunks that hold its own weights. The order of the chunks is that of the parameters, small
ones first. The device has room for those that the first layer needs: they come back for the next update as soon as
this one is over, beside the rest of the step.

Weights that are stored too are updated when the forward pass fetches them, and go from the update straight to where it
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.cost.memory.offload import UPDATE_CHUNK_ELEMENTS, update_slots
from shardwise.engine import torch_private
from shardwise.engine.offload.store import GRADIENT, MASTER, copy_stream
from shardwise.engine.optim.updates import Update
from shardwise.engine.parameters import local

if TYPE_CHECKING:
    from shardwise.engine.offload.states import StateChunk, StoredStates


@dataclass
class _PendingUpdate:
    """A step of every group, of which the chunks from ``begin`` on are left."""

    updates: Sequence[Update]
    gradients: dict[nn.Parameter, Tensor]  # those on the device; others are stored
    summed: frozenset[nn.Parameter]
    begin: int = 0


class StreamedUpdate:
    """Updates of ``stored`` on its device; on a CPU the same steps, one after the other."""

    def __init__(self, stored: StoredStates) -> None:
        self.stored, device = stored, stored.store.lanes.device
        self._streams: list[Any] = [None] * 3
        if device.type == "cuda":
            self._streams = [copy_stream(device) for _ in range(3)]
        self._device = device
        self._first: list[nn.Parameter] = []
        self._chunks: list[StateChunk] = []
        self._places: dict[nn.Parameter, range] = {}  # the chunks of each
        self._slots: list[dict[str, Tensor]] = []
        self._free: list[Any] = []  # of each slot: when it was written back
        self._arrived: list[Any] = []
        self._ahead = 0  # chunks whose states are here, or come, for the next update
        self._pending: _PendingUpdate | None = None
        self._weights_ready: dict[nn.Parameter, Any] = {}  # since the last update that nothing has waited for
        self._store_ready: dict[nn.Parameter, Any] = {}
        self._last: Any = None
        self.is_awaited = False  # by every reader of the weights: see `wait_before` and `await_updates`

    def expect(self, first: Iterable[nn.Parameter]) -> None:
        """The parameters that a forward pass needs ``first``: there is room for the states of all of them."""
        self._first = list(first)
        self.make_slots()

    def run(self, updates: Sequence[Update]) -> None:
        """One step of every group, after everything enqueued so far; of stored weights, once they are fetched."""
        self.finish()
        incoming, computing, _ = self._streams
        stored = self.stored
        given = {one.parameter: one.parameter.grad for chunk in self._chunks for one in chunk.pieces}
        gradients = {one: local(grad) for one, grad in given.items() if grad is not None}
        self._pending = _PendingUpdate(updates, gradients, frozenset(stored.summed))
        if computing is not None:
            computing.wait_stream(torch.cuda.current_stream(self._device))
            incoming.wait_stream(stored.store.lanes.stream(out=True))  # gradients that have left
            scalars = [one for update in updates for one in (update.bad, update.divisor, update.learning_rate)]
            for one in scalars:
                if isinstance(one, Tensor):
                    one.record_stream(computing)  # others free them, and would use their memory before it is read
        if not stored.weights:
            self.finish()
            if not self.is_awaited:
                self.all_weights()

    def finish(self) -> None:
        """Enqueues what is left of the update."""
        self._advance(len(self._chunks), {})

    def deliver(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Any]:
        """Updates stored weights that are about to be read, and writes them where they are read as well.

        Returns those that were written, each with its event: the others have been updated before, in part at least.
        """
        if self._pending is None:
            return {}
        places, begin = {one: self._places[one] for one in parameters}, self._pending.begin
        written = {one: None for one, place in places.items() if place.start >= begin}
        if self._streams[1] is not None:  # the memory that is written was in use until now
            self._streams[1].wait_stream(torch.cuda.current_stream(self._device))
        self._advance(max((place.stop for place in places.values()), default=0), written)
        return written

    def _advance(self, end: int, written: dict[nn.Parameter, Any]) -> None:
        """Chunks up to ``end``; the weights of those to be ``written`` are, and get their events."""
        pending = self._pending
        if pending is None:
            return
        for number in range(pending.begin, end):
            self._chunk(number, pending, written)
        pending.begin = max(end, pending.begin)
        if pending.begin == len(self._chunks):
            self._pending, self._ahead = None, 0
            for number in range(min(len(self._slots), len(self._chunks))):
                self._arrive(number)
            self._ahead = min(len(self._slots), len(self._chunks))

    def _chunk(self, number: int, pending: _PendingUpdate, written: dict[nn.Parameter, Any]) -> None:
        chunk, slot, (_, computing, outgoing) = self._chunks[number], number % len(self._slots), self._streams
        self._arrive(number, pending)
        here = self._here(number)
        with _on(computing):
            _wait(computing, self._arrived[slot])
            self._update(chunk, here, pending, written)
            updated = _event(computing)
        with _on(outgoing):
            _wait(outgoing, updated)
            self.stored.copy_out(chunk, here)
            self._free[slot] = self._last = _event(outgoing)
        for piece in chunk.pieces:
            self._store_ready[piece.parameter] = self._last
            if piece.parameter in written:
                written[piece.parameter] = updated
            elif not self.stored.has_weights(piece.parameter):
                self._weights_ready[piece.parameter] = updated
            if self._places[piece.parameter].stop == number + 1:
                pending.gradients.pop(piece.parameter, None)

    def _arrive(self, number: int, pending: _PendingUpdate | None = None) -> None:
        """Has the states of a chunk come, unless they have, and the gradients that a ``pending`` update needs of it."""
        chunk, slot, incoming = self._chunks[number], number % len(self._slots), self._streams[0]
        here = self._here(number)
        gradients = here.pop(GRADIENT, None)
        with _on(incoming):
            _wait(incoming, self._free[slot])
            if number >= self._ahead:
                self.stored.copy_in(chunk, here, sent_ahead=pending is None)
            if pending is not None and gradients is not None:
                away = [one.inside for one in chunk.pieces if one.parameter in pending.summed]
                begin, end = (away[0].start, away[-1].stop) if away else (0, 0)
                part = chunk._replace(begin=chunk.begin + begin, end=chunk.begin + end)
                self.stored.copy_in(part, {GRADIENT: gradients[begin:end]}, sent_ahead=False)
            self._arrived[slot] = _event(incoming)

    def _here(self, number: int) -> dict[str, Tensor]:
        chunk, slot = self._chunks[number], self._slots[number % len(self._slots)]
        return {name: slot[name][: chunk.end - chunk.begin] for name in self.stored.names_of(chunk)}

    def _update(
        self, chunk: StateChunk, here: dict[str, Tensor], pending: _PendingUpdate, written: dict[nn.Parameter, Any]
    ) -> None:
        pieces = [one for one in chunk.pieces if one.parameter in pending.gradients or one.parameter in pending.summed]
        gradients, values = [], []
        for one in pieces:
            if one.parameter in pending.summed:
                gradients.append(here[GRADIENT][one.inside])
            else:
                given = pending.gradients[one.parameter]
                if given.is_cuda:
                    given.record_stream(self._streams[1])  # freed by others before it is read
                gradients.append(one.of(given).float())
            values.append(here[MASTER][one.inside] if MASTER in here else one.of(one.parameter))
        states = {
            name: [tensor[one.inside] for one in pieces]
            for name, tensor in here.items()
            if name not in (MASTER, GRADIENT)
        }
        if pieces:
            pending.updates[chunk.group](values, gradients, states)
        for one in chunk.pieces if MASTER in here else ():
            if one.parameter in written or not self.stored.has_weights(one.parameter):
                one.of(one.parameter).copy_(here[MASTER][one.inside])

    def make_slots(self) -> None:
        """Room on the device for some chunks of the states that are stored now."""
        self.drop()
        if self._streams[0] is not None:
            self._streams[0].synchronize()  # what came ahead into the room before
        stored = self.stored
        chunks = self._chunks = list(stored.chunks(UPDATE_CHUNK_ELEMENTS))
        self._places = {}
        for number, chunk in enumerate(chunks):
            for one in chunk.pieces:
                before = self._places.get(one.parameter, range(number, number))
                self._places[one.parameter] = range(before.start, number + 1)
        names = {name for chunk in chunks for name in stored.names_of(chunk)}
        elements = max((chunk.end - chunk.begin for chunk in chunks), default=0)
        slots = update_slots(stored.elements, sum(stored.count(one) for one in self._first), UPDATE_CHUNK_ELEMENTS)
        with _on(self._streams[1]):
            self._slots = [
                {name: torch.empty(elements, dtype=torch.float32, device=self._device) for name in names}
                for _ in range(slots)
            ]
        self._free = [_event(self._streams[1])] * slots
        self._arrived = list(self._free)

    # -- who waits for it ---------------------------------------------------------------------------------

    def weights_of(self, parameters: Iterable[nn.Parameter], reader: Any = None) -> None:
        """What is enqueued from now on, on the stream of the ``reader`` (by default the current one), reads the updated
        weights of these."""
        if self._weights_ready:
            events = {id(event): event for one in parameters if (event := self._weights_ready.pop(one, None))}
            for event in events.values():
                (torch.cuda.current_stream(self._device) if reader is None else reader).wait_event(event)

    def all_weights(self) -> None:
        self.weights_of(list(self._weights_ready))

    def stored_of(self, parameter: nn.Parameter, stream: Any) -> None:
        """``stream`` reads what the store holds of a parameter."""
        event = self._store_ready.get(parameter)
        if event is not None and stream is not None:
            stream.wait_event(event)

    def settle(self) -> None:
        """The host reads the store."""
        self.finish()
        leaving = self.stored.store.lanes.stream(out=True)
        if leaving is not None:
            leaving.synchronize()  # gradients
        if self._last is not None:
            self._last.synchronize()
            self._last = None
            self._store_ready.clear()

    def drop(self) -> None:
        """The host has written into the store: what came from it before does not count."""
        self._ahead = 0


def wait_before(layers: Sequence[nn.Module], root: nn.Module, update: StreamedUpdate) -> None:
    """Has each layer wait for its own weights, and the network for what is updated before any of them.

    The last layer also waits for what is updated after it, such as the head, which a loss reads without calling it.
    """
    update.is_awaited = True
    inside = {parameter: number for number, layer in enumerate(layers) for parameter in layer.parameters()}
    waiting: list[list[nn.Parameter]] = [[] for _ in range(len(layers) + 1)]
    reached = 0  # of the places that wait: the root first
    for parameter in root.parameters():
        if parameter in inside:
            reached = len(layers)
        waiting[inside[parameter] + 1 if parameter in inside else reached].append(parameter)
    for module, parameters in zip((root, *layers), waiting):
        torch_private.before_every_call(module, _waiting_for(parameters, update))


def _waiting_for(parameters: list[nn.Parameter], update: StreamedUpdate) -> Callable[[], None]:
    return lambda: update.weights_of(parameters)


def needed_first(layers: Sequence[nn.Module], root: nn.Module) -> list[nn.Parameter]:
    """The parameters up to those of the first layer."""
    first = {*layers[0].parameters()} if layers else set()
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    found: list[nn.Parameter] = []
    for parameter in root.parameters():
        if parameter in inside and parameter not in first:
            break
        found.append(parameter)
    return found


def _on(stream: Any) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(stream: Any, event: Any) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _event(stream: Any) -> Any:
    return None if stream is None else stream.record_event()
