"""The job that a request describes: keywords of the Python API as JSON.

No file of this machine is read for it but the config.json of a model in the Hugging Face cache, named by its id.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, urlencode

from shardwise.api.given import JobArguments, job_arguments
from shardwise.api.inputs import decided_job, job_from
from shardwise.interop.counted import described_or_counted
from shardwise.interop.frameworks import READERS, Configuration
from shardwise.interop.hub_cache import download
from shardwise.interop.huggingface import left_out
from shardwise.interop.jobs import job_fields_in, located
from shardwise.interop.kinds import configuration_in, require_job
from shardwise.interop.recognise import CONFIG, JOB, is_hf_config
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError, join_path, nearest_name, shown
from shardwise.spec.fields import flag_of, keyword_paths
from shardwise.spec.files import parse_json, require_whole_characters
from shardwise.spec.hub import is_hub_id
from shardwise.spec.job import Job
from shardwise.spec.run import Run

MOST_BYTES = 2**20  # of a request; a config.json has a few thousand
_PASTE = "name a preset, or paste the content of the file"
_SIZED = re.compile(r"([^:]+)(:[0-9x]+)?")


def document(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a request; raises SpecError for anything else."""
    data = parse_json(body, "request", finite=True)
    if not isinstance(data, Mapping):
        raise SpecError("request", f"{shown(data)} is not an object", 'send one such as {"model": "llama3-8b"}')
    return data


def arguments_from(given: Mapping[str, Any]) -> JobArguments:
    """The job as given: ``model``, ``cluster`` and ``stack`` by preset or spelled out, and fields by their name."""
    if "run" in given:
        raise SpecError("run", "is how a job runs, and this page runs none", "leave it out; memory_risk is a keyword")
    check_references(given)
    keywords = dict(given)
    if is_hf_config(model := given.get("model")):
        try:
            keywords["model"] = described_or_counted(model)
        except SpecError as error:
            raise error.under("model") from None
    return job_arguments(None, keywords)


def job_of(given: Mapping[str, Any]) -> tuple[Job, list[str]]:
    job, notes = decided_job(arguments_from(given))
    return job, [*notes, *left_out(given.get("model"))]


def check_references(value: Any, path: str = "") -> None:
    """Raises SpecError if a model, a cluster or a stack at any depth names a file, or an unknown preset."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            where = join_path(path, str(name))
            if name in presets.REFERENCES:
                _check_reference(inner, presets.REFERENCES[name], where)
            elif name == "kinds":
                for kind in inner if isinstance(inner, list) else [inner]:
                    _check_reference(kind, "cluster", where)
            check_references(inner, where)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            check_references(inner, f"{path}[{number}]")


def _check_reference(value: Any, kind: str | None, path: str) -> None:
    if not isinstance(value, str):
        return
    if kind == "model" and is_hub_id(value) and not os.path.exists(value):  # noqa: PTH110
        try:
            located(value)
        except SpecError as error:
            raise SpecError(path, error.problem, f"run {download(value)}, or paste its content") from None
        return
    if kind is None or presets.looks_like_file(value):
        raise SpecError(path, f"{shown(value)} is a file, and this page reads none", _PASTE)
    known = presets.every_name(kind)
    for name in value.split("+") if kind == "cluster" else [value]:
        sized = _SIZED.fullmatch(name.strip())
        plain = sized[1] if sized and kind == "cluster" else name.strip()
        if plain.lower() not in known and presets.preset_name(kind, plain) is None:
            remedy = nearest_name(plain, known) or f"`shardwise list {kind}s` shows all"
            raise SpecError(path, f"unknown {kind} {shown(plain)}", remedy)


def error_data(error: SpecError) -> dict[str, Any]:
    """An error in words that name keywords, with the field beside which the page shows it."""
    told = error.worded()
    return {"error": {**vars(told), "text": str(told)}}


# -- the same job as keywords, as a link and as a command --------------------------------------------------------

CONFIG_FILE, JOB_FILE = "config.json", "job.yaml"


def keywords_of(job: Job) -> dict[str, Any]:
    """The keywords that describe a job; fields with their default are left out, except the sequence, which people type.

    Fields of the run are left out too, except those that change the price.
    """
    data = job.to_dict()
    parts = {name: data.get(name, {}) for name in ("strategy", "training", "run")}
    named = {name: data[name] for name in ("model", "cluster", "stack") if name in data}
    priced = {name: value for name, value in parts["run"].items() if name == "memory_risk"}
    return {**named, **parts["strategy"], "seq": job.training.seq, **parts["training"], **priced}


def fragment(keywords: Mapping[str, Any]) -> str:
    """The keywords as the part of an address after #, which browsers do not send."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in keywords.items()}
    return urlencode(texts, quote_via=quote, safe=":,")


def command(given: Mapping[str, Any], verb: str = "analyze") -> str:
    """The command that prices the same job; it names the file of a pasted config.json, or a job file if the model or
    the cluster is spelled out otherwise."""
    model, cluster = given.get("model"), _kinds_named(given.get("cluster"))
    if isinstance(cluster, Mapping) or (isinstance(model, Mapping) and not is_hf_config(model)):
        return f"shardwise {verb} {JOB_FILE}"
    words = ["shardwise", verb]
    for name, value in {**given, **({"cluster": cluster} if cluster else {})}.items():
        if value is None:
            continue
        if name == "model" and isinstance(value, Mapping):
            value = CONFIG_FILE
        flag = flag_of(keyword_paths().get(name, ""))
        if flag and not isinstance(value, (Mapping, bool)):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [flag, shlex.quote(text)]
            continue
        for path, override in job_arguments(None, {name: value}).overrides.items():
            words += ["--set", shlex.quote(f"{path}={json.dumps(override)}")]
    return " ".join(words)


def _kinds_named(cluster: Any) -> Any:
    """Several kinds of nodes as a flag names them, if all are presets; else the cluster as given."""
    if (
        isinstance(cluster, Mapping)
        and cluster.keys() == {"kinds"}
        and all(isinstance(kind, str) for kind in cluster["kinds"])
    ):
        return "+".join(cluster["kinds"])
    return cluster


# -- a job from the text of a file: ours, a Hugging Face config.json, another framework's ------------
# It is read by the code of the command line, with two differences: no file that it names is opened, and what it leaves
# open (the cluster, often the model) is taken from the page.

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
    found = configuration_in(text, name)
    kind = found if isinstance(found, str) else found.framework
    made = (
        {JOB: _of_job, CONFIG: _of_config}[found](text, name, beside)
        if isinstance(found, str)
        else _of_framework(found, beside)
    )
    words = _TITLES[kind] if kind in _TITLES else f"{READERS[kind].title} configuration"
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
        described_or_counted(config)
    except SpecError as error:
        raise error.under(name) from None
    return _Made({**beside, "model": config})


def _of_job(text: str, name: str, beside: Mapping[str, Any]) -> _Made:
    fields = job_fields_in(text, name)
    require_job(fields, name or "the file")
    check_references(fields)
    place = {} if fields.get("cluster") is not None else _named(beside, *_PLACE)
    model = {} if fields.get("model") is not None else _named(beside, "model")
    job, notes = decided_job(replace(arguments_from({**place, **model}), source=fields))
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
    job, notes = job_from(replace(arguments_from({**place, **model}), source=configuration))
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
