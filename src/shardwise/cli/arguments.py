"""The flags that describe a job, shared by the verbs."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardwise.api.campaign import EXAMPLES
from shardwise.api.given import NAMED, JobArguments
from shardwise.cli.parser import PRICE_BARE_NUMBERS, Parser
from shardwise.spec.bare import BareNumbers
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.fields import FieldRecord, job_fields

_NOT_PRICED = (
    f"bare numbers are priced, not run: they are for {', '.join(PRICE_BARE_NUMBERS[:-1])} and {PRICE_BARE_NUMBERS[-1]}",
    "give --model and --cluster: a preset, or a file of your own numbers",
)


class _FieldAction(argparse.Action):
    """A flag that sets a field of the job. Its help is read from the source of the field only when it is printed."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, record: FieldRecord, more: str = "", default: Any = None
    ) -> None:
        kind: dict[str, Any] = {"nargs": 0, "const": not record.default} if record.is_switch else {"metavar": "X"}
        super().__init__(option_strings, dest, default=default, **kind)
        self._record, self._more = record, more

    def __call__(self, parser: object, given: argparse.Namespace, values: object, option: str | None = None) -> None:
        setattr(given, self.dest, self.const if self._record.is_switch else values)

    @property
    def help(self) -> str:
        return f"{self._record.help}{self._more}".replace("%", "%%")

    @help.setter
    def help(self, text: object) -> None:
        """The base class has none to set."""


def add_field_argument(parser: argparse.ArgumentParser, flag: str, more: str = "", default: str | None = None) -> None:
    """A flag of the job in a verb that has none; ``more`` follows its help there."""
    record = next(record for record in job_fields().values() if record.flag == flag)
    usual = "" if default is None else f" (default {default})"
    parser.add_argument(flag, action=_FieldAction, record=record, more=f"{more}{usual}", default=default)


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
            group.add_argument(record.flag, dest=path, action=_FieldAction, record=record)
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
