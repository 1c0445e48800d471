"""The flags that describe a job, shared by the verbs."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardwise.api.campaign import EXAMPLES
from shardwise.api.given import NAMED, JobArguments
from shardwise.spec.bare import BareNumbers
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.fields import FieldRecord, job_fields


class _FieldAction(argparse.Action):
    """A flag that sets a field of the job. Its help is read from the source of the field only when it is printed."""

    def __init__(self, option_strings: Sequence[str], dest: str, record: FieldRecord) -> None:
        kind: dict[str, Any] = {"nargs": 0, "const": not record.default} if record.is_switch else {"metavar": "X"}
        super().__init__(option_strings, dest, **kind)
        self._record = record

    def __call__(self, parser: object, given: argparse.Namespace, values: object, option: str | None = None) -> None:
        setattr(given, self.dest, self.const if self._record.is_switch else values)

    @property
    def help(self) -> str:
        record = self._record
        text = record.help if record.flag in self.option_strings else f"the same as {record.flag}"
        return text.replace("%", "%%")

    @help.setter
    def help(self, text: object) -> None:
        """The base class has none to set."""


def add_job_arguments(parser: argparse.ArgumentParser, first: str = "job file (YAML); flags override it") -> None:
    """A job file (``first`` is its help), and flags that override it."""
    parser.add_argument("job", nargs="?", help=first)
    what = parser.add_argument_group("the job")
    strategy = parser.add_argument_group("strategy and training")
    bare = parser.add_argument_group("bare numbers in place of presets")
    groups = {"model": what, "cluster": what, "gpus": what, "gpus_per_node": what}
    for path, record in job_fields().items():
        group = groups.get(path) or (bare if record.owner is BareNumbers else strategy)
        for flag in record.flags:
            group.add_argument(flag, dest=path, action=_FieldAction, record=record)
    strategy.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field of the job, such as strategy.overlap.tp=true",
    )


def field_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of the job set by flags, as path → value."""
    from shardwise.spec.files import parse_yaml

    paths = (path for path, record in job_fields().items() if record.flag and path not in NAMED)
    overrides = {path: value for path in paths if (value := getattr(arguments, path)) is not None}
    for path, value in overrides.items():
        if job_fields()[path].is_list and "," in value:
            overrides[path] = [item.strip() for item in value.split(",")]
    for setting in arguments.set:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise SpecError("--set", f"{shown(setting)} is not FIELD=VALUE", "write it like strategy.overlap.tp=true")
        overrides[path.strip()] = parse_yaml(text, f"--set {path.strip()}")
    return overrides


def job_arguments(arguments: argparse.Namespace) -> JobArguments:
    """The job that the flags describe."""
    return replace(bare_numbers(arguments), overrides=field_overrides(arguments))


def bare_numbers(arguments: argparse.Namespace) -> JobArguments:
    """The job without fields of strategy and training."""
    return JobArguments(**{name: value for name, value in vars(arguments).items() if name in ("job", *NAMED)})


def add_campaign_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for days, money and failures."""
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
