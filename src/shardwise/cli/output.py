"""How a verb prints its result: as text, JSON, Markdown or CSV, by flags that all verbs share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from shardwise.api.results import Result
from shardwise.cli.streams import ReaderGone
from shardwise.report.page import Page


def add_output_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    group = parser.add_argument_group("output").add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true", help="JSON output")
    group.add_argument("--markdown", action="store_true", help="Markdown output, tables included")
    group.add_argument("--csv", action="store_true", help="CSV output: the tables alone")
    return group


def add_plot_argument(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument("--plot", action="store_true", help="pictures in place of tables")


def add_details_argument(parser: argparse.ArgumentParser) -> None:
    details = "show everything, not just one screen; --json, --markdown and --csv always do"
    parser.add_argument_group("output").add_argument("--details", action="store_true", help=details)


def page_of(parsed: argparse.Namespace, result: Result) -> Page:
    """The page to print: all of it where it is asked for, or not printed on a screen."""
    return result.page if parsed.details or form_of(parsed) != "text" else result.screen


def form_of(parsed: argparse.Namespace) -> Literal["text", "markdown", "csv"]:
    return "markdown" if parsed.markdown else "csv" if parsed.csv else "text"


def show_line(parsed: argparse.Namespace, line: str, data: Any) -> None:
    with suppress(ReaderGone):
        print(json.dumps(data) if parsed.json else line)


def show(parsed: argparse.Namespace, page: Callable[[], Page], data: Callable[[], Any]) -> None:
    """Prints a page, or the data as JSON; a reader that leaves early (`head`) does not change the exit status."""
    with suppress(ReaderGone):
        if parsed.json:
            print(json.dumps(data(), indent=2, ensure_ascii=False))
        else:
            page().print(form_of(parsed))
