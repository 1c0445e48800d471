"""The rows of a group's table as data: what `rows` works out and `price` holds against the columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.cost.overlap import Pass
from shardwise.cost.sweep.group import Group, Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True)
class RankRows:
    """What the columns build on: arrays of kind of rank × row."""

    lasting: dict[Pass, Array]  # seconds of a step's pass, exposed communication of its layers included
    busy: dict[Pass, dict[str, Array]]  # seconds that the layers keep each link busy
    once_seconds: Array  # sent after the last microbatch
    saved_bytes: Array  # activations of one microbatch, those that offload may send away
    activation_bytes: Array  # of all in flight; these two have an axis of moments (`memory.transient`) before
    other_bytes: Array  # recomputed layer, buffers, temporaries
    in_flight: Array  # microbatches
    alone: Array  # 1 where no microbatch has gone back before that
    in_turn: Array  # 1 where the only microbatch's gradients are reduced layer by layer
    losses_before: Array  # 1 where a loss of another microbatch has gone back before a loss
    late_bytes: Array  # a recomputed layer that is back when others have gone

    def windows(self, part: slice) -> tuple[dict[Pass, Array], dict[Pass, dict[str, Array]]]:
        """``lasting`` and ``busy`` of some rows, to be held against columns: kind × 1 × row."""
        lasting = {which: seconds[:, None, part] for which, seconds in self.lasting.items()}
        busy = {which: {n: x[:, None, part] for n, x in links.items()} for which, links in self.busy.items()}
        return lasting, busy

    def part(self, rows: slice) -> RankRows:
        return RankRows(
            {which: seconds[..., rows] for which, seconds in self.lasting.items()},
            {which: {name: x[..., rows] for name, x in links.items()} for which, links in self.busy.items()},
            *(getattr(self, name)[..., rows] for name in PER_ROW),
        )


PER_ROW = ("once_seconds", "saved_bytes", "activation_bytes", "other_bytes", "in_flight", "alone", "in_turn",
           "losses_before", "late_bytes")  # fmt: skip


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
            self.ranks.part(rows),
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
