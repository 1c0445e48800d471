"""An analysis as a page: the verdict, the predicted step, memory, one table per parallel dimension, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwise.cost.analysis import Analysis
from shardwise.cost.step.parts import COMMUNICATION, STEP_PARTS
from shardwise.cost.step.scaling import ScalingRow
from shardwise.cost.traffic.gradient_reduction import GradientTime
from shardwise.cost.traffic.traffic import Traffic
from shardwise.layout.mesh import RankPlace
from shardwise.planner.advice.assessment import Assessment
from shardwise.planner.describe import less_communication_words
from shardwise.report.campaign import campaign_pieces
from shardwise.report.console import bar, spoken, table
from shardwise.report.memory_timeline import memory_table
from shardwise.report.page import Line, Piece, paged
from shardwise.report.part_names import DIMENSIONS, MEMORY_PARTS
from shardwise.report.tables import FittedTable
from shardwise.report.verdict import verdict_table
from shardwise.spec.job import Job
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_count,
    readable_flops,
    readable_rate,
    readable_seconds,
    readable_share,
)

_STEP_WORDS = {
    "products": "matmuls",
    "attention": "attention",
    "memory-bound": "memory-bound operators",
    "launches": "kernel launches",
    "recompute": "recomputed operators",
    **{name: f"exposed {name} communication" for name in COMMUNICATION},
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "overhead": "fixed cost of a step",
}


@paged
def analysis_page(found: Assessment) -> Iterator[Piece | str]:
    """Everything `analyze` prints: the verdict, where the predicted step goes, memory, communication, the rest."""
    analysis = found.analysis
    yield _headline(analysis)
    for note in analysis.notes:
        yield Line(f"note: {note}", "yellow")
    yield verdict_table(found)
    yield _time_table(analysis)
    yield _memory_table(analysis)
    for name in COMMUNICATION:
        if traffics := analysis.dimension_traffics(name):
            yield _dimension_table(analysis, name, traffics)
    yield from collective_lines(found.gradient_times)
    if found.storage.levels:
        yield _storage_table(found)
    if found.campaign is not None:
        yield from campaign_pieces(found.campaign)
    for kind, rows in (found.scaling or {}).items():
        yield _scaling_table(kind, rows)
    if found.ranks is not None:
        yield Line("\n".join(_rank_lines(found.ranks)), fixed=True)
    if found.memory_over_time is not None:
        yield memory_table(found.memory_over_time)
    yield f"Error bars hold 80% of published runs. {found.error_bar.basis.capitalize()}."


def collective_lines(sums: Iterable[GradientTime]) -> Iterator[str]:
    """What sums the gradients where it is not the backend's own collective, and what that saves or costs."""
    for one in sums:
        difference = one.backend_seconds - one.seconds
        verb = "saves" if difference >= 0 else "costs"
        yield (
            f"{one.payload.subject.capitalize()} by {spoken(one.choice.algorithm)}: "
            f"{readable_seconds(one.seconds)} per step instead of {readable_seconds(one.backend_seconds)} by the "
            f"backend's own, {verb} {readable_seconds(abs(difference))} where nothing hides it."
        )


def _headline(analysis: Analysis) -> str:
    job = analysis.job
    parameters = readable_count(analysis.parameters)
    active = f" ({readable_count(analysis.active_parameters)} active)" if job.model.moe else ""
    return (
        f"{job.model.name}: {parameters} parameters{active} on {job.cluster.devices} × "
        f"{job.cluster.device.name} ({job.cluster.name})\n"
        f"{_layout(job)}\n"
        f"{counted(job.sequences, 'sequence')} of {job.training.seq:,} = {readable_count(job.tokens_per_step)} tokens "
        f"per step in {counted(job.microbatches, 'microbatch')} of {job.strategy.microbatch}"
    )


def _layout(job: Job) -> str:
    """The degrees in rank order, innermost first, and every choice that is not the plain one."""
    strategy = job.strategy
    parts = [" × ".join(f"{name} {strategy.degree(name)}" for name in strategy.order)]
    if strategy.ep > 1:
        parts.append(f"ep {strategy.ep} ({strategy.dispatch})")
    if strategy.tp > 1:
        parts.append("sequence parallel" if strategy.sequence_parallel else "no sequence parallel")
    if strategy.cp > 1:
        parts.append(f"{strategy.context_method} attention")
    if strategy.pp > 1:
        parts.append(f"{strategy.schedule}" + (f" × {strategy.interleave}" if strategy.interleave > 1 else ""))
    parts.append(f"zero {strategy.zero}" + (f" over {strategy.shard_group}" if strategy.shard_group else ""))
    if strategy.recompute != "none":
        parts.append(f"{strategy.recompute} recompute")
    parts += [*less_communication_words(strategy), job.training.precision, job.training.optimizer]
    return ", ".join(parts)


def _dimension_table(analysis: Analysis, name: str, traffics: tuple[Traffic, ...]) -> FittedTable:
    seconds, exposed = sum(traffic.seconds for traffic in traffics), analysis.parts[name]
    rank = f" on pipeline rank {analysis.dimension_rank(name)}" if analysis.job.strategy.pp > 1 else ""
    times = f"{readable_seconds(seconds)} per step{rank}, {readable_seconds(exposed)} exposed"
    title = f"{DIMENSIONS[name].capitalize()}: {times}"
    columns = ("what", "collective", "network", "bytes", "times", "steps", "latency", "bandwidth", "seconds", "hidden",
               "exposed")  # fmt: skip
    rows = (_traffic_row(traffic) for traffic in traffics)
    return table(title, columns, rows, numbers_from=3, optional=("steps", "latency", "bandwidth", "network", "hidden"))


def _traffic_row(traffic: Traffic) -> Iterator[str]:
    cost = traffic.cost
    yield traffic.what
    yield f"{traffic.kind.value.replace('_', '-')}, {spoken(cost.algorithm)}"
    yield traffic.network
    yield readable_bytes(traffic.size_bytes)
    yield f"{traffic.count:,.0f}"
    yield str(cost.steps)
    yield readable_seconds(traffic.count * float(cost.latency_seconds))
    yield readable_seconds(traffic.count * float(cost.bandwidth_seconds))
    yield readable_seconds(traffic.seconds)
    yield readable_seconds(traffic.hidden_seconds)
    yield readable_seconds(traffic.added_seconds)


def _memory_table(analysis: Analysis) -> FittedTable:
    memory, room = analysis.memory, analysis.room
    usable = room.usable_bytes
    where = f" (fullest: pipeline rank {memory.pipeline_rank})" if analysis.job.strategy.pp > 1 else ""
    verdict = {"fits": "fits", "tight": "fits, but tight", "does not fit": "DOES NOT FIT"}[analysis.fit]
    title = f"Memory of one device{where}: {readable_bytes(memory.total)} of {readable_bytes(usable)}, {verdict}"
    free = usable - memory.total
    sizes = [(MEMORY_PARTS[part], getattr(memory, part)) for part in memory.PARTS if getattr(memory, part)]
    sizes.append(("free" if free >= 0 else "missing", abs(free)))
    rows = [(name, bar(size / usable), readable_bytes(size), readable_share(size / usable)) for name, size in sizes]
    if free >= 0:
        margin = room.margin_bytes
        rows.append(("of which plans keep free", "", readable_bytes(margin), readable_share(margin / usable)))
    if memory.host:
        rows.append(("offloaded to host", "", readable_bytes(memory.host), ""))
    return table(title, ("part", "share of the device", "bytes", "share"), rows, numbers_from=2)


def _time_table(analysis: Analysis) -> FittedTable:
    step = analysis.predicted_seconds
    title = (
        f"Predicted step: {readable_seconds(step)} for {readable_flops(analysis.flops_per_step())} "
        f"({readable_flops(analysis.flops_per_token())} per token, causal attention counted once)"
    )
    parts = [(_STEP_WORDS[name], analysis.parts[name]) for name in STEP_PARTS if analysis.parts[name]]
    rows = [
        (what, bar(seconds / step), readable_seconds(seconds), readable_share(seconds / step))
        for what, seconds in (*parts, ("predicted step time", step))
    ]
    return table(title, ("part", "share of the step", "seconds", "share"), rows, numbers_from=2)


def _storage_table(found: Assessment) -> FittedTable:
    storage = found.storage
    size, rate = readable_bytes(storage.checkpoint_bytes), readable_rate(storage.data_bytes_per_second)
    title = f"Storage: a checkpoint is {size}, the data {rate}"
    rows = [
        (
            cost.name,
            readable_rate(cost.bandwidth),
            readable_seconds(cost.write_seconds),
            readable_seconds(cost.read_seconds),
            readable_share(cost.data_rate_share, 2),
        )
        for cost in storage.levels
    ]
    return table(title, ("level", "bandwidth", "write", "read", "data needs"), rows)


def _scaling_table(kind: str, scaled: Iterable[ScalingRow]) -> FittedTable:
    formula = "T1/(N·TN), fixed batch" if kind == "strong" else "T1/TN, batch grows with N"
    rows = [
        (
            str(row.devices),
            str(row.data_parallel),
            str(row.sequences),
            readable_seconds(row.predicted_seconds),
            f"{row.tokens_per_second:,.0f}",
            readable_share(row.efficiency),
            readable_share(row.exposed_share),
            {"fits": "yes", "tight": "tight", "does not fit": "no"}[row.fit],
        )
        for row in scaled
    ]
    columns = ("devices", "dp", "sequences", "step", "tokens/s", "efficiency", "exposed", "fits")
    return table(f"{kind.capitalize()} scaling ({formula})", columns, rows, numbers_from=0)


def _rank_lines(places: Sequence[RankPlace]) -> Iterator[str]:
    """One plain line per rank: a table of tens of thousands of rows would take longer to draw than to price."""
    names = list(places[0].groups)
    yield "Ranks (group.position in every dimension)"
    rows = [("rank", "node", "local", *names)]
    for place in places:
        groups = (f"{place.groups[name]}.{place.coordinates[name]}" for name in names)
        rows.append((str(place.rank), str(place.node), str(place.local_rank), *groups))
    widths = [max(map(len, column)) + 2 for column in zip(*rows)]
    for row in rows:
        yield "".join(cell.rjust(width) for cell, width in zip(row, widths))
    yield ""
