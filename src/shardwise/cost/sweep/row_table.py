"""The rows of a group's table as data: what `rows` works out and `price` holds against the columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.cost.memory.sum import PassMemory
from shardwise.cost.sweep.group import Group, Row
from shardwise.cost.traffic.overlap import PASSES, Pass

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True)
class RankRows:
    """What the columns build on: arrays of kind of rank × row."""

    lasting: dict[Pass, Array]  # seconds of a step's pass, exposed communication of its layers included
    busy: dict[Pass, dict[str, Array]]  # seconds that the layers keep each link busy
    once_seconds: Array  # sent after the last microbatch
    passes: PassMemory

    def windows(self, part: slice) -> tuple[dict[Pass, Array], dict[Pass, dict[str, Array]]]:
        """``lasting`` and ``busy`` of some rows, to be held against columns: kind × 1 × row."""
        lasting = {which: seconds[:, None, part] for which, seconds in self.lasting.items()}
        busy = {which: {n: x[:, None, part] for n, x in links.items()} for which, links in self.busy.items()}
        return lasting, busy

    def each(self, change: Callable[[Array], Array]) -> RankRows:
        """The same with every array changed."""
        return RankRows(
            {which: change(seconds) for which, seconds in self.lasting.items()},
            {which: {name: change(x) for name, x in links.items()} for which, links in self.busy.items()},
            change(self.once_seconds),
            self.passes.each(change),
        )


@dataclass(frozen=True)
class RowTable:
    """Columns over the valid rows of a group: layer × schedule × recompute choices, flattened."""

    index: Array  # row → layer, schedule, recompute choice
    sequences: Array
    microbatches: Array
    last_share: Array
    pipeline_seconds: Array
    ranks: RankRows

    def __len__(self) -> int:
        return len(self.sequences)

    def part(self, rows: slice, first_layer: int) -> RowTable:
        """Some of the rows, their layer choices numbered from ``first_layer``."""
        index = self.index[rows]
        index[:, 0] -= first_layer
        return RowTable(
            index,
            self.sequences[rows],
            self.microbatches[rows],
            self.last_share[rows],
            self.pipeline_seconds[rows],
            self.ranks.each(lambda values: values[..., rows]),
        )

    def row(self, group: Group, number: int) -> Row:
        layer, schedule, recompute = (int(i) for i in self.index[number])
        return Row(
            group.layers[layer],
            group.schedules[schedule],
            group.recomputes[recompute],
            int(self.sequences[number]),
            int(self.microbatches[number]),
        )


def joined_rows(tables: list[RowTable]) -> RowTable:
    """The rows of several tables, one after the other."""
    import numpy as np

    if len(tables) == 1:
        return tables[0]

    def joined(arrays: list[Array]) -> Array:
        return np.concatenate(arrays, axis=-1)

    return RowTable(
        np.concatenate([table.index for table in tables]),
        joined([table.sequences for table in tables]),
        joined([table.microbatches for table in tables]),
        joined([table.last_share for table in tables]),
        joined([table.pipeline_seconds for table in tables]),
        _joined_ranks([table.ranks for table in tables], joined),
    )


def _joined_ranks(ranks: list[RankRows], joined: Callable[[list[Array]], Array]) -> RankRows:
    """A link that a table does not use is never busy there."""
    import numpy as np

    def busy(which: Pass, name: str) -> Array:
        return joined([rank.busy[which].get(name, np.zeros_like(rank.once_seconds)) for rank in ranks])

    links = {which: dict.fromkeys(name for rank in ranks for name in rank.busy[which]) for which in PASSES}
    return RankRows(
        {which: joined([rank.lasting[which] for rank in ranks]) for which in PASSES},
        {which: {name: busy(which, name) for name in links[which]} for which in PASSES},
        joined([rank.once_seconds for rank in ranks]),
        PassMemory.joined([rank.passes for rank in ranks], joined),
    )
