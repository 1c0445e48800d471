"""The job that a request describes: keywords of the Python API as JSON. No file of this machine is read for it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from shardwise.api.given import JobArguments, job_arguments
from shardwise.api.inputs import job_from
from shardwise.interop.huggingface import left_out, model_from_hf_config
from shardwise.interop.recognise import is_hf_config
from shardwise.planner.automatic import decided
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, join_path, nearest_name, shown
from shardwise.spec.fields import flag_of, keyword_paths
from shardwise.spec.files import parse_json
from shardwise.spec.job import Job

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
            keywords["model"] = model_from_hf_config(model)
        except SpecError as error:
            raise error.under("model") from None
    return job_arguments(None, keywords)


def job_of(given: Mapping[str, Any]) -> tuple[Job, list[str]]:
    """The job, and notes on what was assumed."""
    job, notes = job_from(arguments_from(given))
    return decided(job), [*notes, *left_out(given.get("model"))]


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
    if kind is None or presets.looks_like_file(value):
        raise SpecError(path, f"{shown(value)} is a file, and this page reads none", _PASTE)
    known = presets.every_name(kind)
    for name in value.split("+") if kind == "cluster" else [value]:
        sized = _SIZED.fullmatch(name.strip())
        plain = sized[1] if sized and kind == "cluster" else name.strip()
        if plain.lower() not in known:
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
