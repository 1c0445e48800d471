"""The argument parser of every verb: errors are one line, and name the nearest flag."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from shardwise.spec.errors import SpecError, nearest_name, shown


class Parser(argparse.ArgumentParser):
    """An argument parser that raises SpecError and suggests the nearest flag."""

    def __init__(self, verb: str, description: str, example: str) -> None:
        super().__init__(
            prog=f"shardwise {verb}",
            description=description,
            epilog="example:\n" + "\n".join(f"  {line}" for line in example.strip().splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # "-5GB/s" after a flag is its value, whose own check then rejects it; no flag of ours looks like that.
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        raise SpecError("", message, f"see `{self.prog} --help`")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """The parsed flags; an unknown one is named with its nearest neighbour."""
        for argument in arguments:
            flag, _, value = argument.partition("=")
            if value == "--" and flag.startswith("--"):  # argparse would make an empty list of it
                raise SpecError(flag, "'--' is not a value", f"see `{self.prog} --help`")
        known, unknown = self.parse_known_args(arguments)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            flag = unknown[0].split("=")[0]
            remedy = nearest_name(flag, flags) if flag.startswith("-") else ""
            raise SpecError("", f"unknown argument {shown(unknown[0])}", remedy or f"see `{self.prog} --help`")
        return known
