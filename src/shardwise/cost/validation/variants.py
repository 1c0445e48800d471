"""A setting that only some rows of a source have: which rows, what it sets, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.cost.validation.table import Row
from shardwise.spec.stack import Stack


@dataclass(frozen=True)
class Variant:
    """Rows whose cells match ``cells`` (column → pattern) and whose container is ``since`` or newer."""

    rows: str  # in words
    reason: str
    cells: Mapping[str, str]
    since: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    stack: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, row: Row) -> bool:
        if self.since > _container(row):
            return False
        return all(re.search(pattern, row.text(column), re.IGNORECASE) for column, pattern in self.cells.items())

    def on(self, stack: Stack) -> Stack:
        """The stack with what this variant sets; overlap is changed dimension by dimension."""
        changes = dict(self.stack)
        if "overlap" in changes:
            changes["overlap"] = replace(stack.overlap, **changes["overlap"])
        return replace(stack, **changes)


def _container(row: Row) -> str:
    """The release that a row names, like "26.06"; one that names none is older than any."""
    found = re.search(r"(?<![\d.])2\d\.[01]\d(?!\d)", f"{row.text('locator')} {row.text('row_id')}")
    return found[0] if found else ""
