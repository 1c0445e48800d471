"""Where each tensor of a decoder lies in a Hugging Face folder, and the change of layout in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.models.decoder import Decoder
from shardwise.models.huggingface.layouts import Layout
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Place:
    """Where one tensor of ours lies, and how it is stored there.

    ``names`` is one name, or one for each expert where ours is a stack of them. ``start`` and ``whole`` say which
    part of fused outputs is ours. ``head`` and ``rotated`` are the rows of a head and how many of them, the last, are
    stored with pairs side by side. ``every``: the fused outputs of one head are that many, and a head of ours begins at
    ``start`` of each.
    """

    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool = False
    transposed: bool = False
    start: int = 0
    whole: int | None = None
    head: int = 0
    rotated: int = 0
    every: int = 0

    @property
    def outputs(self) -> int:
        """The dimension of a stored tensor that runs over outputs."""
        return -1 if self.transposed else 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each stored tensor."""
        shape = self.shape[1:] if self.stacked else self.shape
        shape = shape[::-1] if self.transposed else shape
        if self.whole is None:
            return shape
        return (*shape[:-1], self.whole) if self.transposed else (self.whole, *shape[1:])

    def stored_slices(self, slices: Slices) -> Slices:
        """What to read of a stored tensor for ``slices`` of ours (of one expert's matrix, of a stack)."""
        if self.rotated or self.every:
            return (slice(None), *slices[1:])  # rows change places: all are read, then picked
        if self.whole is not None:
            first, last, _ = slices[0].indices(self.shape[0])
            slices = (slice(self.start + first, self.start + last), *slices[1:])
        return slices[::-1] if self.transposed else slices

    def from_stored(self, stored: Tensor, slices: Slices) -> Tensor:
        """Our layout of what `stored_slices` has read."""
        if self.rotated or self.every:
            return stored[self._rows()[slices[0]]]
        return stored.T if self.transposed else stored

    def to_stored(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors, or the part of a fused one, that ours makes."""
        for name, matrix in zip(self.names, tensor if self.stacked else (tensor,)):
            if self.rotated:
                yield name, matrix[self._rows().argsort()]
            else:
                yield name, matrix.T if self.transposed else matrix

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes what `to_stored` gave into the fused tensor that it is a part of."""
        if self.every:
            whole[self._rows()] = part
        else:
            whole.narrow(self.outputs, self.start, part.shape[self.outputs]).copy_(part)

    def _rows(self) -> Tensor:
        """For each of our rows, the stored row it is."""
        rows = torch.arange(self.shape[0]).view(-1, self.head)
        if self.every:
            return (torch.arange(rows.shape[0])[:, None] * self.every + self.start + rows[:1]).flatten()
        turned = rows[:, -self.rotated :]
        return torch.cat((rows[:, : -self.rotated], turned[:, 0::2], turned[:, 1::2]), dim=1).flatten()


def places_of(model: Model, layout: Layout, *, interleaved: bool = True) -> dict[str, Place]:
    """The place of every tensor of ``model`` by its name in a `Decoder`; with tied embeddings the head has none."""
    with torch.device("meta"):
        decoder = Decoder(model)
    outputs = {name: tensor.shape[0] for name, tensor in decoder.named_tensors()}
    return {
        name: _place(name, tuple(tensor.shape), model, layout, interleaved, outputs)
        for name, tensor in decoder.named_tensors()
    }


def _place(
    name: str, shape: tuple[int, ...], model: Model, layout: Layout, interleaved: bool, outputs: Mapping[str, int]
) -> Place:
    if not name.startswith("layers."):
        module, _, kind = name.rpartition(".")
        return Place(name, shape, (f"{_theirs(module, layout.outside, name)}.{kind}",))
    _, index, inner = name.split(".", 2)
    before = layout.layer.format(index)
    if ".experts." in inner:
        theirs = f"{before}{_theirs(inner, layout.inside, name)}.weight"
        names = tuple(theirs.format(expert) for expert in range(shape[0]))
        return Place(name, shape, names, stacked=True, transposed=True)
    if inner in layout.inside:
        return Place(name, shape, (before + layout.inside[inner],))
    module, _, kind = inner.rpartition(".")
    start, whole, every = _part(name, module, layout, outputs, model)
    head, rotated = _rotated(module, model) if interleaved and module in layout.interleaved else (0, 0)
    head = model.head_size if every else head
    return Place(
        name,
        shape,
        (f"{before}{_theirs(module, layout.inside, name)}.{kind}",),
        transposed=module in layout.transposed and len(shape) == 2,
        start=start,
        whole=whole,
        head=head,
        rotated=rotated,
        every=every,
    )


def _theirs(module: str, names: Mapping[str, str], name: str) -> str:
    if module not in names:
        raise SpecError(name, "has no place in a Hugging Face folder of this family", "keep it as our own checkpoint")
    return names[module]


def _part(
    name: str, module: str, layout: Layout, outputs: Mapping[str, int], model: Model
) -> tuple[int, int | None, int]:
    """Where a module's outputs begin in the fused ones, how many these are, and how many of each head."""
    for fused in layout.fused:
        if module in fused:
            sizes = [outputs[name.replace(module, one)] for one in fused]
            at = fused.index(module)
            if layout.by_head:
                return at * model.head_size, sum(sizes), len(fused) * model.head_size
            return sum(sizes[:at]), sum(sizes), 0
    return 0, None, 0


def _rotated(module: str, model: Model) -> tuple[int, int]:
    assert model.mla
    before = model.mla.kv_rank if module == "attention.key_value_down" else model.mla.nope_dim
    return before + model.mla.rope_dim, model.mla.rope_dim
