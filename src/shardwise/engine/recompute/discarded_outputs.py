"""Outputs of cheap functions that are not saved for the backward pass: the function runs again when they are needed.

PyTorch's selective checkpoint runs a whole layer again, collectives included, and sends every operator through Python.
Here, where autograd would save such an output, it saves the function and its inputs, which are kept anyway. That works
for every consumer, whether torch's own or a custom function.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.engine.autograd import SavedView, unpack
from shardwise.engine.torch_private import storage_id, version_of

Function = Callable[..., Any]


class DiscardedOutputs:
    """The functions of one layer whose outputs are not kept.

    ``discarding`` wraps each of them, ``around`` the layer's forward pass. Any number of passes may be waiting for
    their backward pass; nothing outlives the graph of its own pass.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] | None = None  # by the address of their storage; None outside the layer

    def around(self, forward: Function, compiled: Function | None = None) -> Function:
        """``compiled`` replaces ``forward`` where a layer is compiled whole: the compiler sees none of this."""

        @wraps(forward)
        def forward_discarding(*arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return (compiled or forward)(*arguments, **named)
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            self._outputs = {}
            try:
                with saved_tensors_hooks(self._pack, unpack):
                    return forward(*arguments, **named)
            finally:
                self._outputs = None

        return forward_discarding

    def discarding(self, function: Function) -> Function:
        """``function`` takes tensors, the first of which determines the device, and returns new tensors.

        What runs, and runs again, is the result's attribute ``again``: compiling replaces it.
        """

        @wraps(function)
        def call(*inputs: Any) -> Any:
            outputs = call.again(*inputs)  # type: ignore[attr-defined]
            if self._outputs is not None and not torch.compiler.is_compiling():
                made = outputs if isinstance(outputs, tuple) else (outputs,)
                again = _Call(call.again, inputs, self._pack)  # type: ignore[attr-defined]
                for index, output in enumerate(made):
                    storage = output.untyped_storage()
                    # The weak reference keeps the address from being used again, though not the memory.
                    kept = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._outputs[storage_id(storage)] = _Output(again, index, version_of(output), kept)
            return outputs

        call.again = function  # type: ignore[attr-defined]
        return call

    def _pack(self, tensor: Tensor) -> Tensor | SavedView:
        assert self._outputs is not None
        output = self._outputs.get(storage_id(tensor.untyped_storage()))
        if output is None or output.version != version_of(tensor) or output.call.is_input(tensor):
            return tensor.detach()  # the tensor itself could be an output of the very node that saves it: a cycle
        output.call.users += 1
        return SavedView.of(tensor, partial(output.call.output, output.index))


@dataclass(frozen=True)
class _Output:
    """One output of a call, while its layer's forward pass runs."""

    call: _Call
    index: int
    version: int
    storage: StorageWeakRef


class _Call:
    """One call of a function, repeated for the first user of its outputs and kept until the last one has read them.

    A split backward pass may read the outputs twice: then the function runs once more. An input that is itself a
    discarded output (``pack`` knows) is recomputed first.
    """

    def __init__(self, function: Function, inputs: tuple[Any, ...], pack: Callable[[Tensor], Any]) -> None:
        self.function = function
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self.inputs = tuple(pack(value) if isinstance(value, Tensor) else value for value in inputs)
        self.storages = {storage_id(tensor.untyped_storage()) for tensor in tensors}
        self.versions = tuple(version_of(value) for value in self.inputs if isinstance(value, Tensor))
        self.autocast = _autocast_now(tensors[0].device.type)
        self.users = 0
        self._to_come = 0
        self._outputs: tuple[Tensor, ...] = ()

    def is_input(self, tensor: Tensor) -> bool:
        """Whether the tensor is (part of) an input, so that discarding it would save no memory."""
        return storage_id(tensor.untyped_storage()) in self.storages

    def output(self, index: int) -> Tensor:
        if not self._outputs:
            self._run()
            self._to_come = self.users
        output = self._outputs[index]
        self._to_come -= 1
        if self._to_come <= 0:
            self._outputs = ()
        return output

    def _run(self) -> None:
        if self.versions != tuple(version_of(value) for value in self.inputs if isinstance(value, Tensor)):
            raise RuntimeError("an input of a recomputed function was changed in place before the backward pass")
        with torch.no_grad(), self.autocast():
            outputs = self.function(
                *(unpack(value) if isinstance(value, SavedView) else value for value in self.inputs)
            )
        self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)


def _autocast_now(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context with the current autocast settings, which the thread of the backward pass does not have."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype)
