"""The argument parser of every verb: old words, one-line errors with the nearest flag, and the order of the help."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from typing import Any, NoReturn

from shardwise.api.quantities import renamed
from shardwise.spec.errors import SpecError, nearest_name, shown

FIRST = "used most"
# The groups of flags in the order of the help. A verb has some of them; every verb has the same names for them.
GROUPS = (
    "options",
    "the run",
    "the job",
    "strategy and training",
    "bare numbers in place of presets",
    "the search",
    "questions",
    "the whole run",
    "where it runs",
    "output",
)
# Verbs that price bare numbers; the others run a job, or write it for something that does.
PRICE_BARE_NUMBERS = ("plan", "analyze", "explain", "report", "ui")


DESCRIBE = "--describe-flags"  # in place of arguments: asks a verb for its parser


class Described(Exception):
    def __init__(self, parser: Parser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """An argument parser that raises SpecError and suggests the nearest flag; ``first`` are the flags used most."""

    def __init__(self, verb: str, description: str, example: str, first: str = "") -> None:
        super().__init__(
            prog=f"shardwise {verb}",
            description="\n".join(textwrap.fill(line, 120) for line in description.splitlines()),
            epilog="example:\n" + "\n".join(f"  {line}" for line in example.strip().splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.verb, self.first = verb, first.split()
        self.refused: dict[str, tuple[str, str]] = {}
        """Flags of other verbs that have no sense here: what is wrong with them, and what to do instead."""
        # "-5GB/s" after a flag is its value, whose own check then rejects it; no flag of ours looks like that.
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)

    def add_argument_group(self, title: str = "", *arguments: Any, **options: Any) -> argparse._ArgumentGroup:  # type: ignore[override]
        """The group of that title, which several callers may add flags to."""
        known = (group for group in self._action_groups if group.title == title)
        return next(known, None) or super().add_argument_group(title, *arguments, **options)

    @property
    def actions(self) -> list[argparse.Action]:
        return self._actions

    @property
    def prices_bare_numbers(self) -> bool:
        return self.verb.split()[0] in PRICE_BARE_NUMBERS

    def error(self, message: str) -> NoReturn:
        raise SpecError("", message, f"see `{self.prog} --help`")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """The parsed flags; an unknown one is named with its nearest neighbour."""
        if DESCRIBE in arguments:
            raise Described(self)
        today = self._in_words_of_today(arguments)
        for argument in today:
            flag, _, value = argument.partition("=")
            if value == "--" and flag.startswith("--"):  # argparse would make an empty list of it
                raise SpecError(flag, "'--' is not a value", f"see `{self.prog} --help`")
        known, unknown = self.parse_known_args(today)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            flag = unknown[0].split("=")[0]
            if flag in self.refused:
                raise SpecError(flag, *self.refused[flag])
            remedy = nearest_name(flag, flags) if flag.startswith("-") else ""
            raise SpecError("", f"unknown argument {shown(unknown[0])}", remedy or f"see `{self.prog} --help`")
        return known

    def _in_words_of_today(self, arguments: list[str]) -> list[str]:
        """The arguments without old words; standard error says what replaces them."""
        today = list(arguments)
        for number, (argument, hint) in enumerate(flags_now(self.verb, arguments)):
            if hint is not None and argument.partition("=")[0] in self._option_string_actions:
                print(f"note: {hint}", file=sys.stderr)
                today[number] = argument
        return today

    def format_usage(self) -> str:
        named = [action for action in self._actions if action.required or not action.option_strings]
        words = [self._usage_words(action) for action in named]
        return f"usage: {' '.join([self.prog, *words, '[options]'])}\n"

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        first = [self._option_string_actions[flag] for flag in self.first]
        positional, *groups = self._action_groups
        groups.sort(key=lambda group: GROUPS.index(str(group.title)))
        self._add_section(formatter, positional.title, None, positional._group_actions)
        self._add_section(formatter, FIRST, None, first)
        for group in groups:
            rest = [action for action in group._group_actions if action not in first]
            self._add_section(formatter, group.title, group.description, rest)
        formatter.add_text(self.epilog)
        return f"{self.format_usage()}\n{formatter.format_help()}"

    @staticmethod
    def _usage_words(action: argparse.Action) -> str:
        choices = None if action.choices is None else f"{{{','.join(map(str, action.choices))}}}"
        name = str(action.metavar or choices or action.dest)
        if action.option_strings:
            return f"{action.option_strings[0]} {name.upper()}"
        return {"?": f"[{name}]", "+": f"{name} ..."}.get(str(action.nargs), name)

    @staticmethod
    def _add_section(
        formatter: argparse.HelpFormatter, title: str | None, about: str | None, actions: list[argparse.Action]
    ) -> None:
        if actions:
            formatter.start_section(title)
            formatter.add_text(about)
            formatter.add_arguments(actions)
            formatter.end_section()


def flags_now(verb: str, arguments: list[str]) -> list[tuple[str, str | None]]:
    """The arguments of a command in the words of today, each with the hint that it needs."""
    words = {f"--{old}": f"--{new}" for old, new in renamed(verb).items()}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    today: list[tuple[str, str | None]] = []
    for argument in arguments[:end]:
        flag, equals, value = argument.partition("=")
        new = words.get(flag)
        today.append((argument, None) if new is None else (f"{new}{equals}{value}", f"{flag} is now {new}"))
    return [*today, *((argument, None) for argument in arguments[end:])]
