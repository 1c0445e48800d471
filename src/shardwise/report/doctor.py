"""What `doctor` found, a line for each check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from shardwise.measure.doctor.finding import Finding

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def print_finding(out: Console, found: Finding) -> None:
    said = f"{found.figure}; {found.remedy}" if found.remedy else found.figure
    out.print(Text.assemble((f"{found.status}  ", _STYLES[found.status]), f"{found.check:<14} {said}"), soft_wrap=True)
