"""Writes what is made from the table of a job's fields: the tables of docs/job-file.md and the API's `JobKeywords`.

`--check` only says whether both are what the table gives today.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from shardwise import api
from shardwise.spec.bare_model import BareModel
from shardwise.spec.codec import Spec
from shardwise.spec.fields import FieldRecord, fields_of, job_fields, keyword_paths, parts, walk
from shardwise.spec.hardware import Cluster, Device, NodeHost
from shardwise.spec.model import Model
from shardwise.spec.network import Link, NetworkLevel
from shardwise.spec.run import Run
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training
from shardwise.spec.units import render

ROOT = Path(__file__).resolve().parent.parent
PAGE, GIVEN = ROOT / "docs" / "job-file.md", ROOT / "src" / "shardwise" / "api" / "given.py"
# Nouns that have a table: those whose fields flags and keywords may set, and those of presets and files.
PARTS: dict[str, type[Spec]] = {"strategy": Strategy, "training": Training, "run": Run}
NOUNS = {
    noun.__name__: noun for noun in (*PARTS.values(), Model, BareModel, Cluster, NodeHost, NetworkLevel, Device, Link)
}
_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_KEYWORDS = re.compile(r"(?<=    # Made by docs/make_fields.py:\n).*?(?=\n\n)", re.DOTALL)


def page(text: str) -> str:
    """The page with its tables made anew; what stands between them is written by hand."""
    return _TABLE.sub(lambda match: match[1] + "\n".join(["", *table(NOUNS[match[2]]), "", ""]), text)


def table(noun: type[Spec]) -> Iterator[str]:
    """A row for each field of a noun, and of the nouns inside it that are not shared."""
    part = next((part for part, cls in PARTS.items() if cls is noun), "")
    rows = walk(noun, part) if part or noun is Model else fields_of(noun)
    head = ("field", "flag", "default", "meaning") if part else ("field", "default", "meaning")
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for record in rows:
        name = record.path.removeprefix(f"{part}.")
        flag = [f"`{record.flag}`" if record.flag else ""] if part else []
        yield f"| {' | '.join([f'`{name}`', *flag, _default(record), _meaning(record)])} |"


def _default(record: FieldRecord) -> str:
    value = record.default
    if record.required:
        return "required"
    if value is None or value == "" or isinstance(value, (Spec, Mapping)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if "dimension" in record.metadata:
        return str(render(value, record.metadata["dimension"]))
    return f"`{value}`" if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _meaning(record: FieldRecord) -> str:
    choices = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in record.choices]
    if record.is_preset or all(re.search(rf"\b{re.escape(choice)}\b", record.documentation) for choice in choices):
        return record.documentation
    some = "Some" if record.is_list else "One"
    return f"{record.documentation} {some} of {', '.join(f'`{choice}`' for choice in choices)}."


def module(text: str) -> str:
    """`api/given.py` with the keywords of `JobKeywords` made anew."""
    lines = "\n".join(f"    {name}: {type_name}" for name, type_name in keywords())
    return _KEYWORDS.sub(lambda _: lines, text)


def keywords() -> Iterator[tuple[str, str]]:
    """The keywords that describe a job, with their types; not those that a verb takes for something else."""
    yield from ((part, "Mapping[str, Any]") for part in parts())
    taken = {name for verb in api.VERBS for name in _own_parameters(getattr(api, verb))}
    for name, path in keyword_paths().items():
        if name not in taken:
            yield name, " | ".join(_type_names(job_fields()[path]))


def _own_parameters(verb: Any) -> list[str]:
    """The parameters of a verb that also takes the keywords of a job."""
    parameters = inspect.signature(verb).parameters.values()
    takes_job = any(str(parameter.annotation).startswith("Unpack") for parameter in parameters)
    return [parameter.name for parameter in parameters] if takes_job else []


def _type_names(record: FieldRecord) -> list[str]:
    """What may be given for a field, as plain data: a number also as text, with a unit or as a plan's bounds."""
    names = {name for hint in record.types for name in _names(hint, preset=record.is_preset)}
    names |= {"str"} if "resolve" in record.metadata or names & {"int", "float"} else set()
    return sorted(names, key=lambda name: (name == "str", name))


def _names(hint: Any, *, preset: bool = False) -> set[str]:
    if get_origin(hint) is Literal:
        return {type(choice).__name__ for choice in get_args(hint)}
    if get_origin(hint) is tuple:
        return {f"Sequence[{', '.join(_names(get_args(hint)[0]))}]", "str"}
    if issubclass(hint, Spec):
        return {"Mapping[str, Any]", *((hint.__name__,) if preset else ())}
    return {hint.__name__}


def main() -> int:
    made = {PAGE: page(PAGE.read_text(encoding="utf-8")), GIVEN: module(GIVEN.read_text(encoding="utf-8"))}
    stale = [path for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what the table of fields gives")
        if "--check" not in sys.argv:
            path.write_text(made[path], encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
