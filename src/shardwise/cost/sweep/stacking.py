"""The tables of several groups as one."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardwise.cost.memory.states import Sharding
from shardwise.cost.overlap import PASSES
from shardwise.cost.sweep.row_table import PER_ROW, RankRows, RowTable
from shardwise.layout.stages import RankContents

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def stacked_sharding(shardings: list[Sharding]) -> Sharding:
    """Column × block arrays; all blocks share the rest."""
    import numpy as np

    def stacked(name: str) -> Any:
        return np.stack([getattr(one, name) for one in shardings], axis=-1)

    first = shardings[0]
    return Sharding(
        stacked("zero"),
        stacked("shards"),
        stacked("expert_shards"),
        first.gradients_sharded,
        first.gathers_once,
        stacked("keep_parameters"),
        first.offload,
        stacked("sums_once"),
        stacked("kept_bytes"),
        stacked("moved_bytes"),
    )


def stacked_contents(ranks: list[tuple[RankContents, ...]]) -> RankContents:
    """Each figure an array of kind of rank × 1 × block."""
    import numpy as np

    names = [field.name for field in fields(RankContents)]
    columns: list[Any] = [
        np.array([[getattr(rank, name) for rank in kinds] for kinds in ranks]).T[:, None, :] for name in names
    ]
    return RankContents(*columns)


def joined_rows(tables: list[RowTable]) -> RowTable:
    """The rows of several tables, one after the other."""
    import numpy as np

    if len(tables) == 1:
        return tables[0]

    def joined(arrays: list[Array]) -> Array:
        return np.concatenate(arrays, axis=-1)

    ranks = [table.ranks for table in tables]
    links = {which: dict.fromkeys(name for rank in ranks for name in rank.busy[which]) for which in PASSES}
    return RowTable(
        np.concatenate([table.index for table in tables]),
        joined([table.sequences for table in tables]),
        joined([table.microbatches for table in tables]),
        joined([table.last_share for table in tables]),
        joined([table.pipeline_seconds for table in tables]),
        RankRows(
            {which: joined([rank.lasting[which] for rank in ranks]) for which in PASSES},
            {
                which: {
                    name: joined([rank.busy[which].get(name, np.zeros_like(rank.saved_bytes)) for rank in ranks])
                    for name in links[which]
                }
                for which in PASSES
            },
            *(joined([getattr(rank, name) for rank in ranks]) for name in PER_ROW),
        ),
    )
