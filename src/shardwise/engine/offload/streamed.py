"""Stored states updated on the device, chunk by chunk: one is read while another is updated and a third written back.

Where a GPU's copy engines read the host's pinned memory this takes less time than an update by the host's processors,
and the host neither computes nor waits. Nothing else waits either: the next forward pass begins at once, and each of
its layers waits for the chunks that hold its own weights. The order of the chunks is that of the parameters, small
ones first. The device has room for those that the first layer needs: they come back for the next update as soon as
this one is over, beside the rest of the step.

Stored weights are updated as a forward pass fetches them: their chunks, none of which has weights of two units, wait
until then, and what is read is what the update leaves on the device. Where gradients are stored too, the host's
processors update (`states`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.engine import torch_private
from shardwise.engine.offload.store import MASTER, copy_stream
from shardwise.engine.optim.one_pass import OnePass, OnePassPart, scalars_of
from shardwise.engine.optim.updates import Update
from shardwise.engine.parameters import local
from shardwise.layout.pieces import UPDATE_CHUNK_ELEMENTS, update_slots
from shardwise.models import kernels

if TYPE_CHECKING:
    from shardwise.engine.offload.states import StateChunk, StoredStates


@dataclass
class _PendingUpdate:
    """A step of every group, of which the chunks from ``begin`` on are left."""

    updates: Sequence[Update]
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
        self._pending: _PendingUpdate | None = None
        self._slots: list[dict[str, Tensor]] = []
        self._free: list[Any] = []  # of each slot: when it was written back
        self._arrived: list[Any] = []
        self._ahead = 0  # chunks whose states are here, or come, for the next update
        self._weights_ready: dict[nn.Parameter, Any] = {}  # since the last update that nothing has waited for
        self._read: dict[nn.Parameter, Tensor] = {}  # gradients, until a reader of the new weights waits for them
        self._scalars: list[Tensor | None] = []  # of each group's update, if it runs in one pass
        self._giver: Any = None  # the stream on which these were computed
        self._passes: list[OnePass] = []  # of each chunk, whose addresses are those of the step before
        self._store_ready: dict[nn.Parameter, Any] = {}  # since the host has last waited for all
        self._last: Any = None
        self.is_awaited = False  # by every reader of the weights: see `wait_before` and `await_updates`

    def expect(self, first: Iterable[nn.Parameter]) -> None:
        """The parameters that a forward pass needs ``first``: there is room for the states of all of them."""
        self._first = list(first)
        self.make_slots()

    def run(self, updates: Sequence[Update]) -> None:
        """One step of every group, after everything enqueued so far; of stored weights, once they are fetched."""
        self.finish()
        self._begin(updates)
        self._pending = _PendingUpdate(updates)
        if not self.stored.weights:
            self.finish()
            if not self.is_awaited:
                self.all_weights()

    def finish(self) -> None:
        """Enqueues what is left of the update."""
        self._advance(len(self._chunks), frozenset())

    def deliver(self, parameters: Sequence[nn.Parameter]) -> Set[nn.Parameter]:
        """Updates stored weights that are about to be read, and writes them where they are read as well.

        Returns those that were written, for which `weights_of` waits: the others were updated before.
        """
        pending = self._pending
        if pending is None:
            return frozenset()
        places = {one: self._places[one] for one in parameters}
        written = frozenset(one for one, place in places.items() if place.start >= pending.begin)
        if self._streams[1] is not None:  # the memory that is written was in use until now
            self._streams[1].wait_stream(torch.cuda.current_stream(self._device))
        self._advance(max((place.stop for place in places.values()), default=0), written)
        return written

    def _advance(self, end: int, written: frozenset[nn.Parameter]) -> None:
        """Chunks up to ``end``; of stored weights those to be ``written`` are."""
        pending = self._pending
        if pending is None:
            return
        for number in range(pending.begin, end):
            self._chunk(number, pending.updates, written)
        pending.begin = max(end, pending.begin)
        if pending.begin < len(self._chunks):
            return
        self._pending, self._ahead = None, 0
        if not self.stored.weights:
            self.come_ahead(1.0)

    def come_ahead(self, share: float) -> None:
        """Has the next ``share`` of the states that there is room for come for the next update, after what is enqueued
        so far, weights that a backward pass needs among it: a copy engine does not keep to the order of two streams."""
        if self._pending is not None:
            return
        room = min(len(self._slots), len(self._chunks))
        if self._streams[0] is not None:
            self._streams[0].wait_stream(torch.cuda.current_stream(self._device))
            self._streams[0].wait_stream(self.stored.store.lanes.stream(out=False))
        for number in range(self._ahead, min(room, self._ahead + math.ceil(share * room))):
            self._arrive(number, sent_ahead=True)
            self._ahead = number + 1

    def _begin(self, updates: Sequence[Update]) -> None:
        """What the update reads stays until it was read, though others free it."""
        computing = self._streams[1]
        self._forget(list(self._read), None)
        grads = {one.parameter: one.parameter.grad for chunk in self._chunks for one in chunk.pieces}
        self._read = {one: local(grad) for one, grad in grads.items() if grad is not None}
        self._scalars = [None] * len(updates)
        if computing is None:
            return
        self._giver = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._giver)
        for one in (one for update in updates for one in (update.bad, update.divisor, update.learning_rate)):
            if isinstance(one, Tensor):
                one.record_stream(computing)
        if kernels.run_on(self._device):
            with _on(computing):
                self._scalars = [scalars_of(one) if one.in_one_pass else None for one in updates]

    def _forget(self, parameters: Iterable[nn.Parameter], waiting: Any) -> None:
        """Gradients whose update the stream ``waiting`` is after: none, if None.

        Not left to `record_stream` alone, after which their memory is free when the GPU says so: the next gradients
        would have other addresses in every step.
        """
        for one in parameters:
            gradient = self._read.pop(one, None)
            if gradient is not None and gradient.is_cuda and waiting != self._giver:
                gradient.record_stream(self._streams[1])

    def _chunk(self, number: int, updates: Sequence[Update], written: frozenset[nn.Parameter]) -> None:
        chunk, slot, (_, computing, outgoing) = self._chunks[number], number % len(self._slots), self._streams
        if number >= self._ahead:
            self._arrive(number, sent_ahead=False)
        here = self._here(number)
        with _on(computing):
            _wait(computing, self._arrived[slot])
            self._update(number, here, updates[chunk.group], written)
            updated = _event(computing)
        with _on(outgoing):
            _wait(outgoing, updated)
            self.stored.copy_out(chunk, here)
            self._free[slot] = self._last = _event(outgoing)
        for one in (piece.parameter for piece in chunk.pieces):
            self._store_ready[one] = self._last
            if one in written or not self.stored.has_weights(one):
                self._weights_ready[one] = updated
            elif self._places[one].stop == number + 1:
                self._forget([one], None)  # nothing on the device reads it

    def _arrive(self, number: int, *, sent_ahead: bool) -> None:
        """Has the states of a chunk come, once its slot is free."""
        slot, incoming = number % len(self._slots), self._streams[0]
        with _on(incoming):
            _wait(incoming, self._free[slot])
            self.stored.copy_in(self._chunks[number], self._here(number), sent_ahead=sent_ahead)
            self._arrived[slot] = _event(incoming)

    def _here(self, number: int) -> dict[str, Tensor]:
        chunk, slot = self._chunks[number], self._slots[number % len(self._slots)]
        return {name: slot[name][: chunk.end - chunk.begin] for name in self.stored.names_of(chunk)}

    def _update(self, number: int, here: dict[str, Tensor], update: Update, written: frozenset[nn.Parameter]) -> None:
        chunk = self._chunks[number]
        pieces = [one for one in chunk.pieces if one.parameter in self._read]
        gradients = [one.of(self._read[one.parameter]) for one in pieces]
        values = [here[MASTER][one.inside] if MASTER in here else one.of(one.parameter) for one in pieces]
        states = {name: [tensor[one.inside] for one in pieces] for name, tensor in here.items() if name != MASTER}
        scalars, stored = self._scalars[chunk.group], self.stored.has_weights
        if scalars is not None:  # the kernel that updates what is not offloaded: the same weights to the last bit
            beside = [MASTER in here and not stored(one.parameter) for one in pieces]
            weights = [one.of(one.parameter) if is_beside else None for one, is_beside in zip(pieces, beside)]
            parts = zip(gradients, values, states["exp_avg"], states["exp_avg_sq"], weights)
            self._passes[number](update, (OnePassPart(*one) for one in parts), scalars)
        elif pieces:
            update(values, [one.float() for one in gradients], states)
        for one in chunk.pieces if MASTER in here else ():
            # Memory of stored weights is new: it is written even if the step is skipped.
            if one.parameter in written if stored(one.parameter) else scalars is None:
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
        self._passes = [OnePass() for _ in chunks]

    # -- who waits for it ---------------------------------------------------------------------------------

    def weights_of(self, parameters: Iterable[nn.Parameter], reader: Any = None) -> None:
        """What is enqueued from now on, on the stream of the ``reader`` (by default the current one), reads the updated
        weights of these."""
        if self._weights_ready:
            updated = [one for one in parameters if one in self._weights_ready]
            events = {id(event): event for one in updated if (event := self._weights_ready.pop(one))}
            waiting = torch.cuda.current_stream(self._device) if reader is None and events else reader
            for event in events.values():
                waiting.wait_event(event)
            self._forget(updated, waiting)

    def all_weights(self) -> None:
        self.weights_of(list(self._weights_ready))

    def stored_of(self, parameter: nn.Parameter, stream: Any) -> None:
        """``stream`` reads what the store holds of a parameter."""
        _wait(stream, self._store_ready.get(parameter))

    def settle(self) -> None:
        """The host reads the store."""
        self.finish()
        if self._last is not None:
            self._last.synchronize()
            self._last = None
            self._store_ready.clear()

    def drop(self) -> None:
        """The host has written into the store: what came from it before does not count."""
        self._ahead = 0


class UpdatedWeights:
    """Stored weights that their update writes into the parameters' own memory."""

    def __init__(self, update: StreamedUpdate, parameters: Set[nn.Parameter]) -> None:
        self._update, self._parameters = update, parameters

    def wait(self, reader: Any = None) -> None:
        self._update.weights_of(self._parameters, reader)


def wait_before(layers: Sequence[nn.Module], root: nn.Module, update: StreamedUpdate) -> None:
    """Has each layer wait for its own weights, and the network for what is updated before any of them.

    What is updated after the last layer, such as the head, which a loss reads without calling it, is waited for once
    that layer has run.
    """
    update.is_awaited = True
    inside = {parameter: number for number, layer in enumerate(layers) for parameter in layer.parameters()}
    first: list[nn.Parameter] = []
    own: list[list[nn.Parameter]] = [[] for _ in layers]
    last: list[nn.Parameter] = []
    for parameter in root.parameters():
        if parameter in inside:
            own[inside[parameter]].append(parameter)
        else:
            (last if any(own) else first).append(parameter)
    torch_private.around_every_call(root, _waiting_for(first, update))
    for number, (layer, parameters) in enumerate(zip(layers, own)):
        after = _waiting_for(last, update) if number == len(layers) - 1 else None
        torch_private.around_every_call(layer, _waiting_for(parameters, update), after)


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
