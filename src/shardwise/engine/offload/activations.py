"""Activations kept outside of the device's memory between the forward and the backward pass of their layer.

What autograd saves in a layer is copied out while the next layer computes, and back while the backward pass of the
next layer runs. PyTorch's own `save_on_cpu` waits for every tensor, copies every view of a storage separately and
parameters as well, and can neither use a disk, nor offload only a share, nor prefetch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.engine.autograd import SavedView, unpack
from shardwise.engine.offload.store import BackgroundCopy, Store, StreamCopy
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.torch_private import replace_call, storage_id, version_of
from shardwise.layout.payloads import Role, sent_backward, sent_forward

SMALLEST_BYTES = 4096  # smaller tensors stay: the transfer would cost more than the memory


def offload_activations(
    stages: Sequence[nn.Module], patterns: Patterns, store: Store, share: float, *, at_once: bool
) -> None:
    """Wraps the forward pass of every layer so that ``share`` of the bytes that it saves are offloaded.

    ``at_once``: each backward pass directly follows its forward pass, so the last layer's activations would have to
    come back as soon as they have left. They stay, and the other layers offload a larger share.
    """
    for stage in stages:
        layers = [layer for _, layer in matching(stage, patterns.layers)]
        stays = at_once and len(layers) > 1
        offload = _StageOffload(store, min(1.0, share * len(layers) / (len(layers) - 1)) if stays else share)
        for place, layer in enumerate(layers):
            if stays and place == len(layers) - 1:
                _fetch_before(layer, offload)
            else:
                _wrap(layer, offload, first=place == 0)


def _fetch_before(layer: nn.Module, offload: _StageOffload) -> None:
    """Starts to bring back what the layer before has offloaded when the backward pass reaches this one."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def forward_and_fetch(*arguments: Any, **named: Any) -> Any:
            result = forward(*arguments, **named)
            before = offload.last
            if before is not None and isinstance(result, Tensor) and result.requires_grad:
                before.leave()
                result.register_hook(_fetching(weakref.ref(before)))  # type: ignore[no-untyped-call]
            return result

        return forward_and_fetch

    replace_call(layer, around)


def _fetching(reference: weakref.ref[_LayerPass]) -> Callable[[Tensor], None]:
    def fetch(gradient: Tensor) -> None:
        layer_pass = reference()
        if layer_pass is not None:
            layer_pass.fetch()

    return fetch


def _wrap(layer: nn.Module, offload: _StageOffload, first: bool) -> None:
    """Layers that are recomputed save their inputs alone, outside of the hooks within which they run again."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def forward_saving_elsewhere(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            layer_pass = offload.begin(layer, first)
            with saved_tensors_hooks(layer_pass.pack, unpack):
                result = forward(*arguments, **named)
            offload.end(layer_pass)
            return result

        return forward_saving_elsewhere

    replace_call(layer, around)


class _StageOffload:
    """The layers of a stage in order; at most one of them is still being copied out when the next has run."""

    def __init__(self, store: Store, share: float) -> None:
        self.store, self.share = store, share
        self.seen = self.sent = 0
        self.last: _LayerPass | None = None  # the pass that has ended last

    def begin(self, layer: nn.Module, first: bool) -> _LayerPass:
        if first:
            self.seen = self.sent = 0
        return _LayerPass(self, layer, None if first else self.last)

    def end(self, layer_pass: _LayerPass) -> None:
        if self.last is not None:
            self.last.leave()
        self.last = layer_pass
        layer_pass.close()

    def takes(self, size: int) -> bool:
        """Whether to offload a storage: yes if that brings the offloaded bytes of the pass closer to its share."""
        self.seen += size
        if self.sent + size / 2 > self.share * self.seen:
            return False
        self.sent += size
        return True


class _LayerPass:
    """What one forward pass of a layer saves. The offloaded storages own it, so that it is freed with the graph."""

    def __init__(self, offload: _StageOffload, layer: nn.Module, before: _LayerPass | None) -> None:
        self.offload = offload
        self._before = None if before is None else weakref.ref(before)
        self._sent: list[weakref.ref[_Sent]] = []
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, _Sent | None]] = {}
        self._layer: nn.Module | None = layer
        self._leaving: list[BackgroundCopy | StreamCopy] = []
        self._is_fetched = False

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        storage = tensor.untyped_storage()
        key, size = (storage_id(storage), version_of(tensor)), storage.nbytes()
        if key not in self._known:
            taken = size >= SMALLEST_BYTES and not self._is_parameter(key[0]) and self.offload.takes(size)
            # The weak reference keeps the address from being used again, though not the memory.
            self._known[key] = StorageWeakRef(storage), self._send(tensor) if taken else None  # type: ignore[no-untyped-call]
        sent = self._known[key][1]
        if sent is None:
            return tensor.detach()  # the tensor itself could be an output of the very node that saves it: a cycle
        sent.users += 1
        return SavedView.of(tensor, sent.content)

    def close(self) -> None:
        """Nothing more will be packed."""
        self._known.clear()
        self._layer = None

    def _is_parameter(self, storage: int) -> bool:
        """Asked when a tensor is saved: data parallelism gathers parts of a layer, such as experts, as they run."""
        assert self._layer is not None
        return any(storage_id(parameter.untyped_storage()) == storage for parameter in self._layer.parameters())

    def leave(self) -> None:
        """Waits until everything is copied out."""
        for copy in self._leaving:
            copy.wait()
        self._leaving = []

    def fetch(self) -> None:
        """Starts to copy everything back."""
        if self._is_fetched:
            return
        self._is_fetched = True
        self.leave()
        for reference in self._sent:
            sent = reference()
            if sent is not None:
                sent.fetch()

    def fetch_before(self) -> None:
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()

    def _send(self, tensor: Tensor) -> _Sent:
        """Offloads all of a tensor's storage."""
        store = self.offload.store
        # Not by `set_`, which keeps the storage of a fake tensor for good.
        first_bytes = tensor.detach().as_strided((1,), (1,), 0).view(torch.uint8)
        content = first_bytes.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0)
        sent = _Sent(self, content.numel(), content.device)
        self._leaving.append(sent.region.keep(0, content))
        store.lanes.moved[sent_forward(Role.ACTIVATIONS_TO_HOST)] += content.numel()
        self._sent.append(weakref.ref(sent))
        return sent


class _Sent:
    """One offloaded storage; on the device again from `fetch` until its last user has read it.

    If autograd asks for a tensor a second time, it is fetched again. The region is freed with this object.
    """

    def __init__(self, layer: _LayerPass, size: int, device: torch.device) -> None:
        self.layer, self.size, self.device = layer, size, device
        self.store = layer.offload.store
        self.region = self.store.region(size)
        self.users = 0
        self._readers_left = 0
        self._content: Tensor | None = None
        self._incoming: BackgroundCopy | StreamCopy | None = None

    def fetch(self) -> Tensor:
        if self._content is None:
            self._content = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            self._incoming = self.region.bring(0, self._content)
            self._readers_left = self.users
            self.store.lanes.moved[sent_backward(Role.ACTIVATIONS_FROM_HOST)] += self.size
        return self._content

    def content(self) -> Tensor:
        self.layer.fetch()
        content = self.fetch()
        self.layer.fetch_before()
        if self._incoming is not None:
            self._incoming.wait()
            self._incoming = None
        self._readers_left -= 1
        if self._readers_left <= 0:
            self._content = None
        return content

    def __del__(self) -> None:
        self.layer.leave()
        if self._incoming is not None:
            self._incoming.wait()
        self.store.take_back(self.region)
