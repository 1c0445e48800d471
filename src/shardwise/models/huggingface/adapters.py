"""Adapters in the format of PEFT: `adapter_config.json` beside `adapter_model.safetensors`, read and written.

Names and layout are those of the family (huggingface/peft, docs/source/developer_guides/checkpoint.md). Where a family
fuses linear layers whose adapters are apart here, the fused adapter has the narrow vectors of all of them one behind
the other, with zeros between: the same sums. What is read of a fused adapter is the same narrow matrix for each part.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.models.decoder import is_stack_of_experts
from shardwise.models.huggingface.tensors import Naming, TensorPlace
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_json
from shardwise.spec.fine_tuning import Adapters

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_ALPHA = 8  # PEFT's, where a configuration has none
_MOST_REPEATS = 3  # of a regular expression in a configuration
_KEY = re.compile(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
_UNREAD: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None), "layer_replication": (None, {}, []), "lora_bias": (None, False),
    "use_qalora": (None, False), "trainable_token_indices": (None, [], {}), "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []), "use_bdlora": (None, False), "kasa_config": (None,),
    "monteclora_config": (None,), "arrow_config": (None,),
    # Others take from the base what the adapter begins with (PiSSA, OLoRA, CorDA, LoftQ).
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
_FINGERPRINT = "base_fingerprint"  # in the metadata of the file, which PEFT does not read
_MERGE = "merge it with its own tools"
_WHOLE = "write the whole model: ⟨to=huggingface⟩"
_ITS_BASE = "use the adapter with the base that it was trained with"


@dataclass(frozen=True)
class Added:
    """What an adapter adds to one weight of a decoder: for an expert's matrices ``a`` and ``b`` are stacked."""

    a: Tensor
    b: Tensor
    factor: float
    magnitude: Tensor | None = None

    def to(self, weight: Tensor) -> Tensor:
        """The weight with its adapter, computed in fp32, in the format of the weight."""
        a, b, wide = self.a.float(), self.b.float(), weight.float()
        summed = wide + self.factor * (a @ b if a.dim() == 3 else b @ a)
        if self.magnitude is not None:
            summed *= (self.magnitude.float() / summed.norm(dim=1))[:, None]
        return summed.to(weight.dtype)


@dataclass(frozen=True)
class LoadedAdapter:
    """Adapters by the name of the weight that each is beside, and weights that were trained as they are."""

    added: Mapping[str, Added]
    trained: Mapping[str, Tensor]
    base: str | None = None  # what its folder calls the base
    fingerprint: str | None = None  # of the base's frozen weights, if it is one of ours


def is_adapter(path: Path) -> bool:
    return (path / CONFIG).is_file()


# -- writing -------------------------------------------------------------------------------------------


def write_adapter(
    folder: Path, naming: Naming, adapters: Adapters | None, adapter: LoadedAdapter, base: str | None
) -> None:
    """Writes a new folder that `peft` loads beside the model ``base``."""
    both = next((name for name in adapter.added if name in adapter.trained), None)
    if both or not adapter.added:
        problem = "is trained, and has an adapter too" if both else "were not trained, which PEFT needs"
        raise SpecError(both or "training.adapters", problem, _WHOLE)
    groups: dict[str, list[tuple[TensorPlace, Added]]] = {}
    for name, added in adapter.added.items():
        place = naming.places[name]
        for number, theirs in enumerate(place.names):
            one = Added(added.a[number].T, added.b[number].T, added.factor) if place.stacked else added
            groups.setdefault(theirs.removesuffix(".weight"), []).append((place, one))
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for theirs, parts in groups.items():
        stored = _stored(theirs, parts, naming)
        tensors |= {f"{PREFIX}{theirs}.{key}": tensor.contiguous() for key, tensor in stored.items()}
        ranks[theirs] = len(stored["lora_A.weight"])
    for name, tensor in adapter.trained.items():
        for theirs, own in naming.places[name].to_stored(tensor):
            if naming.places[name].whole is not None:
                raise SpecError(name, "is a part of a fused tensor, and PEFT keeps whole modules", _WHOLE)
            tensors[PREFIX + theirs] = own.contiguous()
    whole = sorted({theirs.rpartition(".")[0] for name in adapter.trained for theirs in naming.places[name].names})
    config = _config(adapters or Adapters(), ranks, groups, whole, base)
    if naming.model.tied_embeddings and "embedding.weight" in adapter.trained:
        config["ensure_weight_tying"] = True  # otherwise the head keeps the weights that the embedding had
        tensors[PREFIX + _head(naming)] = adapter.trained["embedding.weight"].clone()
    folder.mkdir(parents=True, exist_ok=True)
    known = {} if adapter.fingerprint is None else {_FINGERPRINT: adapter.fingerprint}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt", **known})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _stored(theirs: str, parts: Sequence[tuple[TensorPlace, Added]], naming: Naming) -> dict[str, Tensor]:
    """The tensors of one stored module, whose outputs ``parts`` divide."""
    first, added = parts[0]
    if first.whole is None:
        rows = first.stored_rows()
        a, b, magnitude = added.a, added.b[rows], None if added.magnitude is None else added.magnitude[rows]
    else:
        a = torch.cat([part.a for _, part in parts])
        b = added.b.new_zeros((first.whole, len(a)))
        magnitude = None if added.magnitude is None else added.magnitude.new_zeros(first.whole)
        if magnitude is not None and sum(place.shape[0] for place, _ in parts) != first.whole:
            problem = "trains the lengths of only some of the fused outputs"
            raise SpecError(theirs, problem, _WHOLE)
        at = 0
        for place, part in parts:
            b[place.fused_rows(), at : at + len(part.a)] = part.b
            at += len(part.a)
            if magnitude is not None and part.magnitude is not None:
                magnitude[place.fused_rows()] = part.magnitude
    tensors = {"lora_A.weight": a, "lora_B.weight": b}
    return tensors if magnitude is None else {**tensors, "lora_magnitude_vector": magnitude}


def _config(
    adapters: Adapters, ranks: Mapping[str, int], groups: Mapping[str, Any], whole: Sequence[str], base: str | None
) -> dict[str, Any]:
    own = {theirs.rpartition(".")[2]: rank for theirs, rank in ranks.items()}
    if len({(theirs.rpartition(".")[2], rank) for theirs, rank in ranks.items()}) > len(own):
        own = dict(ranks)  # a name has several ranks: modules by their whole names
    root = adapters.scaling == "rank-stabilised"
    different = {name: rank for name, rank in own.items() if rank != adapters.rank}
    alphas = {
        name: adapters.alpha * (math.sqrt(rank / adapters.rank) if root else rank / adapters.rank)
        for name, rank in different.items()
    }
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": adapters.rank, "lora_alpha": adapters.alpha, "lora_dropout": adapters.dropout, "bias": "none",
        "use_rslora": root, "use_dora": adapters.method == "dora", "init_lora_weights": True,
        "fan_in_fan_out": any(place.transposed and not place.stacked for part in groups.values() for place, _ in part),
        "target_modules": sorted(own), "rank_pattern": different, "alpha_pattern": alphas,
        "layers_to_transform": list(adapters.layers) or None, "modules_to_save": list(whole) or None,
    }  # fmt: skip


# -- reading -------------------------------------------------------------------------------------------


def read_adapter(folder: Path, naming: Naming) -> LoadedAdapter:
    """The adapter of a PEFT folder for a model; raises SpecError for what does not fit it, or is of another kind."""
    config = _read_config(folder)
    try:
        stored = load_file(folder / TENSORS)
        with safe_open(folder / TENSORS, "pt") as file:
            fingerprint = (file.metadata() or {}).get(_FINGERPRINT)
    except (OSError, SafetensorError) as error:
        raise SpecError(str(folder / TENSORS), f"cannot be read ({shown(str(error))})", "get another copy") from None
    ours: dict[str, list[tuple[TensorPlace, int]]] = {}
    for place in naming.places.values():
        for number, theirs in enumerate(place.names):
            ours.setdefault(theirs, []).append((place, number))
    modules: dict[str, dict[str, Tensor]] = {}
    trained: dict[str, Tensor] = {}
    tied = naming.model.tied_embeddings and bool(config.get("ensure_weight_tying"))
    for key, tensor in stored.items():
        name = key.removeprefix(PREFIX)
        if tied and name == _head(naming):
            continue  # the embedding again
        found = _KEY.fullmatch(name)
        # Beside an adapter of the head PEFT keeps the head itself (`save_embedding_layers`).
        theirs = _known(f"{found[1]}.weight" if found else name.replace(".base_layer.", "."), ours, naming, folder)
        if found:
            modules.setdefault(theirs, {})[found[2]] = tensor
            continue
        for place, _ in ours[theirs]:
            if tuple(tensor.shape) != place.stored_shape:
                problem = f"in {folder} is {list(tensor.shape)}, but the base makes it {list(place.stored_shape)}"
                raise SpecError(theirs, problem, _ITS_BASE)
            whole = tuple(slice(None) for _ in place.shape)
            trained[place.name] = place.from_stored(tensor[place.stored_slices(whole)], whole)
    added: dict[str, Added] = {}
    of_experts: dict[str, dict[int, Added]] = {}
    for theirs, tensors in modules.items():
        for place, number in ours[theirs]:
            one = _added(theirs, tensors, place, config, folder)
            if place.stacked:
                of_experts.setdefault(place.name, {})[number] = one
            else:
                added[place.name] = one
    for name, experts in of_experts.items():
        added[name] = _stack(name, experts, naming.places[name].shape[0], folder)
    if naming.model.tied_embeddings and "embedding.weight" in trained and not tied:
        raise SpecError(
            str(folder), f"trains the embedding alone, which is the head of {naming.model.name} too", _MERGE
        )
    base = config.get("base_model_name_or_path")
    return LoadedAdapter(added, trained, base if isinstance(base, str) else None, fingerprint)


def _read_config(folder: Path) -> dict[str, Any]:
    config, where = read_json(folder / CONFIG, "adapter"), str(folder / CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise SpecError(where, f"describes {shown(kind)}, not a LORA", _MERGE)
    for key, plain in _UNREAD.items():
        if config.get(key) not in plain:
            raise SpecError(where, f"has {key}: {shown(config[key])}, which is not read", _MERGE)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_is_simple, patterns)):
        raise SpecError(where, f"has alpha_pattern: {shown(patterns)}, which is not read", _MERGE)
    for alpha in (config.get("lora_alpha", _ALPHA), *patterns.values()):
        if not isinstance(alpha, int | float):
            raise SpecError(where, f"has lora_alpha: {shown(alpha)}, which is not a number", "get another copy")
    return config


def _is_simple(pattern: str) -> bool:
    """Whether matching a regular expression takes no time: nothing is repeated inside of what is repeated."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        return False
    return not re.search(r"\)[*+?{]", pattern) and len(re.findall(r"[*+?{]", pattern)) <= _MOST_REPEATS


def _head(naming: Naming) -> str:
    return f"{naming.layout.outside['head']}.weight"


def _known(theirs: str, ours: Mapping[str, Any], naming: Naming, folder: Path) -> str:
    for name in (theirs, naming.layout.prefix + theirs):
        if name in ours:
            return name
    if ".lora_embedding_" in theirs:
        raise SpecError(theirs, f"in {folder} is beside an embedding, which is not read", _MERGE)
    if theirs == _head(naming) and naming.model.tied_embeddings:
        problem = f"in {folder} is apart from the embedding, which is the head of {naming.model.name}"
        raise SpecError(theirs, problem, _MERGE)
    raise SpecError(theirs, f"in {folder} belongs to no part of {naming.model.name}", _ITS_BASE)


def _added(
    theirs: str, tensors: Mapping[str, Tensor], place: TensorPlace, config: Mapping[str, Any], folder: Path
) -> Added:
    a, b, magnitude = (tensors.get(key) for key in ("lora_A", "lora_B", "lora_magnitude_vector"))
    outputs, inputs = place.shape[-2:] if not place.stacked else place.shape[:0:-1]
    rows = place.fused_rows() if place.whole is not None else place.stored_rows().argsort()
    fits = a is not None and b is not None and a.dim() == b.dim() == 2 and len(a) > 0
    if not fits or a.shape[1] != inputs or b.shape != (place.whole or outputs, a.shape[0]):  # type: ignore[union-attr]
        shapes = [None if part is None else list(part.shape) for part in (a, b)]
        problem = f"in {folder} is {shapes}, but the base makes it {outputs} x {inputs}"
        raise SpecError(theirs, problem, _ITS_BASE)
    assert a is not None and b is not None
    if magnitude is not None and magnitude.numel() != len(b):
        raise SpecError(theirs, f"in {folder} has {magnitude.numel()} lengths for {len(b)} outputs", _ITS_BASE)
    if config.get("use_dora") and magnitude is None:
        raise SpecError(theirs, f"in {folder} has no lora_magnitude_vector", "get another copy")
    rank, module = a.shape[0], theirs.removesuffix(".weight")
    alpha = _of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", _ALPHA))
    factor = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Added(a, b[rows], factor, None if magnitude is None else magnitude.flatten()[rows])


def _of_pattern(patterns: Any, module: str, usual: Any) -> Any:
    """As PEFT looks them up (`get_pattern_key`): a regular expression of a name, or of the end of one."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return usual


def _stack(name: str, experts: Mapping[int, Added], number: int, folder: Path) -> Added:
    assert is_stack_of_experts(name)
    if set(experts) != set(range(number)):
        raise SpecError(name, f"in {folder} has adapters of only some experts", _MERGE)
    each = [experts[expert] for expert in range(number)]
    if len({(one.a.shape, one.factor) for one in each}) > 1 or any(one.magnitude is not None for one in each):
        raise SpecError(name, f"in {folder} has unlike adapters, or DoRA's, of experts", _MERGE)
    return Added(torch.stack([one.a.T for one in each]), torch.stack([one.b.T for one in each]), each[0].factor)
