"""The flags that describe a job, shared by the verbs; the `Job` made of them, and checks before a verb starts."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.api.campaign import EXAMPLES
from shardwise.api.given import JobArguments, arguments_of
from shardwise.api.inputs import decided_job
from shardwise.api.quantities import exclusive
from shardwise.cli.parser import PRICE_BARE_NUMBERS, Parser
from shardwise.spec.bare import BareNumbers
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.fields import FieldRecord, job_fields
from shardwise.spec.installation import require_packages, torch_notes
from shardwise.spec.job import Job

if TYPE_CHECKING:
    from shardwise.run.storage.place import Place

_NOT_PRICED = (
    f"bare numbers are priced, not run: they are for {', '.join(PRICE_BARE_NUMBERS[:-1])} and {PRICE_BARE_NUMBERS[-1]}",
    "give --model and --cluster: a preset, or a file of your own numbers",
)


class FieldAction(argparse.Action):
    """A flag that sets a field of the job. Its help is read from the source of the field only when it is printed."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, record: FieldRecord, more: str = "", default: Any = None
    ) -> None:
        kind: dict[str, Any] = {"nargs": 0, "const": not record.default} if record.is_switch else {"metavar": "X"}
        super().__init__(option_strings, dest, default=default, **kind)
        self.record, self._more = record, more

    def __call__(self, parser: object, given: argparse.Namespace, values: object, option: str | None = None) -> None:
        setattr(given, self.dest, self.const if self.record.is_switch else values)

    @property
    def help(self) -> str:
        return f"{self.record.help}{self._more}".replace("%", "%%")

    @help.setter
    def help(self, text: object) -> None:
        """The base class has none to set."""


def add_field_argument(parser: argparse.ArgumentParser, flag: str, more: str = "", default: str | None = None) -> None:
    """A flag of the job in a verb that has none; ``more`` follows its help there."""
    record = next(record for record in job_fields().values() if record.flag == flag)
    usual = "" if default is None else f" (default {default})"
    parser.add_argument(flag, action=FieldAction, record=record, more=f"{more}{usual}", default=default)


def add_job_arguments(parser: Parser, first: str = "job file (YAML); flags override it") -> None:
    """A job file (``first`` is its help), and flags that override it."""
    parser.add_argument("job", nargs="?", help=first)
    what = parser.add_argument_group("the job")
    strategy = parser.add_argument_group("strategy and training")
    bare = parser.add_argument_group("bare numbers in place of presets")
    groups = {"model": what, "cluster": what, "gpus": what, "gpus_per_node": what}
    for path, record in job_fields().items():
        group = groups.get(path) or (bare if record.owner is BareNumbers else strategy)
        if group is bare and not parser.prices_bare_numbers:
            parser.refused[record.flag] = _NOT_PRICED
        elif record.flag:
            group.add_argument(record.flag, dest=path, action=FieldAction, record=record)
    strategy.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field of the job, such as strategy.overlap.tp=true",
    )


def job_arguments(parsed: argparse.Namespace) -> JobArguments:
    values: dict[str, Any] = {}
    for path, record in job_fields().items():
        if record.flag and (value := getattr(parsed, path, None)) is not None:
            values[path] = _listed(value) if record.is_list else value
    for path, value in _set_fields(parsed.set):
        if path in ("model", "cluster") and path in values:
            raise exclusive(f"⟨{path}⟩", values[path], f"⟨set={path}⟩")
        values[path] = value
    return arguments_of(values, parsed.job)


def _listed(text: str) -> str | list[str]:
    """A list of what commas separate; a single word may have a meaning of its own."""
    return [item.strip() for item in text.split(",")] if "," in text else text


def _set_fields(settings: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Path and value of each `--set`."""
    from shardwise.spec.files import parse_yaml

    for setting in settings:
        path, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not path:
            raise SpecError("--set", f"{shown(setting)} is not FIELD=VALUE", "write it like strategy.overlap.tp=true")
        yield path, parse_yaml(text, f"--set {path}")


def add_campaign_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the whole run")
    for name, (example, help_text) in EXAMPLES.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=example, help=help_text)


def keywords(verb: Callable[..., Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags that are keywords of a function of the API; those that were not given keep its defaults."""
    taken = (
        parameter.name
        for parameter in inspect.signature(verb).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    )
    return {name: value for name in taken if (value := getattr(arguments, name, None)) is not None}


# -- from flags to a `Job`; notes on assumptions go to standard error --------------------------------


MOST_PORT = 65535


def job_from(parsed: argparse.Namespace, *, runs_here: bool = False) -> Job:
    """The job that a file and flags describe, with what it leaves open chosen."""
    job, notes = decided_job(job_arguments(parsed), runs_here=runs_here)
    print_notes(notes)
    return job


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def path_from(text: str) -> Path:
    """A path that need not exist; raises SpecError for text that cannot be one."""
    place = place_from(text)
    if isinstance(place, Path):
        return place
    raise SpecError("", f"{shown(text)} is not a path of this machine", "copy it here, or `checkpoint reshard` it")


def place_from(text: str) -> Place:
    """A path, or the URI of a place in a store; it need not exist."""
    from shardwise.run.storage.place import place_of  # most verbs are given no place

    place = place_of(text)
    try:
        if isinstance(place, Path):
            place.exists()
    except (OSError, ValueError) as error:
        raise SpecError("", f"{shown(text)} is not a path ({getattr(error, 'strerror', error)})", "check it") from None
    return place


def port_number(text: str, flag: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > MOST_PORT:
        raise SpecError(flag, f"{shown(text)} is not a port", "use 0 (any that is free) to 65535")
    return int(text)


def require_torch(verb: str, *also: str) -> None:
    """Raises SpecError unless PyTorch and the packages of ``also`` are installed; notes an untested PyTorch."""
    require_packages(verb, "torch", *also)
    print_notes(torch_notes())
