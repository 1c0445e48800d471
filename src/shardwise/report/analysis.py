"""An analysis as a page (verdict, predicted step, memory, a table per parallel dimension), and as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.cost.analysis import Analysis
from shardwise.cost.compute.flops import CONVENTIONS
from shardwise.cost.step.simulation import COMMUNICATION, STEP_PARTS
from shardwise.cost.step.verdict import Change
from shardwise.cost.traffic.data import GradientTime
from shardwise.cost.traffic.traffic import Traffic
from shardwise.planner.advice.assessment import Assessment
from shardwise.planner.candidate import change_words, degree_words, less_communication_words
from shardwise.report.console import bar, picked, plain, spoken, table, table_of
from shardwise.report.page import Line, Piece, paged
from shardwise.report.tables import Cell, FittedTable
from shardwise.report.verdict import DIMENSIONS, MEMORY_PARTS, STEP_WORDS, bottleneck_sentence, verdict_table
from shardwise.spec.clusters import device_words
from shardwise.spec.job import Job
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_flops,
    readable_money,
    readable_rate,
    readable_seconds,
    readable_share,
)

if TYPE_CHECKING:
    from shardwise.cost.campaign import Campaign, StorageCost
    from shardwise.cost.step.scaling import DimensionOnNetwork, PricedTopology, ScalingRow
    from shardwise.layout.mesh import RankPlace
    from shardwise.planner.advice.file_changes import FileAdvice, FileChange

_FITS = {"fits": "yes", "tight": "tight", "does not fit": "no"}


@paged
def analysis_screen(assessment: Assessment) -> Iterator[Piece | str]:
    """What `analyze` prints: the verdict, memory, the parts of the step, a line for what each dimension sends."""
    yield from _answer(assessment)
    if table := _communication_table(assessment.analysis):
        yield table
    yield from _asked(assessment)
    yield "--details adds every collective, storage, and where the error bars come from."


@paged
def analysis_page(assessment: Assessment) -> Iterator[Piece | str]:
    """What `analyze --details` prints."""
    analysis = assessment.analysis
    yield from _answer(assessment)
    for name in COMMUNICATION:
        if traffics := analysis.dimension_traffics(name):
            yield _dimension_table(analysis, name, traffics)
    yield from collective_lines(assessment.gradient_times)
    if assessment.storage.levels:
        yield _storage_table(assessment)
    yield from _asked(assessment)
    yield f"Error bars: {assessment.error_bar.basis}."


def _answer(assessment: Assessment) -> Iterator[Piece | str]:
    """What a reader wants first, then memory and time."""
    analysis = assessment.analysis
    yield headline(analysis)
    for note in analysis.notes:
        yield Line(f"note: {note}", "yellow")
    yield verdict_table(assessment)
    yield _memory_table(analysis)
    yield _time_table(analysis)


def _asked(assessment: Assessment) -> Iterator[Piece | str]:
    """What only some flags ask for."""
    if assessment.advice is not None:
        yield _advice_table(assessment.advice, assessment.analysis.fits)
    if assessment.campaign is not None:
        yield from campaign_pieces(assessment.campaign)
    for kind, rows in (assessment.scaling or {}).items():
        yield _scaling_table(kind, rows)
    if assessment.topologies is not None:
        yield from topology_tables(assessment.topologies)
    if assessment.ranks is not None:
        yield Line("\n".join(_rank_lines(assessment.ranks)), fixed=True)
    if assessment.memory_over_time is not None:
        from shardwise.report.memory_timeline import memory_table

        yield memory_table(assessment.memory_over_time)


def _advice_table(advice: FileAdvice, fits: bool) -> FittedTable | str:
    """What to change in a file, each change on top of those above it."""
    from shardwise.interop.edits import setting_words

    if not advice.changes:
        helps = "makes the step 1% shorter and fits" if fits else "takes less memory"
        return f"What to change in {advice.file}: no change of its settings that is tried here {helps}."
    columns: dict[str, Callable[[FileChange], str]] = {
        "setting": lambda change: "; ".join(map(setting_words, *zip(*change.settings.items()))),
        "memory": lambda change: " → ".join(readable_bytes(job.memory_bytes) for job in (change.before, change.after)),
        "step": lambda change: f"{readable_seconds(change.after.step_seconds)}, {change.step_change:+.0%} time",
        "fits": lambda change: change.after.fit,
    }
    return table_of(f"What to change in {advice.file}, in this order", advice.changes, columns, numbers_from=4)


def collective_lines(sums: Iterable[GradientTime]) -> Iterator[str]:
    """A line for each gradient sum that one of our algorithms runs instead of the backend: what that saves or costs."""
    for gradients in sums:
        difference = gradients.backend_seconds - gradients.seconds
        verb = "saves" if difference >= 0 else "costs"
        yield (
            f"{gradients.payload.subject.capitalize()} by {spoken(gradients.choice.algorithm)}: "
            f"{readable_seconds(gradients.seconds)} per step instead of {readable_seconds(gradients.backend_seconds)} "
            f"by the backend's own, {verb} {readable_seconds(abs(difference))} where nothing hides it."
        )


def headline(analysis: Analysis) -> str:
    """Three lines: what is priced, its layout, its batch."""
    job = analysis.job
    parameters = readable_count(analysis.parameters)
    active = f" ({readable_count(analysis.active_parameters)} active)" if job.model.moe else ""
    return (
        f"{job.model.name}: {parameters} parameters{active} on {device_words(job.cluster)} "
        f"({job.cluster.name})\n"
        f"{_layout(job)}\n"
        f"{counted(job.sequences, 'sequence')} of {job.training.seq:,} = {readable_count(job.tokens_per_step)} tokens "
        f"per step in {counted(job.microbatches, 'microbatch')} of {job.strategy.microbatch}"
    )


def _layout(job: Job) -> str:
    """The degrees in rank order, innermost first, and every choice that differs from its default."""
    strategy = job.strategy
    parts = [" × ".join(degree_words(strategy, name) for name in strategy.order)]
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


def _communication_table(analysis: Analysis) -> FittedTable | None:
    """What each dimension sends, in a line; None if nothing is sent."""
    rows = []
    for name in COMMUNICATION:
        if traffics := analysis.dimension_traffics(name):
            longest = max(traffics, key=lambda traffic: traffic.seconds)
            seconds = readable_seconds(sum(traffic.seconds for traffic in traffics))
            sent = readable_bytes(sum(traffic.bytes_sent for traffic in traffics))
            most = f"{longest.kind.value.replace('_', '-')} over {longest.network}"
            rows.append((DIMENSIONS[name], most, sent, seconds, readable_seconds(analysis.parts[name])))
    columns = ("dimension", "mostly", "bytes sent", "seconds", "exposed")
    title = "Communication per step of one device; exposed is what computation does not hide"
    return table(title, columns, rows, numbers_from=2, optional=("mostly",)) if rows else None


def _dimension_table(analysis: Analysis, name: str, traffics: tuple[Traffic, ...]) -> FittedTable:
    seconds, exposed = sum(traffic.seconds for traffic in traffics), analysis.parts[name]
    rank = f" on pipeline rank {analysis.dimension_rank(name)}" if analysis.job.strategy.pp > 1 else ""
    times = f"{readable_seconds(seconds)} per step{rank}, {readable_seconds(exposed)} exposed"
    title = f"{DIMENSIONS[name].capitalize()}: {times}"
    columns: dict[str, Callable[[Traffic], str]] = {
        "what": lambda traffic: traffic.what,
        "collective": lambda traffic: f"{traffic.kind.value.replace('_', '-')}, {spoken(traffic.cost.algorithm)}",
        "network": lambda traffic: traffic.network,
        "bytes": lambda traffic: readable_bytes(traffic.size_bytes),
        "times": lambda traffic: f"{traffic.count:,.0f}",
        "steps": lambda traffic: str(traffic.cost.steps),
        "latency": lambda traffic: readable_seconds(traffic.count * float(traffic.cost.latency_seconds)),
        "bandwidth": lambda traffic: readable_seconds(traffic.count * float(traffic.cost.bandwidth_seconds)),
        "seconds": lambda traffic: readable_seconds(traffic.seconds),
        "hidden": lambda traffic: readable_seconds(traffic.hidden_seconds),
        "exposed": lambda traffic: readable_seconds(traffic.added_seconds),
    }
    optional = ("steps", "latency", "bandwidth", "network", "hidden")
    return table_of(title, traffics, columns, numbers_from=3, optional=optional)


def _memory_table(analysis: Analysis) -> FittedTable:
    memory, room = analysis.memory, analysis.room
    usable = room.usable_bytes
    where = f" (fullest: pipeline rank {memory.pipeline_rank})" if analysis.job.strategy.pp > 1 else ""
    tight = "fits, but tight" if memory.total <= usable else "may fit"
    verdict = {"fits": "fits", "tight": tight, "does not fit": "DOES NOT FIT"}[analysis.fit]
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
    parts = [(STEP_WORDS[name], analysis.parts[name]) for name in STEP_PARTS if analysis.parts[name]]
    rows = [
        (what, bar(seconds / step), readable_seconds(seconds), readable_share(seconds / step))
        for what, seconds in (*parts, ("predicted step time", step))
    ]
    return table(title, ("part", "share of the step", "seconds", "share"), rows, numbers_from=2)


def _storage_table(assessment: Assessment) -> FittedTable:
    storage = assessment.storage
    size, rate = readable_bytes(storage.checkpoint_bytes), readable_rate(storage.data_bytes_per_second)
    title = f"Storage: a checkpoint is {size}, the data {rate}"
    columns: dict[str, Callable[[StorageCost], str]] = {
        "level": lambda level: level.name,
        "bandwidth": lambda level: readable_rate(level.bandwidth),
        "write": lambda level: readable_seconds(level.write_seconds),
        "read": lambda level: readable_seconds(level.read_seconds),
        "data needs": lambda level: readable_share(level.data_rate_share, 2),
    }
    return table_of(title, storage.levels, columns)


def _scaling_table(kind: str, scaled: Iterable[ScalingRow]) -> FittedTable:
    formula = "T1/(N·TN), fixed batch" if kind == "strong" else "T1/TN, batch grows with N"
    columns: dict[str, Callable[[ScalingRow], str]] = {
        "devices": lambda row: str(row.devices),
        "dp": lambda row: str(row.data_parallel),
        "sequences": lambda row: str(row.sequences),
        "step": lambda row: readable_seconds(row.predicted_seconds),
        "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
        "efficiency": lambda row: readable_share(row.efficiency),
        "exposed": lambda row: readable_share(row.exposed_share),
        "fits": lambda row: _FITS[row.fit],
    }
    return table_of(f"{kind.capitalize()} scaling ({formula})", scaled, columns, numbers_from=0)


def _rank_lines(places: Sequence[RankPlace]) -> Iterator[str]:
    """One plain line per rank: drawing a table of tens of thousands of rows would take longer than pricing the job."""
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


def analysis_data(assessment: Assessment) -> dict[str, Any]:
    """Everything `analyze` prints, keyed by name; bytes, seconds and FLOPs as numbers."""
    analysis = assessment.analysis
    data = {
        "job": analysis.job.to_dict(),
        "notes": list(analysis.notes),
        "devices": analysis.job.cluster.devices,
        **picked(analysis.job, "microbatches", "sequences", "tokens_per_step"),
        **picked(analysis, "parameters", "trained_parameters", "active_parameters"),
        "dimensions": {
            name: dimension_data(analysis, name) for name in COMMUNICATION if analysis.dimension_traffics(name)
        },
        "memory": _memory(analysis),
        "flops": {
            "per_token": {convention.name: analysis.flops_per_token(convention.name) for convention in CONVENTIONS},
            "per_step": analysis.flops_per_step(),
            "cluster_peak_per_second": analysis.peak_flops,
            **picked(analysis, "mfu", "mfu_ceiling"),
            "mfu_peak": analysis.job.training.recipe.compute,
        },
        "time": {
            "predicted_seconds": analysis.predicted_seconds,
            **picked(assessment, "predicted_seconds_low", "predicted_seconds_high"),
            **picked(analysis, "parts", "exposed_seconds", "exposed_share", "tokens_per_second", "floor_seconds"),
        },
        "storage": plain(assessment.storage),
        "bottleneck": bottleneck_sentence(analysis, assessment.bottleneck),
    }
    if assessment.gradient_times:
        data["gradient_sums"] = [
            {
                "what": gradients.payload.words,
                "algorithm": gradients.choice.algorithm,
                **picked(gradients, "seconds", "backend_seconds"),
            }
            for gradients in assessment.gradient_times
        ]
    if analysis.fits:
        data["best_change"] = None if assessment.best_change is None else _change(analysis.job, assessment.best_change)
    else:
        data["what_would_fit"] = assessment.what_would_fit
    if assessment.campaign is not None:
        data["campaign"] = campaign_data(assessment.campaign)
    asked_for = ("scaling", "topologies", "ranks")
    data |= picked(assessment, *(name for name in asked_for if getattr(assessment, name) is not None))
    if assessment.advice is not None:
        data["advice"] = {"file": assessment.advice.file, "changes": plain(assessment.advice.changes)}
    if assessment.memory_over_time is not None:
        from shardwise.report.memory_timeline import memory_over_time_data

        data["memory_over_time"] = memory_over_time_data(assessment.memory_over_time)
    return data


def _change(job: Job, change: Change) -> dict[str, Any]:
    return {
        "what": change_words(job.strategy, change.job.strategy),
        "strategy": change.job.strategy.to_dict(),
        **picked(change, "predicted_seconds", "exposed_share"),
        "memory_bytes": change.memory.total,
    }


def dimension_data(analysis: Analysis, name: str) -> dict[str, Any]:
    traffics = analysis.dimension_traffics(name)
    return {
        "pipeline_rank": analysis.dimension_rank(name),
        "seconds": sum(traffic.seconds for traffic in traffics),
        "exposed_seconds": analysis.parts[name],
        "bytes_sent": sum(traffic.bytes_sent for traffic in traffics),
        "levels": {
            level: {"busy_seconds": seconds, "bytes": size}
            for level, (seconds, size) in analysis.level_use(name).items()
        },
        "collectives": [_traffic(traffic) for traffic in traffics],
    }


def _traffic(traffic: Traffic) -> dict[str, Any]:
    cost = traffic.cost
    return {
        "what": traffic.what,
        "kind": traffic.kind.value,
        **picked(cost, "algorithm", "exact"),
        **picked(traffic, "network", "size_bytes", "count"),
        "steps": cost.steps,
        "latency_seconds": traffic.count * float(cost.latency_seconds),
        "bandwidth_seconds": traffic.count * float(cost.bandwidth_seconds),
        "seconds": traffic.seconds,
        "exposed_seconds": traffic.added_seconds,
        **picked(traffic, "slowed_seconds", "hidden_seconds", "bytes_sent"),
    }


def _memory(analysis: Analysis) -> dict[str, Any]:
    return {
        **analysis.memory.to_dict(),
        **picked(analysis.room, "usable_bytes", plannable_bytes="planned_bytes"),
        **picked(analysis, "fit", "fit_probability", memory_risk="job.run.memory_risk"),
        "left_bytes": analysis.room.usable_bytes - analysis.memory.total,
        **picked(analysis, by_pipeline_rank="memories"),
    }


def topology_tables(topologies: Sequence[PricedTopology]) -> Iterator[FittedTable]:
    longest = max(topology.predicted_seconds for topology in topologies)
    title = "The same job on other networks: all devices by the outermost link, or the cluster's hierarchy"
    columns = ("topology", "network", "", "step", "exposed", "fits")
    yield table(title, columns, [_row(topology, longest) for topology in topologies], numbers_from=3)
    for name in dict.fromkeys(name for topology in topologies for name in topology.dimensions):
        rows = [
            _dimension_row(topology, topology.dimensions[name])
            for topology in topologies
            if name in topology.dimensions
        ]
        columns = ("topology", "algorithm", "bytes sent", "seconds", "exposed", "memory")
        yield table(f"{DIMENSIONS[name].capitalize()} on each", columns, rows, numbers_from=2, optional=("algorithm",))


def _row(topology: PricedTopology, longest: float) -> tuple[Cell, ...]:
    step = readable_seconds(topology.predicted_seconds)
    share = bar(topology.predicted_seconds / longest, 20)
    return topology.topology, topology.network, share, step, readable_share(topology.exposed_share), _FITS[topology.fit]


def _dimension_row(topology: PricedTopology, own: DimensionOnNetwork) -> tuple[str, ...]:
    times = map(readable_seconds, (own.seconds, own.exposed_seconds))
    algorithms = "; ".join(map(spoken, own.algorithms))
    return topology.topology, algorithms, readable_bytes(own.bytes_sent), *times, readable_bytes(own.memory_bytes)


def topology_rows(topologies: Sequence[PricedTopology]) -> list[dict[str, Any]]:
    return [
        {
            "topology": topology.topology,
            "dimension": name,
            **{figure: value for figure, value in vars(own).items() if figure != "algorithms"},
            "predicted_seconds": topology.predicted_seconds,
        }
        for topology in topologies
        for name, own in topology.dimensions.items()
    ]


# -- the whole run: days, device hours, money, interruptions, checkpoints, goodput -------------------


SHARES = {
    "training": "training",
    "checkpoints": "writing checkpoints",
    "restarts": "restarts",
    "lost": "work lost to interruptions",
}


def campaign_pieces(run: Campaign) -> Iterator[FittedTable | str]:
    """The table of a whole run, and a note if no interruptions are counted."""
    tokens, rate = readable_count(run.tokens), f"{run.tokens_per_second:,.0f} tokens/s"
    title = f"The whole run: {tokens} tokens at {rate} on {counted(run.devices, 'device')}"
    yield table(title, ("part", "share of the run", "value", "share"), _rows(run), numbers_from=2)
    if math.isinf(run.between_interruptions):
        yield "No interruptions are counted: give --mtbf (50700h is what Llama 3 saw on 16,384 GPUs).\n"


def _rows(run: Campaign) -> Iterator[tuple[Cell, ...]]:
    shares = {name: share for name, share in run.shares.items() if share > 0}
    if len(shares) > 1:
        for name, share in shares.items():
            yield SHARES[name], bar(share), readable_duration(share * run.seconds), readable_share(share)
    yield "whole run, wall time", bar(1), readable_duration(run.seconds), "100.0%"
    yield "device-hours", "", readable_count(run.device_hours), ""
    if run.cost is not None:
        price = readable_money(run.price_per_device_hour or 0.0, run.currency)
        yield f"cost at {price} per device-hour", "", readable_money(run.cost, run.currency), ""
    if math.isfinite(run.between_interruptions):
        every = f"interruptions, one every {readable_duration(run.between_interruptions)}"
        yield every, "", f"{run.interruptions:,.{0 if run.interruptions >= 10 else 2}f}", ""
        yield "one restart", "", readable_duration(run.restart_seconds), ""
    if math.isfinite(run.interval):
        where = f" ({run.storage})" if run.storage else ""
        yield f"one checkpoint{where}", "", readable_duration(run.checkpoint_seconds), ""
        if run.interval != run.best_interval:
            yield "time between checkpoints", "", readable_duration(run.interval), ""
        if math.isfinite(run.best_interval):
            yield "best time between checkpoints", "", readable_duration(run.best_interval), ""
    yield "goodput", "", readable_share(run.goodput), ""


def campaign_data(run: Campaign) -> dict[str, Any]:
    """A whole run as plain data; infinite times (no interruptions, no checkpoints) are None."""
    return {
        **picked(run, "tokens", "tokens_per_second", "devices", "seconds", "days", "device_hours"),
        **picked(run, "price_per_device_hour", "cost"),
        "currency": None if run.cost is None else run.currency,
        **picked(run, "device_hours_per_interruption", seconds_between_interruptions="between_interruptions"),
        **picked(run, "interruptions", "checkpoint_seconds", checkpoint_storage="storage"),
        **picked(run, "restart_seconds", checkpoint_interval_seconds="interval", best_interval_seconds="best_interval"),
        **picked(run, "goodput", "shares"),
    }
