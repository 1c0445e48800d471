"""A Hugging Face ``config.json`` as a `Model`, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.interop.families import ALIASES, FAMILIES, family_of
from shardwise.interop.keys import Config, Family, NotDescribed, unflatten
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.files import parse_json, read_text
from shardwise.spec.layers import LayerRecord, pattern_of_layers
from shardwise.spec.model import Model

_ROPE = {"rope_theta", "rope_scaling"}  # the newer `rope_parameters` takes precedence over them
_TOWERS = ("vision_config", "audio_config", "speech_config", "encoder_config", "projector_config")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")


def model_from_hf_config(config: Config | Path | str, name: str | None = None) -> Model:
    """The model a ``config.json`` describes; ``config`` is its content, its path, or the folder it lies in.

    A key that is absent takes the default of the `transformers` library. Of a config with a ``text_config``
    (vision-language models) the language model is read. OPT's two spare position rows, which a `Model`
    does not have, are not counted. Raises SpecError, naming the key, for
    a malformed config, an unknown family, or what a `Model` cannot express.
    """
    if isinstance(config, (str, Path)):
        path, config = Path(config), read_config(Path(config))
        name = name or name_in(config, path)
    if not isinstance(config, Mapping):
        raise SpecError("config", f"{shown(config)} should be a mapping of keys", "give the content of config.json")
    model_type = config.get("model_type")
    if _is_outer(config):
        try:
            return model_from_hf_config(config["text_config"], name or name_in(config))
        except SpecError as error:
            raise error.under("text_config") from None
    family = _family(model_type)
    return replace(_read(family, config), name=name or name_in(config) or family.model_type)


def _is_outer(config: Config) -> bool:
    """Whether the language model is inside: that of a vision-language model."""
    return isinstance(config.get("text_config"), Mapping)


def left_out(config: Any) -> list[str]:
    """What a config describes beside the language model that is read of it, as a note."""
    if not isinstance(config, Mapping):
        return []
    others = [name for name in _TOWERS if isinstance(config.get(name), Mapping)]
    if not _is_outer(config) and not others:
        return []
    place = " (text_config)" if _is_outer(config) else ""
    what = f" ({', '.join(others)})" if others else ""
    return [f"{shown(config.get('model_type'))}: only its language model{place} is read, nothing else{what}"]


def hf_config_from_model(model: Model) -> dict[str, Any]:
    """The ``config.json`` of the first family that can express this model, such that reading it gives it back.

    Raises SpecError when no family can.
    """
    for family in FAMILIES.values():
        try:
            config = _write(family, model)
            if _shape(_read(family, config)) == _shape(model):
                return config
        except SpecError:
            continue
    problem = f"no Hugging Face family has the shape of {shown(model.name)}"
    raise SpecError("model", problem, f"the families are {', '.join(FAMILIES)}")


def hf_config_like(config: Config, model: Model) -> dict[str, Any]:
    """``config`` with only those keys changed in which ``model`` differs from the model that it describes.

    If the family of ``config`` cannot express the model, the config of the first family that can; the ids of special
    tokens are kept in any case.
    """
    family = _family(config.get("model_type"))
    before = replace(_read(family, config), name=model.name)
    if _shape(before) == _shape(model):
        return dict(config)
    try:
        after = _write(family, model)
        if _shape(_read(family, after)) != _shape(model):
            raise SpecError("model", f"is not a {family.model_type}")
    except SpecError:
        return {**hf_config_from_model(model), **{name: config[name] for name in _SPECIAL_TOKENS if name in config}}
    written_before = _write(family, before)
    changed = {name: value for name, value in after.items() if written_before.get(name) != value}
    outdated = {name for key in family.keys.values() if key.name in changed for name in key.names}
    if _ROPE & changed.keys():
        changed |= {name: after[name] for name in _ROPE}
        outdated |= {"rope_parameters"}
    return {**{name: value for name, value in config.items() if name not in outdated}, **changed}


def read_config(path: Path) -> Any:
    """The content of a ``config.json``, or of the one in a folder; raises SpecError if it cannot be read."""
    if os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises for an invalid path)
        path = path / "config.json"
    return parse_json(read_text(path, "config"), f"config {path}")


def name_in(config: Any, path: Path | None = None) -> str:
    """The name of a model: what its config says, or that of the folder that the config at ``path`` lies in."""
    origin = config.get("_name_or_path") if isinstance(config, Mapping) else None
    said = origin.rstrip("/").rsplit("/", 1)[-1] if isinstance(origin, str) else ""
    folder = path if path is None or path.is_dir() else path.parent
    return said or (_name_of(folder.resolve()) if folder else "")


def _name_of(folder: Path) -> str:
    """That of a folder's model: the folder's own, unless it is a commit of a model in the hub's cache."""
    model = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    return model.rsplit("--", 1)[-1] if model.startswith("models--") else folder.name


def _family(model_type: Any) -> Family:
    family = family_of(model_type)
    if family is not None:
        return family
    known = sorted((*FAMILIES, *ALIASES))
    supported = "supported are " + ", ".join(known)
    if model_type is None:
        raise SpecError("model_type", "is missing", supported)
    if not isinstance(model_type, str):
        raise SpecError("model_type", f"{shown(model_type)} should be text", supported)
    near = nearest_name(model_type, known)
    raise NotDescribed("model_type", f"{shown(model_type)} is not supported", f"{near} {supported}".strip())


def _read(family: Family, config: Config) -> Model:
    values = {key.name: key.value_in(config) for key in family.keys.values()}
    filled = {**config, **values}
    for name, understood in family.requires.items():
        understood = understood(filled) if callable(understood) else understood
        if filled.get(name) not in (None, understood):
            problem = f"{shown(filled[name])} is not supported for {family.model_type}"
            raise NotDescribed(name, problem, f"only {shown(understood)} is")
    fields = {field: key.read(values[key.name], filled) for field, key in family.keys.items()}
    source = f"Hugging Face config.json, model_type {family.model_type}"
    try:
        model = Model.from_dict(unflatten({"source": source, **family.fixed, **fields}))
        layers = model.every_layer[: model.layers]
        listed = tuple(family.layers(filled, layers))
        return model if listed == layers else _with_layers(model, listed)
    except SpecError as error:
        at = family.keys[error.field].name if error.field in family.keys else error.field
        raise SpecError(at, error.problem, error.remedy) from None


def _with_layers(model: Model, layers: tuple[LayerRecord, ...]) -> Model:
    """The model with other layers, said by the short fields where they can."""
    mixers = {layer.mixer for layer in layers}
    window = model.sliding_window if "window" in mixers else None
    chunk = model.attention_chunk if "chunk" in mixers else None
    delta = model.delta if "delta" in mixers else None
    unwindowed = next((number for number, layer in enumerate(layers, 1) if layer.mixer == "full"), 1)
    for every in (model.sliding_window_every, unwindowed):
        short = replace(
            model, pattern=(), sliding_window=window, sliding_window_every=every, attention_chunk=chunk, delta=delta
        )
        if short.every_layer[: model.layers] == layers:
            return short
    return replace(
        model, pattern=pattern_of_layers(layers), sliding_window=window, sliding_window_every=1,
        attention_chunk=chunk, delta=delta, moe=model.moe and replace(model.moe, dense_layers=0, every=1),
    )  # fmt: skip


def _write(family: Family, model: Model) -> dict[str, Any]:
    config = {"model_type": family.model_type, "_name_or_path": model.name, **family.also(model)}
    config["pad_token_id"] = None  # unknown, and the library's default may lie beyond the vocabulary
    for field, key in family.keys.items():
        noun, _, inner = field.rpartition(".")
        owner = getattr(model, noun) if noun else model
        if owner is None:
            raise SpecError(noun, f"is needed for {family.model_type}")
        config[key.name] = key.write(getattr(owner, inner), model)
    return config


def _shape(model: Model) -> tuple[Model, tuple[LayerRecord, ...]]:
    """The model without the fields that only describe it; layers apart, which several fields may say."""
    moe = model.moe and replace(model.moe, dense_layers=0, every=1)
    bare = replace(
        model, name="", source="", published_parameters=None, pattern=(), sliding_window_every=1, moe=moe
    )  # fmt: skip
    return bare, model.every_layer
