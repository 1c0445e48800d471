"""Stored states updated on the device, chunk by chunk: one is read while another is updated and a third written back.

Where a GPU's copy engines can read the host's pinned memory, this is faster than an update by the host's processors,
and the host neither computes nor waits. The next forward pass begins at once; each of its layers waits only for the
chunks that hold its own weights. Chunks come in the order of the parameters, the smallest group first. The device has
room for the states that the first layer needs: these are fetched for the next update as soon as the current one is
over, overlapped with the rest of the step.

Where weights are stored too, the update of a unit's weights waits until a forward pass fetches them, and leaves them on
the device for that pass. No chunk holds weights of two units. Where gradients are stored as well, the host's processors
update (`states`).
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
    """A step of every group that is not finished."""

    updates: Sequence[Update]
    begin: int = 0  # the first chunk that is left


class StreamedUpdate:
    """Updates the ``stored`` states on the device; on a CPU it takes the same steps one after the other."""

    def __init__(self, stored: StoredStates) -> None:
        self.stored, device = stored, stored.store.lanes.device
        self._streams: list[Any] = [None] * 3
        if device.type == "cuda":
            self._streams = [copy_stream(device) for _ in range(3)]
        self._device = device
        self._first: list[nn.Parameter] = []
        self._chunks: list[StateChunk] = []
        self._places: dict[nn.Parameter, range] = {}  # the chunks that hold each parameter
        self._pending: _PendingUpdate | None = None
        self._slots: list[dict[str, Tensor]] = []
        self._free: list[Any] = []  # for each slot, the event after which it has been written back
        self._arrived: list[Any] = []
        self._ahead = 0  # chunks whose states have arrived, or are arriving, for the next update
        self._weights_ready: dict[nn.Parameter, Any] = {}  # events of updates that no reader has waited for yet
        self._read: dict[nn.Parameter, Tensor] = {}  # gradients, kept until a reader waits for the new weights
        self._scalars: list[Tensor | None] = []  # for each group, if its update runs in one pass
        self._giver: Any = None  # the stream on which the gradients were computed
        self._passes: list[OnePass] = []  # one per chunk, whose addresses stay the same from step to step
        self._store_ready: dict[nn.Parameter, Any] = {}  # events of writes that the host has not waited for
        self._last: Any = None
        self.is_awaited = False  # whether readers of weights wait by themselves: `wait_before`, `await_updates`

    def expect(self, first: Iterable[nn.Parameter]) -> None:
        """Makes room on the device for the states of the parameters that a forward pass needs ``first``."""
        self._first = list(first)
        self.make_slots()

    def run(self, updates: Sequence[Update]) -> None:
        """One step of every group, after everything enqueued so far; stored weights are updated when fetched."""
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
        """Updates stored weights that are about to be read, and also writes them where they are read.

        Returns the parameters that it has written, for which `weights_of` waits; the others were updated before.
        """
        pending = self._pending
        if pending is None:
            return frozenset()
        places = {parameter: self._places[parameter] for parameter in parameters}
        written = frozenset(parameter for parameter, place in places.items() if place.start >= pending.begin)
        if self._streams[1] is not None:  # the memory about to be written was in use until now
            self._streams[1].wait_stream(torch.cuda.current_stream(self._device))
        self._advance(max((place.stop for place in places.values()), default=0), written)
        return written

    def _advance(self, end: int, written: frozenset[nn.Parameter]) -> None:
        """Updates chunks up to ``end``. Stored weights in ``written`` are written to their parameters as well."""
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
        """Fetches states for the next update: ``share`` of those that there is room for.

        After everything enqueued so far, including weights that a backward pass needs: a copy engine does not keep the
        order of copies on two streams.
        """
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
        """Keeps what the update will read until it has been read, even if its owners free it."""
        computing = self._streams[1]
        self._forget(list(self._read), None)
        grads = {piece.parameter: piece.parameter.grad for chunk in self._chunks for piece in chunk.pieces}
        self._read = {parameter: local(grad) for parameter, grad in grads.items() if grad is not None}
        self._scalars = [None] * len(updates)
        if computing is None:
            return
        self._giver = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._giver)
        for update in updates:
            for scalar in (update.bad, update.divisor, update.learning_rate):
                if isinstance(scalar, Tensor):
                    scalar.record_stream(computing)
        if kernels.run_on(self._device):
            with _on(computing):
                self._scalars = [scalars_of(update) if update.in_one_pass else None for update in updates]

    def _forget(self, parameters: Iterable[nn.Parameter], waiting: Any) -> None:
        """Drops gradients that have been read; ``waiting`` is a stream that runs after their update, if there is one.

        `record_stream` alone would free their memory only when the GPU gets there, so that the gradients of every step
        would have other addresses.
        """
        for parameter in parameters:
            gradient = self._read.pop(parameter, None)
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
        for parameter in (piece.parameter for piece in chunk.pieces):
            self._store_ready[parameter] = self._last
            if parameter in written or not self.stored.has_weights(parameter):
                self._weights_ready[parameter] = updated
            elif self._places[parameter].stop == number + 1:
                self._forget([parameter], None)  # nothing on the device reads it

    def _arrive(self, number: int, *, sent_ahead: bool) -> None:
        """Fetches the states of a chunk, once its slot is free."""
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
        pieces = [piece for piece in chunk.pieces if piece.parameter in self._read]
        gradients = [piece.of(self._read[piece.parameter]) for piece in pieces]
        values = [here[MASTER][piece.inside] if MASTER in here else piece.of(piece.parameter) for piece in pieces]
        states = {name: [tensor[piece.inside] for piece in pieces] for name, tensor in here.items() if name != MASTER}
        scalars, stored = self._scalars[chunk.group], self.stored.has_weights
        if scalars is not None:  # the kernel that updates what is not offloaded: the same weights to the last bit
            beside = [MASTER in here and not stored(piece.parameter) for piece in pieces]
            weights = [piece.of(piece.parameter) if is_beside else None for piece, is_beside in zip(pieces, beside)]
            parts = zip(gradients, values, states["exp_avg"], states["exp_avg_sq"], weights)
            self._passes[number](update, (OnePassPart(*part) for part in parts), scalars)
        elif pieces:
            update(values, [gradient.float() for gradient in gradients], states)
        for piece in chunk.pieces if MASTER in here else ():
            # The memory of stored weights was just allocated: it is written even if the step is skipped.
            if piece.parameter in written if stored(piece.parameter) else scalars is None:
                piece.of(piece.parameter).copy_(here[MASTER][piece.inside])

    def make_slots(self) -> None:
        """Room on the device for some chunks of the states that are stored now."""
        self.drop()
        if self._streams[0] is not None:
            self._streams[0].synchronize()  # states that were fetched ahead into the old slots
        stored = self.stored
        chunks = self._chunks = list(stored.chunks(UPDATE_CHUNK_ELEMENTS))
        self._places = {}
        for number, chunk in enumerate(chunks):
            for piece in chunk.pieces:
                before = self._places.get(piece.parameter, range(number, number))
                self._places[piece.parameter] = range(before.start, number + 1)
        names = {name for chunk in chunks for name in stored.names_of(chunk)}
        elements = max((chunk.end - chunk.begin for chunk in chunks), default=0)
        slots = update_slots(
            stored.elements, sum(stored.count(parameter) for parameter in self._first), UPDATE_CHUNK_ELEMENTS
        )
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
        """Makes the ``reader``'s stream (by default the current one) wait for the updated weights of ``parameters``."""
        if self._weights_ready:
            updated = [parameter for parameter in parameters if parameter in self._weights_ready]
            events = {id(event): event for parameter in updated if (event := self._weights_ready.pop(parameter))}
            waiting = torch.cuda.current_stream(self._device) if reader is None and events else reader
            for event in events.values():
                waiting.wait_event(event)
            self._forget(updated, waiting)

    def all_weights(self) -> None:
        self.weights_of(list(self._weights_ready))

    def stored_of(self, parameter: nn.Parameter, stream: Any) -> None:
        """Makes ``stream`` wait until the store holds the updated states of a parameter."""
        _wait(stream, self._store_ready.get(parameter))

    def settle(self) -> None:
        """Finishes the update and waits for it, before the host reads the store."""
        self.finish()
        if self._last is not None:
            self._last.synchronize()
            self._last = None
            self._store_ready.clear()

    def drop(self) -> None:
        """Discards states that were fetched ahead, since the host has written into the store."""
        self._ahead = 0


class UpdatedWeights:
    """An `Incoming`: stored weights that their update writes into the parameters' own memory."""

    def __init__(self, update: StreamedUpdate, parameters: Set[nn.Parameter]) -> None:
        self._update, self._parameters = update, parameters

    def wait(self, reader: Any = None) -> None:
        self._update.weights_of(self._parameters, reader)


def wait_before(layers: Sequence[nn.Module], root: nn.Module, update: StreamedUpdate) -> None:
    """Makes each layer wait for its own weights, and the network for those that come before any layer.

    Weights behind the last layer, such as the head's, which a loss reads without calling the head, are waited for when
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
    needed: list[nn.Parameter] = []
    for parameter in root.parameters():
        if parameter in inside and parameter not in first:
            break
        needed.append(parameter)
    return needed


def _on(stream: Any) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(stream: Any, event: Any) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _event(stream: Any) -> Any:
    return None if stream is None else stream.record_event()
