"""Stored states updated on the device, chunk by chunk: one is read while another is updated and a third written back.

Where a GPU's copy engines read the host's pinned memory this takes less time than an update by the host's processors,
and the host neither computes nor waits. Nothing else waits either: the next forward pass begins at once, and each of
its layers waits for the chunks that hold its own weights. The order of the chunks is that of the parameters, small
ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.cost.memory.offload import UPDATE_CHUNK_ELEMENTS, UPDATE_SLOTS
from shardwise.engine.offload.store import GRADIENT, MASTER
from shardwise.engine.optim.updates import Update
from shardwise.engine.parameters import local

if TYPE_CHECKING:
    from shardwise.engine.offload.states import StateChunk, StoredStates


class StreamedUpdate:
    """Updates of ``stored`` on its device; on a CPU the same steps, one after the other."""

    def __init__(self, stored: StoredStates) -> None:
        self.stored, device = stored, stored.store.lanes.device
        self._streams: list[Any] = [None] * 3
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]
        self._device = device
        self._slots: list[dict[str, Tensor]] = []
        self._free: list[Any] = []  # of each slot: when it was written back
        self._weights_ready: dict[nn.Parameter, Any] = {}  # since the last update that nothing has waited for
        self._store_ready: dict[nn.Parameter, Any] = {}
        self._last: Any = None
        self.is_awaited = False  # by every reader of the weights: see `wait_before`

    def run(self, updates: Sequence[Update]) -> None:
        """One step of every group, after everything enqueued so far."""
        incoming, computing, outgoing = self._streams
        if computing is not None:
            computing.wait_stream(torch.cuda.current_stream(self._device))
            incoming.wait_stream(outgoing)
        for number, chunk in enumerate(self.stored.chunks(UPDATE_CHUNK_ELEMENTS)):
            slot = number % UPDATE_SLOTS
            here = {name: self._slots[slot][name][: chunk.end - chunk.begin] for name in self.stored.names_of(chunk)}
            with _on(incoming):
                _wait(incoming, self._free[slot])
                self.stored.copy_in(chunk, here)
                arrived = _event(incoming)
            with _on(computing):
                _wait(computing, arrived)
                self._update(chunk, here, updates[chunk.group])
                updated = _event(computing)
            with _on(outgoing):
                _wait(outgoing, updated)
                self.stored.copy_out(chunk, here)
                self._free[slot] = self._last = _event(outgoing)
            for piece in chunk.pieces:
                self._store_ready[piece.parameter] = self._last
                if not self.stored.has_weights(piece.parameter):
                    self._weights_ready[piece.parameter] = updated
        if not self.is_awaited:
            self.all_weights()

    def _update(self, chunk: StateChunk, here: dict[str, Tensor], update: Update) -> None:
        stored = self.stored
        pieces = [one for one in chunk.pieces if one.parameter.grad is not None or one.parameter in stored.summed]
        if not pieces:
            return
        gradients, values = [], []
        for one in pieces:
            if one.parameter in stored.summed:
                gradients.append(here[GRADIENT][one.inside])
            else:
                assert one.parameter.grad is not None
                given = local(one.parameter.grad)
                if given.is_cuda:
                    given.record_stream(self._streams[1])  # freed by others before it is read
                gradients.append(one.of(given).float())
            values.append(here[MASTER][one.inside] if MASTER in here else one.of(one.parameter))
        states = {
            name: [tensor[one.inside] for one in pieces]
            for name, tensor in here.items()
            if name not in (MASTER, GRADIENT)
        }
        update(values, gradients, states)
        if MASTER in here:
            for one, value in zip(pieces, values):
                if not stored.has_weights(one.parameter):
                    one.of(one.parameter).copy_(value)

    def make_slots(self) -> None:
        """Room on the device for some chunks of the states that are stored now."""
        chunks = list(self.stored.chunks(UPDATE_CHUNK_ELEMENTS))
        names = {name for chunk in chunks for name in self.stored.names_of(chunk)}
        elements = max((chunk.end - chunk.begin for chunk in chunks), default=0)
        with _on(self._streams[1]):
            self._slots = [
                {name: torch.empty(elements, dtype=torch.float32, device=self._device) for name in names}
                for _ in range(UPDATE_SLOTS)
            ]
        self._free = [_event(self._streams[1])] * UPDATE_SLOTS

    # -- who waits for it ---------------------------------------------------------------------------------

    def weights_of(self, parameters: Iterable[nn.Parameter]) -> None:
        """What is enqueued from now on reads the updated weights of these."""
        if self._weights_ready:
            events = {id(event): event for one in parameters if (event := self._weights_ready.pop(one, None))}
            for event in events.values():
                torch.cuda.current_stream(self._device).wait_event(event)

    def all_weights(self) -> None:
        self.weights_of(list(self._weights_ready))

    def stored_of(self, parameter: nn.Parameter, stream: Any) -> None:
        """``stream`` reads what the store holds of a parameter."""
        event = self._store_ready.get(parameter)
        if event is not None and stream is not None:
            stream.wait_event(event)

    def settle(self) -> None:
        """The host reads or writes the store."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
            self._store_ready.clear()


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
        module.register_forward_pre_hook(_waiting_for(parameters, update))


def _waiting_for(parameters: list[nn.Parameter], update: StreamedUpdate) -> Callable[[nn.Module, Any], None]:
    return lambda module, arguments: update.weights_of(parameters)


def _on(stream: Any) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(stream: Any, event: Any) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _event(stream: Any) -> Any:
    return None if stream is None else stream.record_event()
