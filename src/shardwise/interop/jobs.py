"""Our own job files, and models by the names that people give: presets, hub ids, files and Hugging Face folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.interop.hub_cache import cached_model, not_there
from shardwise.spec import presets
from shardwise.spec.bare_model import BareModel, model_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import parse_yaml, read_yaml
from shardwise.spec.hub import is_hub_id
from shardwise.spec.job import Job
from shardwise.spec.model import Model


def read_job(path: Path | str) -> Job:
    """The job in a job file; files it names are looked for beside it. Raises SpecError for any mistake in it."""
    data = read_job_fields(path)
    if data.get("model") is not None:
        data["model"] = model_from(data["model"])
    return Job.from_dict(data)


def read_job_fields(path: Path | str) -> dict[str, Any]:
    """The fields of a job file, before they are checked together: flags may still override them."""
    data: dict[str, Any] = presets.files_beside(_with_fields(read_yaml(path, "job file"), path), Path(path).parent)
    return data


def job_fields_in(text: str, name: str) -> dict[str, Any]:
    """The same of the text of a job file; of the files that it names none is looked for."""
    return dict(_with_fields(parse_yaml(text, f"job file {name}"), name))


def _with_fields(data: Any, path: Path | str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise SpecError("job file", f"{path} has no fields", "it needs model, cluster, strategy and training")
    return data


def model_from(named: Any) -> Model:
    """A model by preset name or Hugging Face id, mapping, our own file, or a Hugging Face config.json (or its folder).

    A folder with the name of a preset is written with a slash: ``./tiny``.
    """
    from shardwise.interop.huggingface import model_from_hf_config

    return _model_from(named, model_from_hf_config)


def priced_model_from(named: Any) -> Model:
    """As `model_from`, to be priced only: a model that no table describes is counted from its code."""

    def of_config(path: Path) -> Model:
        from shardwise.interop.counted import described_or_counted

        return described_or_counted(path)

    return _model_from(named, of_config)


def _model_from(named: Any, of_config: Callable[[Path], Model]) -> Model:
    try:
        named = located(named)
        if isinstance(named, str) and is_folder(named) and not (Path(named) / "config.json").is_file():
            problem = f"{shown(named)} is a folder without a config.json"
            raise SpecError("", problem, "name a Hugging Face folder, a preset or a file")
        if _is_config(named):
            return of_config(Path(named))
        return model_of(named)
    except SpecError as error:
        raise error.under("model") from None


def located(named: Any) -> Any:
    """What a model is named by, with a folder of the Hugging Face cache for an id that is no preset's.

    Raises SpecError for an id that is nowhere.
    """
    if not isinstance(named, str) or not is_hub_id(named) or os.path.exists(named):  # noqa: PTH110 (raises if invalid)
        return named
    if presets.preset_name("model", named) is not None:
        return named
    folder = cached_model(named)
    if folder is None:
        raise not_there(named)
    return str(folder)


def model_notes(named: Any) -> list[str]:
    """What a model that was read stands for: a name, a few numbers, or a part of a Hugging Face config.json."""
    if isinstance(named, Mapping) and "params" in named:
        return BareModel.from_dict(named).notes
    if not isinstance(named, str):
        return []
    found = located(named)
    if _is_config(found):
        from shardwise.interop.huggingface import left_out, read_config

        where = [] if found == named else [f"{named}: config.json of the Hugging Face cache, {found}"]
        return [*where, *left_out(read_config(Path(found)))]
    preset = presets.preset_name("model", named)
    is_other = preset not in (None, named.strip().lower()) and not os.path.exists(named)  # noqa: PTH110
    if preset is None or not is_other:
        return []
    return [
        f"{named}: preset {preset}" + (", its language model alone" if presets.is_language_model(named, preset) else "")
    ]


def _is_config(named: Any) -> bool:
    if not isinstance(named, str):
        return False
    return is_folder(named) or (presets.looks_like_file(named) and named.lower().endswith(".json"))


def is_folder(named: str) -> bool:
    """Whether a model's name is that of an existing folder, and not of a preset."""
    preset = not presets.looks_like_file(named) and presets.is_preset("model", named.lower())
    return not preset and os.path.isdir(named)  # noqa: PTH112 (Path.is_dir raises for an invalid path)
