"""The tensors of a decoder in the folders of Hugging Face: what each is called, where it lies, and in which layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.interop.companions import config_for
from shardwise.interop.families import FAMILIES, family_of
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.interop.tensor_names import JoinedExperts, TensorNames
from shardwise.models.decoder import Decoder
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model

# -- Where a tensor lies in a folder ---------------------------------------------------------------


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor of ours is stored, and in which layout."""

    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...]  # one stored name, or one per expert if ours is a stack of experts
    stacked: bool = False
    transposed: bool = False
    start: int = 0  # where our outputs begin in fused ones (of each head, with `every`)
    whole: int | None = None  # number of fused outputs; None if ours are not fused with others
    head: int = 0  # rows of a head
    rotated: range = range(0)  # those of them that are stored with pairs interleaved
    every: int = 0  # number of fused outputs per head
    joined: bool = False
    """All experts are one stored tensor [experts, outputs, inputs], of whose outputs ours may be a part."""
    one_row: bool = False  # a vector of ours is stored as a matrix of one row
    step: int = 1  # distance of our outputs among joined ones

    @property
    def outputs(self) -> int:
        """The dimension of a stored tensor that runs over outputs."""
        if self.joined:
            return -1 if self.transposed or len(self.shape) == 2 else 1
        return -1 if self.transposed else 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.joined:
            experts, *inputs, outputs = self.shape
            wide = self.whole or outputs
            return (experts, *inputs, wide) if self.outputs == -1 else (experts, wide, *inputs)
        if self.one_row:
            return (1, *self.shape)
        shape = self.shape[1:] if self.stacked else self.shape
        shape = shape[::-1] if self.transposed else shape
        if self.whole is None:
            return shape
        return (*shape[:-1], self.whole) if self.transposed else (self.whole, *shape[1:])

    def stored_slices(self, slices: Slices) -> Slices:
        """What to read of a stored tensor for ``slices`` of ours (of one expert's matrix, of a stack)."""
        if self.joined:
            experts, *inputs, outputs = slices
            first, last, _ = outputs.indices(self.shape[-1])
            among = slice(self.start + first * self.step, self.start + max(0, (last - 1) * self.step + 1))
            return (experts, *inputs, among) if self.outputs == -1 else (experts, among, *inputs)
        if self.one_row:
            return (slice(None), *slices)
        if self.rotated or self.every:
            return (slice(None), *slices[1:])  # rows change places: all are read, then picked
        if self.whole is not None:
            first, last, _ = slices[0].indices(self.shape[0])
            slices = (slice(self.start + first, self.start + last), *slices[1:])
        return slices[::-1] if self.transposed else slices

    def from_stored(self, stored: Tensor, slices: Slices) -> Tensor:
        """What was read by `stored_slices`, in our layout."""
        if self.rotated or self.every:
            return stored[self._rows()[slices[0]]]
        if self.one_row:
            return stored[0]
        if self.joined:
            return stored[..., :: self.step] if self.outputs == -1 else stored[:, :: self.step].transpose(1, 2)
        return stored.T if self.transposed else stored

    def to_stored(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our tensor as stored tensors, or as a part of a fused one."""
        for name, matrix in zip(self.names, tensor if self.stacked else (tensor,)):
            if self.one_row:
                yield name, matrix[None]
            elif self.joined:
                yield name, matrix if self.outputs == -1 else matrix.transpose(1, 2)
            elif self.rotated:
                yield name, matrix[self._rows().argsort()]
            else:
                yield name, matrix.T if self.transposed else matrix

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes what `to_stored` gave into the fused tensor that it is a part of."""
        if self.every:
            whole[self._rows()] = part
        else:
            last = self.start + part.shape[self.outputs] * self.step
            whole.movedim(self.outputs, 0)[self.start : last : self.step] = part.movedim(self.outputs, 0)

    def stored_rows(self) -> Tensor:
        """Which of our outputs each stored one is, where they are not fused with others."""
        return self._rows().argsort() if self.rotated else torch.arange(self.outputs_here)

    def fused_rows(self) -> Tensor:
        """Where each of our outputs is among the fused ones."""
        return self._rows() if self.every else self.start + self.step * torch.arange(self.outputs_here)

    @property
    def outputs_here(self) -> int:
        return self.shape[-1] if self.stacked or self.joined else self.shape[0]

    def _rows(self) -> Tensor:
        rows = torch.arange(self.shape[0]).view(-1, self.head)
        if self.every:
            return (torch.arange(rows.shape[0])[:, None] * self.every + self.start + rows[:1]).flatten()
        turned = rows[:, self.rotated]
        pairs = turned[:, 0::2], turned[:, 1::2]
        return torch.cat((rows[:, : self.rotated.start], *pairs, rows[:, self.rotated.stop :]), dim=1).flatten()


def places_of(model: Model, layout: TensorNames, *, interleaved: bool = True) -> dict[str, TensorPlace]:
    """The place of every tensor of ``model`` by its name in a `Decoder`; with tied embeddings the head has none."""
    with torch.device("meta"):
        decoder = Decoder(model)
    outputs = {name: tensor.shape[0] for name, tensor in decoder.named_tensors()}
    return {
        name: _place(name, tuple(tensor.shape), model, layout, interleaved, outputs)
        for name, tensor in decoder.named_tensors()
    }


def _place(
    name: str, shape: tuple[int, ...], model: Model, layout: TensorNames, interleaved: bool, outputs: Mapping[str, int]
) -> TensorPlace:
    if not name.startswith("layers."):
        module, _, kind = name.rpartition(".")
        return TensorPlace(name, shape, (f"{_theirs(module, layout.outside, name)}.{kind}",))
    _, index, inner = name.split(".", 2)
    before = layout.layer.format(index)
    if ".experts." in inner:
        if layout.joined_experts:
            theirs = before + _theirs(inner, layout.inside, name)
            return _joined(name, shape, theirs, inner.rpartition(".")[2].removesuffix("_bias"), layout.joined_experts)
        theirs = f"{before}{_theirs(inner, layout.inside, name)}.weight"
        names = tuple(theirs.format(expert) for expert in range(shape[0]))
        return TensorPlace(name, shape, names, stacked=True, transposed=True)
    if inner in layout.inside:
        return TensorPlace(name, shape, (before + layout.inside[inner],), one_row=inner in layout.rows_of_one)
    module, _, kind = inner.rpartition(".")
    start, whole, every = _part(name, module, layout, outputs, model)
    head, rotated = _rotated(module, model) if interleaved and module in layout.interleaved else (0, range(0))
    names = (f"{before}{_theirs(module, layout.inside, name)}.{kind}",)
    transposed, head = module in layout.transposed and len(shape) == 2, model.head_size if every else head
    return TensorPlace(name, shape, names, False, transposed, start, whole, head, rotated, every)


def _joined(name: str, shape: tuple[int, ...], theirs: str, part: str, how: JoinedExperts) -> TensorPlace:
    """Gate and up make one tensor; down is another."""
    outputs, step = shape[-1], 2 if how.alternating and part != "down" else 1
    start = 0 if part != "up" else 1 if how.alternating else outputs
    whole = outputs if part == "down" else 2 * outputs
    return TensorPlace(name, shape, (theirs,), False, how.transposed, start, whole, joined=True, step=step)


def _theirs(module: str, names: Mapping[str, str], name: str) -> str:
    if module not in names:
        raise SpecError(name, "has no place in a Hugging Face folder of this family", "keep it as our own checkpoint")
    return names[module]


def _part(
    name: str, module: str, layout: TensorNames, outputs: Mapping[str, int], model: Model
) -> tuple[int, int | None, int]:
    """Where a module's outputs begin in the fused ones, the number of fused outputs, and their number per head."""
    for fused in layout.fused:
        if module in fused:
            sizes = [outputs[name.replace(module, part)] for part in fused]
            at = fused.index(module)
            if layout.by_head:
                return at * model.head_size, sum(sizes), len(fused) * model.head_size
            return sum(sizes[:at]), sum(sizes), 0
    return 0, None, 0


def _rotated(module: str, model: Model) -> tuple[int, range]:
    """The rows of a head, or of the latent vector, and those of them that are rotated."""
    if model.mla is None:
        return model.head_size, range(model.rotated_features)
    before = model.mla.kv_rank if module == "attention.key_value_down" else model.mla.nope_dim
    return before + model.mla.rope_dim, range(before, before + model.mla.rope_dim)


_OTHER_CONFIG = "use the config.json that belongs to these weights"


@dataclass(frozen=True)
class Naming:
    """What a Hugging Face family calls the tensors of one model."""

    model: Model  # with multi-token-prediction modules if the folder stores them, or will: not every family names them
    layout: TensorNames
    config: Mapping[str, Any]  # the content of config.json

    @classmethod
    def of_config(cls, config: Mapping[str, Any], model: Model | None = None, present: Collection[str] = ()) -> Naming:
        """Of a config.json and the tensors beside it; raises SpecError for a family whose weights are not read."""
        described, layout = model or model_from_hf_config(config), _layout_of(config)
        first = layout.layer.format(described.layers) + layout.inside.get("joined", "")
        modules = described.mtp_layers if f"{first}.weight" in present else 0
        if layout.is_in_memory(present):
            layout = layout.with_joined_experts()
        return cls(replace(described, mtp_layers=modules), layout, config)

    @classmethod
    def of_model(cls, model: Model, source: Path | None = None) -> Naming:
        """Names of the first family that can express the model, or of the folder it came from (``source``)."""
        config = config_for(replace(model, mtp_layers=0), source)
        family = family_of(config["model_type"])
        if family and family.tensors is None:
            problem = f"weights of the family {config['model_type']} are not written"
            raise SpecError("model", problem, f"written are {', '.join(_WITH_TENSORS)}")
        naming = cls.of_config(config, model)
        if model.mtp_layers == 0 or "joined" not in naming.layout.inside:
            return naming
        return cls(model, naming.layout, {**config, "num_nextn_predict_layers": model.mtp_layers})

    def copies(self, name: str) -> tuple[str, ...]:
        """Where a stored prediction module repeats a tensor of the model: each has the embedding and the head."""
        ours = {"embedding.weight": "embed_tokens.weight", "head.weight": "shared_head.head.weight"}
        if self.model.tied_embeddings:
            ours = {"embedding.weight": "embed_tokens.weight"}
        modules = range(self.model.layers, self.model.layers + self.model.mtp_layers)
        return tuple(self.layout.layer.format(index) + ours[name] for index in modules if name in ours)

    @cached_property
    def places(self) -> dict[str, TensorPlace]:
        return places_of(self.model, self.layout, interleaved=self.config.get("rope_interleave") is not False)

    def stored_name(self, theirs: str, present: Collection[str]) -> str:
        """The published GPT-2 leaves out the prefix that the library writes."""
        bare = theirs.removeprefix(self.layout.prefix)
        return bare if theirs not in present and bare in present else theirs

    def check(self, present: Collection[str], where: str) -> None:
        """Raises SpecError for the first tensor that is missing or that no decoder of this model has."""
        needed = {self.stored_name(name, present): name for place in self.places.values() for name in place.names}
        for stored, theirs in needed.items():
            if stored not in present:
                raise SpecError(theirs, f"is missing in {where}", f"complete the download, or {_OTHER_CONFIG}")
        for stored in sorted(set(present) - needed.keys()):
            if "weight_scale" in stored:
                raise SpecError(stored, "is the scale of quantised weights", "convert the checkpoint to bf16 first")
            if not self._may_be_ignored(stored):
                problem = f"in {where} belongs to no part of {self.model.name} as config.json describes it"
                raise SpecError(stored, problem, _OTHER_CONFIG)

    def _may_be_ignored(self, stored: str) -> bool:
        """Whether a stored tensor may be ignored: a constant, a tied head, or of a multi-token-prediction module."""
        if stored.endswith((*self.layout.ignored, *self.layout.constants)):
            return True
        if stored == "lm_head.weight":
            return self.model.tied_embeddings
        before = self.layout.layer.split("{}")[0]
        index = stored.removeprefix(before).split(".")[0] if stored.startswith(before) else ""
        predicts = bool(self.config.get("num_nextn_predict_layers", 0))
        return predicts and index.isdigit() and int(index) >= self.model.layers


_WITH_TENSORS = [name for name, family in FAMILIES.items() if family.tensors]


def _layout_of(config: Mapping[str, Any]) -> TensorNames:
    model_type = config.get("model_type")
    family = family_of(model_type)
    if family and family.tensors:
        return family.tensors
    what = "a part of a larger model" if isinstance(config.get("text_config"), dict) else shown(model_type)
    raise SpecError("model_type", f"the weights of {what} are not read", f"use one of {', '.join(_WITH_TENSORS)}")
