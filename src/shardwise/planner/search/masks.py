"""Which cells of a table have certain values in certain fields, without making their strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.cost.sweep.price import TableBlock, TablePiece
from shardwise.planner.constraints import Allowed, has

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_LAYER = ("sequence_parallel", "context_method", "microbatch")
_SCHEDULE = ("schedule", "interleave", "stage_layers")
_RECOMPUTE = ("recompute", "recompute_layers")
_SHARDS = ("zero", "shard_group", "keep_parameters", "accumulate")
_CHOSEN = frozenset((*_LAYER, *_SCHEDULE, *_RECOMPUTE, *_SHARDS, "offload"))


class CellBook:
    """What ``of_block`` says of the rows and of the columns of each block, for the pieces of many."""

    def __init__(self, of_block: Callable[[TableBlock], tuple[Array, Array]]) -> None:
        self._of_block = of_block
        self._last: tuple[Sequence[TableBlock], tuple[Array, Array, Array]] | None = None

    def of(self, piece: TablePiece) -> tuple[Array, Array]:
        """By row of the piece, and by column × block (`TablePiece.block_of_row`)."""
        if self._last is None or self._last[0] is not piece.blocks:  # blocks come many pieces in a row
            self._last = (piece.blocks, self._of_blocks(piece.blocks))
        rows, columns, starts = self._last[1]
        return rows[starts[piece.block_of_row] + piece.row_numbers], columns

    def _of_blocks(self, blocks: Sequence[TableBlock]) -> tuple[Array, Array, Array]:
        """All rows, column × block, and where each block's rows start."""
        import numpy as np

        held = [self._of_block(block) for block in blocks]
        starts = np.cumsum([0, *(len(block.rows) for block in blocks[:-1])])
        return np.concatenate([one[0] for one in held]), np.stack([one[1] for one in held], axis=-1), starts


class Mask:
    """The cells that have an allowed value in every field of ``entry``.

    ``idle``: what a field counts as that makes no difference, such as a context method without context parallelism.
    """

    def __init__(self, entry: Mapping[str, Allowed], *, idle: bool) -> None:
        self._entry, self._idle = entry, idle
        self._book = CellBook(self._of_block)

    def cells(self, piece: TablePiece) -> Array | None:
        """Column × row; None if no cell is among them."""
        if "offload" in self._entry and piece.offload not in self._entry["offload"]:
            return None
        rows, columns = self._book.of(piece)
        if not rows.any():
            return None
        mask: Array = columns.take(piece.block_of_row, -1) & rows
        return mask

    def _of_block(self, block: TableBlock) -> tuple[Array, Array]:
        """Which rows and which columns of a block match their fields."""
        import numpy as np

        group, index, base = block.group, block.rows.index, block.group.base
        here = all(has(base, name, self._entry[name], idle=self._idle) for name in self._entry if name not in _CHOSEN)

        def alike(choices: Sequence[Any], names: tuple[str, ...]) -> Array:
            asked = [name for name in names if name in self._entry]
            strategies = [base.unchecked(**{name: getattr(one, name) for name in names}) for one in choices]
            return np.array(
                [all(has(one, name, self._entry[name], idle=self._idle) for name in asked) for one in strategies]
            )

        rows = (
            alike(group.layers, _LAYER)[index[:, 0]]
            & alike(group.schedules, _SCHEDULE)[index[:, 1]]
            & alike(group.recomputes, _RECOMPUTE)[index[:, 2]]
        )
        return rows & here, alike(group.shards, _SHARDS)[block.columns.numbers]
