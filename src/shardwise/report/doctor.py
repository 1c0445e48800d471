"""What `doctor` found, a line for each check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from shardwise.report.tables import wrapped

if TYPE_CHECKING:
    from shardwise.measure.doctor.host import Checked

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
_LEAST = 20  # columns in which words can be read


def print_finding(out: Console, found: Checked) -> None:
    """The status, the check and what was found; lines that follow stand under the first."""
    said = f"{found.figure}; {found.remedy}" if found.remedy else found.figure
    check = f"{found.check:<14} "
    indent = len(found.status) + 2 + len(check)
    # In a file or a pipe, where consoles do not wrap, a finding stays on its line.
    first, *rest = [said] if out.soft_wrap else wrapped(said, max(_LEAST, out.width - indent))
    out.print(Text.assemble((f"{found.status}  ", _STYLES[found.status]), check + first))
    for line in rest:
        out.print(Text(" " * indent + line))
