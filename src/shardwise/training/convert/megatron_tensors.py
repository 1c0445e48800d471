"""How the tensors of Megatron core's tensor ranks make those of a `Decoder`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.models import Decoder
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.training.checkpoint.whole import Lazy

Merge = Callable[[Sequence[Tensor]], Tensor]
# Beside the weights, or a copy of them: the tied embedding on the last stage is left out as well.
_LEFT_OUT = ("_extra_state", "rotary_pos_emb.inv_freq")


def merged(model: Model, stored: Mapping[str, Sequence[Lazy]], origin: str) -> dict[str, Lazy]:
    """Our tensors out of theirs, of which each name has one of every tensor rank.

    Raises SpecError for what is missing, does not fit or belongs to nothing.
    """
    with torch.device("meta"):
        names = [name for name, _ in Decoder(model).named_tensors()]
    found: dict[str, Lazy] = {}
    used: set[str] = {"output_layer.weight"} if model.tied_embeddings else set()
    for name in names:
        candidates, merge = _source(name, model)
        theirs = next((one for one in candidates if one in stored), None)
        if theirs is None:
            raise SpecError(candidates[0], f"is missing in {origin}", "name the model that was trained (--model)")
        used.add(theirs)
        found[name] = _lazy(theirs, stored[theirs], merge, origin)
    for theirs in sorted(stored.keys() - used):
        if not theirs.endswith(_LEFT_OUT):
            problem = f"in {origin} belongs to no part of {model.name}"
            raise SpecError(theirs, problem, "name the model that was trained (--model)")
    return found


def _lazy(theirs: str, parts: Sequence[Lazy], merge: Merge, origin: str) -> Lazy:
    try:
        shape = tuple(merge([torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts]).shape)
    except RuntimeError:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise SpecError(theirs, f"of {shapes} in {origin} does not fit the model", "name the right --model") from None
    return Lazy(shape, parts[0].dtype, lambda: merge([part.read() for part in parts]))


def _source(name: str, model: Model) -> tuple[list[str], Merge]:
    """What a tensor of ours is called there, and how the ranks' parts make it."""
    module, _, kind = name.rpartition(".")
    if not name.startswith("layers."):
        vocabulary: Merge = partial(_rows, first=model.vocab)
        outside: dict[str, tuple[list[str], Merge]] = {
            "embedding": (["embedding.word_embeddings"], vocabulary),
            "position_embedding": (["embedding.position_embeddings"], _equal),
            "norm": (["decoder.final_layernorm"], _equal),
            "head": (["output_layer"], vocabulary),
        }
        theirs, merge = outside[module]
        return [f"{one}.{kind}" for one in theirs], merge
    _, index, inner = module.split(".", 2)
    before = f"decoder.layers.{index}."
    return [before + one for one in _inside(inner, kind)], _merge(inner, kind, model)


def _inside(inner: str, kind: str) -> Iterator[str]:
    """The names of a layer's tensor, of which one is there: norms may be fused into the map that follows them."""
    fused = {"attention_norm": ("input_layernorm", "self_attention.linear_qkv"),
             "mlp_norm": ("pre_mlp_layernorm", "mlp.linear_fc1")}  # fmt: skip
    if inner in fused:
        alone, following = fused[inner]
        yield f"{alone}.{kind}"
        yield f"{following}.layer_norm_{kind}"
        return
    modules = {
        "attention.query": "self_attention.linear_qkv", "attention.key": "self_attention.linear_qkv",
        "attention.value": "self_attention.linear_qkv", "attention.output": "self_attention.linear_proj",
        "attention.query_norm": "self_attention.q_layernorm", "attention.key_norm": "self_attention.k_layernorm",
        "mlp.gate": "mlp.linear_fc1", "mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2",
    }  # fmt: skip
    if inner not in modules:
        raise SpecError(inner, "has no place in a Megatron-LM folder", "convert it with its own tools")
    yield f"{modules[inner]}.{kind}"


def _merge(inner: str, kind: str, model: Model) -> Merge:
    if inner in ("attention.query", "attention.key", "attention.value"):
        return partial(_of_groups, which=inner.removeprefix("attention."), model=model)
    if inner in ("mlp.gate", "mlp.up") and model.gated:
        return partial(_half, second=inner == "mlp.up")
    if inner == "mlp.up":
        return _rows
    if inner in ("attention.output", "mlp.down") and kind == "weight":
        return _columns
    return _equal


def _rows(parts: Sequence[Tensor], first: int | None = None) -> Tensor:
    """Outputs end to end; of a vocabulary the ``first`` ones, without its padding."""
    return torch.cat(list(parts))[:first]


def _columns(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1)


def _equal(parts: Sequence[Tensor]) -> Tensor:
    """What every rank has."""
    if not parts[0].is_meta and any(not torch.equal(part, parts[0]) for part in parts[1:]):
        raise SpecError("", "tensor ranks that should hold the same differ", "copy the checkpoint again")
    return parts[0]


def _half(parts: Sequence[Tensor], second: bool) -> Tensor:
    """Gate and up stand on top of each other on every rank."""
    return torch.cat([torch.unflatten(part, 0, (2, -1))[int(second)] for part in parts])


def _of_groups(parts: Sequence[Tensor], which: str, model: Model) -> Tensor:
    """Each group of heads has its queries, then its key, then its value."""
    queries = model.heads // model.key_value_heads
    rows = torch.unflatten(torch.cat(list(parts)), 0, (model.key_value_heads, queries + 2, model.head_size))
    chosen = {"query": slice(0, queries), "key": slice(queries, queries + 1), "value": slice(queries + 1, None)}
    return rows[:, chosen[which]].flatten(0, 2)
