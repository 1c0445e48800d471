"""Which rank is where: the nodes of a cluster with the coordinates of their ranks."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.layout.mesh import mesh_divisions
from shardwise.layout.ranks import coordinates, node_of, rank_at
from shardwise.report.charts.chart import TONES, MeshBox, MeshCell, MeshChart, SpanKind, Tone, Value, chart_table
from shardwise.report.part_names import DIMENSIONS
from shardwise.spec.job import Job
from shardwise.spec.units import counted

_MOST_NODES = 16
_MOST_CELLS = 72  # of a node: as many devices as the largest NVLink domain has


def mesh_chart(job: Job) -> MeshChart:
    """All nodes of a small cluster; of a large one the first few of every pipeline rank."""
    strategy, per_node = job.strategy, job.cluster.node_devices
    nodes = _shown_nodes(job)
    used = [name for name in strategy.order if strategy.degree(name) > 1]
    boxes = tuple(
        MeshBox(
            f"node {node}",
            tuple(_cell(job, rank, used) for rank in _ranks_of(job, node)[:_MOST_CELLS]),
        )
        for node in nodes
    )
    stages = sorted({coordinates(strategy, rank)["pp"] for node in nodes for rank in _ranks_of(job, node)})
    shown = (
        "" if len(nodes) == job.cluster.nodes else f" {counted(len(nodes), 'node')} of {job.cluster.nodes:,} are drawn."
    )
    inner = " · ".join(f"{name} {strategy.degree(name)}" for name in used) or "one rank"
    grids = [level for level in job.cluster.levels if level.shape]
    joined = f" They form a {grids[0].topology} of {'×'.join(map(str, grids[0].shape))}." if grids else ""
    return MeshChart(
        name="mesh",
        title=f"{strategy.world:,} ranks on {counted(job.cluster.nodes, 'node')} of {per_node}",
        caption=f"Innermost first: {inner}.{joined}{' A colour is a pipeline rank.' * (strategy.pp > 1)}{shown}",
        boxes=boxes,
        legend=tuple(SpanKind(f"pipeline rank {stage}", _tone(stage)) for stage in stages) if strategy.pp > 1 else (),
        table=chart_table(
            {"dimension": "words", "degree": "number", "ranks of rank 0's group": "words", "nodes it spans": "number"},
            [_row(job, name) for name in (*used, *(["ep"] if strategy.ep > 1 else []))],
        ),
    )


def _ranks_of(job: Job, node: int) -> range:
    first = node * job.cluster.node_devices
    return range(first, min(first + job.cluster.node_devices, job.strategy.world))


def _shown_nodes(job: Job) -> list[int]:
    if job.cluster.nodes <= _MOST_NODES:
        return list(range(job.cluster.nodes))
    strategy = job.strategy
    each = max(1, _MOST_NODES // strategy.pp)
    chosen: dict[int, None] = {}
    for stage in range(strategy.pp):
        copies = (rank_at(strategy, {"pp": stage, "dp": copy}) for copy in range(strategy.data_parallel))
        nodes = dict.fromkeys(node_of(rank, job.cluster.node_devices) for rank in copies)
        chosen |= dict.fromkeys(list(nodes)[:each])
    return sorted(list(chosen)[:_MOST_NODES])


def _cell(job: Job, rank: int, used: Sequence[str]) -> MeshCell:
    place = coordinates(job.strategy, rank)
    label = " ".join(f"{name}{place[name]}" for name in used if name != "pp")
    detail = ", ".join(f"{DIMENSIONS[name]} {place[name]}" for name in used)
    return MeshCell(label, f"rank {rank}" + (f": {detail}" if detail else ""), _tone(place["pp"]))


def _tone(stage: int) -> Tone:
    return TONES[stage % len(TONES)]


def _row(job: Job, name: str) -> tuple[Value, ...]:
    group = next(ranks for ranks in mesh_divisions(job.strategy)[name] if 0 in ranks)
    nodes = len({node_of(rank, job.cluster.node_devices) for rank in group})
    shown = ", ".join(map(str, group[:8])) + (", ..." if len(group) > 8 else "")
    return DIMENSIONS[name], float(len(group)), shown, float(nodes)
