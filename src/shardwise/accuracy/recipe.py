"""How a published source is completed: what all its rows share, and what some of them change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.accuracy.table import TableRow
from shardwise.spec.stack import Stack

Cells = Mapping[str, str]


def matches(cells: Cells, row: TableRow) -> bool:
    """Whether every column of ``cells`` matches its pattern in the row."""
    return all(re.search(pattern, row.text(column), re.IGNORECASE) for column, pattern in cells.items())


@dataclass(frozen=True)
class Variant:
    """Rows whose cells match ``cells`` (column → pattern) and whose container is from ``since`` to ``until``."""

    rows: str  # in words
    reason: str
    cells: Cells
    since: str = ""
    until: str = "~"  # after any digit
    fill: Cells = field(default_factory=dict)  # what the source leaves empty, as if it had printed it
    model: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    stack: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, row: TableRow) -> bool:
        return self.since <= release(row) <= self.until and matches(self.cells, row)

    def on(self, stack: Stack) -> Stack:
        """The stack with what this variant sets; overlap is changed dimension by dimension."""
        changes = dict(self.stack)
        if "overlap" in changes:
            changes["overlap"] = replace(stack.overlap, **changes["overlap"])
        return replace(stack, **changes)


def release(row: TableRow) -> str:
    """The release that a row names, like "26.06" or "26.06.01"; one that names none is older than any."""
    match = re.search(r"(?<![\d.])2\d\.[01]\d(\.\d\d)?(?!\d)", f"{row.text('locator')} {row.text('row_id')}")
    return match[0] if match else ""


Microbatch = Literal["one", "local batch"]


@dataclass(frozen=True)
class Source:
    """Defaults of one source for fields its tables leave out."""

    name: str
    pattern: str  # in the row's source column
    stack: str
    reason: str
    cells: Cells = field(default_factory=dict)  # further columns that its rows match
    convention: str = "causal"  # how its TFLOP/s or MFU count a token, unless the row says
    counts_recomputed: bool = False
    peak: float | None = None  # FLOP/s behind its MFU; None: the device's 16-bit peak
    zero: int = 1
    fp32_gradients: bool = False  # 16-bit training accumulates in fp32, unless the row says
    # Without a pipeline a rank's whole share of the batch, or one sequence; with one always one sequence.
    microbatch: Microbatch = "one"
    layer_per_chunk: bool = False  # pipelines interleave down to one layer per chunk
    vocab: int = 32_000
    context_method: str = "ring"
    machines: Mapping[str, str] = field(default_factory=dict)  # clusters in place of a device's usual one
    stages_by_cost: bool = False  # a pipeline stage ends with the layer that passes its share of the matmuls
    memory: Literal["as printed", "reserved, first rank"] = "as printed"  # what a figure of memory counts
    untimed: tuple[Cells, ...] = ()  # rows whose time the host or slow kernels set: only their memory is read
    variants: tuple[Variant, ...] = ()

    def times(self, row: TableRow) -> bool:
        return not any(matches(cells, row) for cells in self.untimed)

    def covers(self, row: TableRow) -> bool:
        return matches({"source": self.pattern, **self.cells}, row)

    def filled(self, row: TableRow) -> TableRow:
        """The row with the cells that its variants fill where it has none."""
        cells = {name: text for variant in self.variants if variant.applies(row) for name, text in variant.fill.items()}
        return TableRow({**row.cells, **{name: text for name, text in cells.items() if not row.text(name)}})
