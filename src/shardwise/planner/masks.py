"""Which cells of a table have certain values in certain fields, without making their strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwise.cost.tables.price import Block, Piece
from shardwise.planner.constraints import Allowed, field_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_LAYER = ("sequence_parallel", "context_method", "microbatch")
_SCHEDULE = ("schedule", "interleave", "stage_layers")
_RECOMPUTE = ("recompute", "recompute_layers")
_SHARDS = ("zero", "shard_group", "keep_parameters", "accumulate")
_CHOSEN = frozenset((*_LAYER, *_SCHEDULE, *_RECOMPUTE, *_SHARDS, "offload"))


def matching(piece: Piece, entry: Mapping[str, Allowed]) -> Array | None:
    """Column × row: the cells that have an allowed value in every field of ``entry``; None where no cell has."""
    import numpy as np

    if "offload" in entry and piece.offload not in entry["offload"]:
        return None
    held = [_block_masks(block, entry) for block in piece.blocks]
    starts = np.cumsum([0, *(len(block.rows) for block in piece.blocks[:-1])])
    rows = np.concatenate([one[0] for one in held])[starts[piece.block_of_row] + piece.row_numbers]
    if not rows.any():
        return None
    columns = np.stack([one[1] for one in held], axis=-1)
    mask: Array = columns.take(piece.block_of_row, -1) & rows
    return mask


def _block_masks(block: Block, entry: Mapping[str, Allowed]) -> tuple[Array, Array]:
    """Which rows and which columns of a block match their fields of ``entry``."""
    import numpy as np

    group, index = block.group, block.rows.index
    rest = {name: values for name, values in entry.items() if name not in _CHOSEN}
    here = all(field_value(group.base, name) in values for name, values in rest.items())

    def alike(choices: Any, names: tuple[str, ...]) -> Array:
        asked = [name for name in names if name in entry]
        return np.array([all(getattr(one, name) in entry[name] for name in asked) for one in choices])

    rows = (
        alike(group.layers, _LAYER)[index[:, 0]]
        & alike(group.schedules, _SCHEDULE)[index[:, 1]]
        & alike(group.recomputes, _RECOMPUTE)[index[:, 2]]
    )
    return rows & here, alike(group.shards, _SHARDS)[block.columns.numbers]
