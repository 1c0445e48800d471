"""What devices hold, part by part and over a step, and which rank is where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardwise.cost.analysis import Analysis
from shardwise.cost.memory.device import DeviceMemory, MemoryFactor, MemoryTerm, memory_terms
from shardwise.layout.groups import coordinates, node_of, rank_at
from shardwise.layout.mesh import mesh_divisions
from shardwise.layout.views import ranks_to_price
from shardwise.report.charts.chart import (
    TONES,
    BarChart,
    BarSeries,
    ChartAxis,
    ChartLimit,
    LineChart,
    LineSeries,
    MeshBox,
    MeshCell,
    MeshChart,
    SpanKind,
    Tone,
    Value,
    chart_table,
    stacked_bars,
)
from shardwise.report.memory_timeline import sampled
from shardwise.report.verdict import DIMENSIONS, MEMORY_PARTS, memory_words
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_bytes, readable_count, readable_seconds

if TYPE_CHECKING:
    from shardwise.cost.memory.timeline import MemoryOverTime

# -- memory, with the formula behind each part -------------------------------------------------------

_TONES: dict[str, Tone] = {
    "weights": "sky",
    "gradients": "blue",
    "optimizer": "navy",
    "activations": "orange",
    "recomputed": "gold",
    "gathered": "green",
    "communication": "teal",
    "temporary": "purple",
    "allowance": "grey",
}
_COLUMNS = 160  # samples of a step


def memory_chart(analysis: Analysis) -> BarChart:
    """A bar for every pipeline rank that was priced, against the memory of a device."""
    memories, room = analysis.memories, analysis.room
    parts = _parts_held(memories)
    terms = [memory_terms(view, held) for (view, _), held in zip(ranks_to_price(analysis.job), memories)]
    series = tuple(
        BarSeries(
            MEMORY_PARTS[part],
            tuple(getattr(held, part) for held in memories),
            _TONES[part],
            tuple(
                formula_lines(MEMORY_PARTS[part], own.get(part, ()), getattr(held, part))
                for own, held in zip(terms, memories)
            ),
        )
        for part in parts
    )
    limits = [ChartLimit("usable memory of a device", room.usable_bytes)]
    if room.margin_bytes:
        limits.append(ChartLimit("what plans fill", room.planned_bytes))
    return stacked_bars(
        "pipeline rank",
        ChartAxis("bytes of one device", "bytes"),
        [rank_words(analysis, held) for held in memories],
        series,
        total="in all",
        name="memory",
        title="Memory of one device",
        caption=f"{memory_words(analysis)}.",
        limits=tuple(limits),
    )


def rank_words(analysis: Analysis, held: DeviceMemory) -> str:
    if analysis.job.strategy.pp == 1:
        return "every device"
    return f"rank {held.pipeline_rank}" + (" (fullest)" if held is analysis.memory else "")


def formula_lines(name: str, terms: tuple[MemoryTerm, ...], size: float) -> tuple[str, ...]:
    """The formula of a part in words, with numbers put in, and its result."""
    if not terms:
        return ()
    words = " + ".join(
        _product(term, lambda factor: factor.meaning) if len(term.factors) > 1 else term.what for term in terms
    )
    numbers = " + ".join(_product(term, _number) for term in terms)
    return (f"{name} = {words}", f"= {numbers}", f"= {readable_bytes(size)}")


def _product(term: MemoryTerm, text_of: Callable[[MemoryFactor], str]) -> str:
    first, *others = term.factors
    return text_of(first) + "".join(f" {'÷' if factor.divides else '×'} {text_of(factor)}" for factor in others)


def _number(factor: MemoryFactor) -> str:
    if factor.unit == "count":
        whole = factor.value < 1e6 and float(factor.value).is_integer()
        return f"{factor.value:,.0f}" if whole else readable_count(factor.value)
    return readable_bytes(factor.value) if abs(factor.value) >= 1024 else f"{factor.value:.4g} B"


def _parts_held(memories: tuple[DeviceMemory, ...]) -> list[str]:
    return [part for part in DeviceMemory.PARTS if any(getattr(held, part) for held in memories)]


def memory_over_time_chart(memory: MemoryOverTime) -> LineChart:
    """The fullest pipeline rank over the step, part by part; the table has the peak of every rank."""
    rank, step = memory.fullest, memory.step_seconds
    usable = float(memory.job.cluster.device.usable_memory)
    spans = sampled(rank, step, _COLUMNS)
    width = step / _COLUMNS
    parts = _parts_held(tuple(span.held for span in spans))
    # States that stay all step at the bottom, what comes and goes on top.
    order: list[str] = [part for part in ("allowance", "optimizer", "gradients", "weights") if part in parts]
    order += [part for part in parts if part not in order]
    where = f"pipeline rank {rank.pipeline_rank}, the fullest" if memory.job.strategy.pp > 1 else "every device"
    return LineChart(
        name="memory-over-time",
        title=f"Memory over the step: {where}",
        caption=(
            f"The peak is {readable_bytes(rank.peak.held.total)} at {readable_seconds(rank.peak.start_seconds)}, "
            f"during {rank.peak.during}."
        ),
        x=ChartAxis("seconds into the step", "seconds"),
        y=ChartAxis("bytes held", "bytes"),
        series=tuple(
            LineSeries(
                MEMORY_PARTS[part],
                tuple((number * width, getattr(span.held, part)) for number, span in enumerate(spans)),
                _TONES[part],
            )
            for part in order
        ),
        is_stacked=True,
        limits=(ChartLimit("usable memory of a device", usable),),
        table=chart_table(
            {"rank": "words", "peak": "bytes", "of the device": "share", "at": "seconds", "during": "words"},
            [
                (f"rank {number}", peak.held.total, peak.held.total / usable, peak.start_seconds, peak.during)
                for number, peak in ((rank.pipeline_rank, rank.peak) for rank in memory.ranks)
            ],
        ),
    )


# -- the nodes of a cluster with the coordinates of their ranks --------------------------------------

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
