"""A job from the text of a file: ours, a Hugging Face config.json, another framework's configuration.

It is read by the code of the command line, with two differences: no file that it names is opened, and what it leaves
open (the cluster, often the model) is taken from the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from shardwise.api.inputs import job_from
from shardwise.interop.frameworks import TARGETS, Configuration
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.interop.jobs import job_fields_in, kind_of
from shardwise.interop.recognise import CONFIG, JOB
from shardwise.planner.automatic import decided
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import parse_json, require_whole_characters
from shardwise.spec.job import Job
from shardwise.spec.run import Run
from shardwise.ui.given import arguments_from, check_references, keywords_of

_TITLES = {JOB: "job file", CONFIG: "Hugging Face config.json"}
_PLACE = ("cluster", "gpus", "gpus_per_node")
_OPEN = ("model", "cluster")  # what a file may leave open
_GIVEN = ("text", "name", "job")

Keywords = dict[str, Any]


def imported(given: Mapping[str, Any]) -> Keywords:
    """The kind of a file, given as ``text`` and ``name``, and its job, completed by ``job``, the one on the page.

    The answer has ``notes``, as the command prints them, and ``of_page``: what was taken from the page. Raises the
    SpecError that the command prints for the file.
    """
    text, name, beside = _checked(given)
    kind = kind_of(text, name)
    read = {JOB: _of_job, CONFIG: _of_config}.get(kind)
    made = _of_framework(Configuration(name, kind, text), beside) if read is None else read(text, name, beside)
    words = _TITLES[kind] if kind in _TITLES else f"{TARGETS[kind].title} configuration"
    answer = {"name": name, "kind": kind, "words": words, **vars(made)}
    try:
        require_whole_characters(answer)
    except ValueError as error:
        raise SpecError(name, str(error), "correct it") from None
    return answer


@dataclass(frozen=True)
class _Made:
    job: Keywords
    notes: Sequence[str] = ()
    of_page: Sequence[str] = ()


def _checked(given: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    for unknown in given.keys() - set(_GIVEN):
        raise SpecError(unknown, "is not a field of this request", f"send {', '.join(_GIVEN)}")
    text, name, beside = given.get("text"), given.get("name") or "pasted", given.get("job") or {}
    if not isinstance(text, str) or not text.strip():
        raise SpecError("text", f"{shown(text)} is not the content of a file", "send its text")
    if not isinstance(name, str) or len(name) > 255 or not name.isprintable():
        raise SpecError("name", f"{shown(name)} is not the name of a file", "send it without its folders")
    if not isinstance(beside, Mapping):
        raise SpecError("job", f"{shown(beside)} is not a job", "send the keywords of the one on the page")
    return text, PurePosixPath(name.replace("\\", "/")).name or "pasted", beside


def _of_config(text: str, name: str, beside: Mapping[str, Any]) -> _Made:
    """The page's job with the file's model; the controls show whether they suit each other."""
    config = parse_json(text, name, finite=True)
    try:
        model_from_hf_config(config)
    except SpecError as error:
        raise error.under(name) from None
    return _Made({**beside, "model": config})


def _of_job(text: str, name: str, beside: Mapping[str, Any]) -> _Made:
    fields = job_fields_in(text, name)
    check_references(fields)
    place = {} if fields.get("cluster") is not None else _named(beside, *_PLACE)
    model = {} if fields.get("model") is not None else _named(beside, "model")
    job, notes = job_from(replace(arguments_from({**place, **model}), fields=fields))
    job = decided(job)
    if job.run != Run(memory_risk=job.run.memory_risk):
        notes.append("run is not used: this page runs nothing")
    return _Made({**keywords_of(job), **_placed(job, place), **model}, notes, list(_named({**place, **model}, *_OPEN)))


def _of_framework(configuration: Configuration, beside: Mapping[str, Any]) -> _Made:
    alone = configuration.read()
    check_references(alone.nested())
    place = _named(beside, *_PLACE)
    model = {} if "model" in alone.nested() else _named(beside, "model")
    if alone.devices is not None and place:
        place["gpus"] = alone.devices
    job, notes = job_from(replace(arguments_from({**place, **model}), configuration=configuration))
    if model and alone.no_model:
        notes.insert(0, f"model: {alone.no_model}; that of the page is taken")
    return _Made({**keywords_of(job), **_placed(job, place), **model}, notes, list(_named({**place, **model}, *_OPEN)))


def _named(beside: Mapping[str, Any], *names: str) -> Keywords:
    return {name: beside[name] for name in names if beside.get(name) is not None}


def _placed(job: Job, place: Keywords) -> Keywords:
    """The cluster as a preset, with the devices used of a node, if it is one: the page's controls need a preset."""
    named = keywords_of(job)["cluster"]
    if isinstance(named, str) or not isinstance(place.get("cluster"), str):
        return {"cluster": named}
    preset = place["cluster"].partition(":")[0]
    same = cluster_from(preset).with_devices(job.cluster.devices) == job.cluster
    return {"cluster": preset, "gpus": job.cluster.devices} if same else {"cluster": named}
