"""An analysis as text: one table per dimension, memory, arithmetic, and the sentence that names the bottleneck."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from shardwise.cost.analysis import Analysis
from shardwise.cost.campaign import Campaign
from shardwise.cost.flops import flops_per_token
from shardwise.cost.memory.room import tight_words
from shardwise.cost.own_schedules import gradient_times
from shardwise.cost.scaling import scaling_table
from shardwise.cost.step_parts import COMMUNICATION, STEP_PARTS
from shardwise.cost.storage import checkpoint_bytes, data_rate, storage_costs
from shardwise.cost.traffic import Traffic
from shardwise.cost.validation.residuals import error_bar
from shardwise.cost.verdict import EXPOSED_LIMIT, best_change, bottleneck
from shardwise.layout.mesh import rank_places
from shardwise.planner.describe import less_communication_words
from shardwise.planner.remedy import what_would_fit
from shardwise.report.campaign import campaign_lines
from shardwise.report.console import bar, console, spoken, table
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

_TITLES = {
    "tp": "Tensor parallel",
    "cp": "Context parallel",
    "ep": "Expert parallel",
    "pp": "Pipeline parallel",
    "dp": "Data parallel",
    "offload": "Offload",
}
_PART_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "recomputed": "recomputed layer",
    "gathered": "gathered layers",
    "communication": "communication buffers",
    "temporary": "logits, temporary",
    "allowance": "framework (allowance)",
}
_STEP_WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "memory-bound": "memory-bound operators",
    "launches": "kernel launches",
    "recompute": "recomputed operators",
    **{name: f"exposed {name} communication" for name in COMMUNICATION},
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "overhead": "fixed cost of a step",
}


def print_analysis(
    analysis: Analysis, *, scaling: bool = False, ranks: bool = False, campaign: Campaign | None = None
) -> None:
    """Prints everything `analyze` has to say."""
    out = console()
    out.print(_headline(analysis), markup=False)
    for note in analysis.notes:
        out.print(f"note: {note}", style="yellow", markup=False)
    for name in COMMUNICATION:
        traffics = analysis.dimension_traffics(name)
        if traffics:
            out.print(_dimension_table(analysis, name, traffics))
    out.print(_memory_table(analysis))
    out.print(_time_table(analysis))
    if analysis.job.cluster.storage:
        out.print(_storage_table(analysis))
    if campaign is not None:
        for piece in campaign_lines(campaign):
            out.print(piece)
    if scaling:
        for kind in ("strong", "weak"):
            out.print(_scaling_table(analysis, kind))
    if ranks:
        print("\n".join(_rank_lines(analysis)))
    for line in collective_lines(analysis):
        out.print(line, markup=False)
    for line in verdict_lines(analysis):
        out.print(line, style="bold", markup=False)
    out.print(f"Error bars hold 80% of published runs. {error_bar(analysis.job).basis.capitalize()}.", markup=False)


def collective_lines(analysis: Analysis) -> Iterator[str]:
    """What sums the gradients where it is not the backend's own collective, and what that saves or costs."""
    for one in gradient_times(analysis):
        difference = one.backend_seconds - one.seconds
        verb = "saves" if difference >= 0 else "costs"
        yield (
            f"{one.what.partition(',')[0].capitalize()} by {spoken(one.choice.algorithm)}: "
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


def _dimension_table(analysis: Analysis, name: str, traffics: tuple[Traffic, ...]) -> RenderableType:
    seconds, exposed = sum(traffic.seconds for traffic in traffics), analysis.parts[name]
    rank = f" on pipeline rank {analysis.dimension_rank(name)}" if analysis.job.strategy.pp > 1 else ""
    title = f"{_TITLES[name]}: {readable_seconds(seconds)} per step{rank}, {readable_seconds(exposed)} exposed"
    columns = (
        "what",
        "collective",
        "network",
        "bytes",
        "times",
        "steps",
        "latency",
        "bandwidth",
        "seconds",
        "hidden",
        "exposed",
    )
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


def _memory_table(analysis: Analysis) -> RenderableType:
    memory, room = analysis.memory, analysis.room
    usable = room.usable_bytes
    where = f" (fullest: pipeline rank {memory.pipeline_rank})" if analysis.job.strategy.pp > 1 else ""
    verdict = {"fits": "fits", "tight": "fits, but tight", "does not fit": "DOES NOT FIT"}[analysis.fit]
    title = f"Memory of one device{where}: {readable_bytes(memory.total)} of {readable_bytes(usable)}, {verdict}"
    free = usable - memory.total
    sizes = [(_PART_WORDS[part], getattr(memory, part)) for part in memory.PARTS if getattr(memory, part)]
    sizes.append(("free" if free >= 0 else "missing", abs(free)))
    rows = [(name, bar(size / usable), readable_bytes(size), readable_share(size / usable)) for name, size in sizes]
    if free >= 0:
        rows.append(
            (
                "of which plans keep free",
                "",
                readable_bytes(room.margin_bytes),
                readable_share(room.margin_bytes / usable),
            )
        )
    if memory.host:
        rows.append(("offloaded to host", "", readable_bytes(memory.host), ""))
    return table(title, ("part", "share of the device", "bytes", "share"), rows, numbers_from=2)


def _time_table(analysis: Analysis) -> RenderableType:
    job, step, bar_of_runs = analysis.job, analysis.predicted_seconds, error_bar(analysis.job)
    per_token = flops_per_token(job.model, job.training.seq)
    title = (
        f"One step: {readable_flops(analysis.flops_per_step())} "
        f"({readable_flops(per_token)} per token, causal attention counted once)"
    )
    parts = [(_STEP_WORDS[name], analysis.parts[name]) for name in STEP_PARTS if analysis.parts[name]]
    rows = [
        (what, bar(seconds / step), readable_seconds(seconds), readable_share(seconds / step))
        for what, seconds in (*parts, ("predicted step time", step))
    ]
    low, high = (readable_seconds(step * (1 + part)) for part in (bar_of_runs.time_low, bar_of_runs.time_high))
    rows.append(("80% of published runs", "", f"{low} - {high}", ""))
    rows.append(("tokens/s", "", f"{analysis.tokens_per_second:,.0f}", ""))
    rows.append((f"MFU, of the {job.training.recipe.compute} peak", "", readable_share(analysis.mfu), ""))
    rows.append(("floor, all matmuls at peak", "", readable_seconds(analysis.floor_seconds), ""))
    return table(title, ("part", "share of the step", "value", "share"), rows, numbers_from=2)


def _storage_table(analysis: Analysis) -> RenderableType:
    size, rate = readable_bytes(checkpoint_bytes(analysis)), readable_rate(data_rate(analysis))
    title = f"Storage: a checkpoint is {size}, the data {rate}"
    rows = [
        (
            cost.name,
            readable_rate(cost.bandwidth),
            readable_seconds(cost.write_seconds),
            readable_seconds(cost.read_seconds),
            readable_share(cost.data_rate_share, 2),
        )
        for cost in storage_costs(analysis)
    ]
    return table(title, ("level", "bandwidth", "write", "read", "data needs"), rows)


def _scaling_table(analysis: Analysis, kind: str) -> RenderableType:
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
        for row in scaling_table(analysis.job, kind)
    ]
    columns = ("devices", "dp", "sequences", "step", "tokens/s", "efficiency", "exposed", "fits")
    return table(f"{kind.capitalize()} scaling ({formula})", columns, rows, numbers_from=0)


def _rank_lines(analysis: Analysis) -> Iterator[str]:
    """One plain line per rank: a table of tens of thousands of rows would take longer to draw than to price."""
    places = rank_places(analysis.job)
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


def verdict_lines(analysis: Analysis) -> Iterator[str]:
    """What bounds the job, what communication it waits for, and the one change that helps most, if there is one."""
    yield bottleneck(analysis)
    if analysis.fit == "does not fit":
        yield f"  What would fit: {what_would_fit(analysis.job)}."
        return
    if analysis.fit == "tight":
        yield f"▲ Memory is {tight_words(analysis.job)}."
    share = analysis.exposed_share
    over = f", above {EXPOSED_LIMIT:.0%}" if share > EXPOSED_LIMIT else ""
    yield f"{'▲ ' if over else ''}Exposed communication: {share:.0%} of the predicted step{over}."
    change = best_change(analysis)
    if change is None:
        yield "No single change of the strategy makes the step 1% shorter and fits."
        return
    gain = 1 - change.seconds_per_token * analysis.job.tokens_per_step / analysis.predicted_seconds
    step = f"{readable_seconds(change.predicted_seconds)} instead of {readable_seconds(analysis.predicted_seconds)}"
    yield (
        f"What helps most: {change.what} (step {step}, {gain:.0%} less; exposed {change.exposed_share:.0%}; "
        f"{readable_bytes(change.memory.total)})."
    )
