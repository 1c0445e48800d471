"""What the verbs that run the engine measured, as pages: a dry run, a verification, a calibration, generated text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardwise.cost.memory.room import room_of
from shardwise.measure.dryrun.result import PARTS, TOLERANCE, Calls, Compared, DryRun, Holder
from shardwise.planner.candidate import strategy_words
from shardwise.report.console import picked, table, table_of
from shardwise.report.page import Line, Piece, paged
from shardwise.report.verdict import MEMORY_PARTS
from shardwise.spec.efficiency import MODES, PASSES, EngineKernels
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.network import NetworkLevel
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_change,
    readable_count,
    readable_flops,
    readable_rate,
    readable_seconds,
    readable_share,
)

if TYPE_CHECKING:
    from shardwise.generation.request import Generation
    from shardwise.measure.calibrate.run import Calibration
    from shardwise.measure.recut import Recut
    from shardwise.measure.verify import Verification


_MOST_HOLDERS = 8


_HOLDERS: dict[str, Callable[[Holder], str]] = {
    "part": lambda holder: MEMORY_PARTS[holder.part],
    "made by": lambda holder: holder.operator,
    "in": lambda holder: holder.made_in,
    "number": lambda holder: str(holder.number),
    "bytes each": lambda holder: readable_bytes(holder.bytes),
}
_CALLS: dict[str, Callable[[Calls], str]] = {
    "": lambda calls: calls.line.dimension,
    "collective": lambda calls: calls.line.kind.replace("_", "-"),
    "what": lambda calls: calls.line.what + ("" if calls.line.peer is None else f" (rank {calls.line.peer})"),
    "ranks": lambda calls: str(calls.line.ranks),
    "calls": lambda calls: readable_count(calls.count),
    "bytes": lambda calls: readable_bytes(calls.bytes),
}


@paged
def dry_run_page(trace: DryRun) -> Iterator[Piece | str]:
    strategy = trace.job.strategy
    place = " ".join(f"{name} {trace.coordinates[name]}" for name in strategy.order if strategy.degree(name) > 1)
    where = f"rank {trace.rank} of {strategy.world:,}" + (f" ({place})" if place else "")
    yield f"{trace.job.model.name}: {where}; traced {trace.traced}"
    parts = [(MEMORY_PARTS[part], trace.peak[part], trace.planned_peak[part]) for part in PARTS]
    shown = [part for part in parts if any(part[1:])] + [("all tensors", trace.peak_bytes, trace.planned_peak_bytes)]
    rows = [(name, readable_bytes(traced), readable_bytes(planned)) for name, traced, planned in shown]
    yield table(f"Memory at its peak: {trace.peak_place}", ("part", "traced", "planned"), rows)
    largest = trace.holders[:_MOST_HOLDERS]
    yield table_of("The largest tensors at the peak of what was traced", largest, _HOLDERS, numbers_from=3)
    yield table_of("Collectives of a step", trace.calls, _CALLS, numbers_from=3)
    cells = [(*_words(figure), "defect" if figure.defect else "") for figure in trace.compared if not figure.negligible]
    yield table("Beside the plan", ("", "planned", "traced", "difference", ""), cells)
    if not trace.fits:
        needed, usable = readable_bytes(trace.needed_bytes), readable_bytes(room_of(trace.job).usable_bytes)
        problem = f"with the allowance for the framework the rank needs {needed}, a device has {usable}"
        yield Line(f"Does not fit: {problem}.", "bold")
    if not trace.defects:
        yield Line(f"Bytes, memory and FLOPs agree with the plan to {TOLERANCE:.0%}.", "bold")
    for what, planned, traced, difference in map(_words, trace.defects):
        problem = f"{what} is {traced}, planned {planned} ({difference})"
        yield Line(f"Defect in the engine or the plan: {problem}.", "bold")


def _words(figure: Compared) -> tuple[str, str, str, str]:
    """What it is, planned, traced, and the difference."""
    readable = readable_flops if figure.unit == "FLOPs" else readable_bytes
    difference = readable_change(figure.difference) if isfinite(figure.difference) else "not planned"
    return figure.what.replace("_", "-"), readable(figure.planned), readable(figure.traced), difference


def dry_run_data(trace: DryRun) -> dict[str, Any]:
    """What `dryrun` prints; bytes of one step, on one rank."""
    return {
        **picked(trace, "job", "rank", world="job.strategy.world"),
        **picked(trace, "coordinates", "traced", "seconds"),
        "ok": not trace.defects,
        "fits": trace.fits,
        "memory": {
            **picked(trace, "peak_bytes", place="peak_place", parts="peak"),
            **picked(trace, planned_bytes="planned_peak_bytes", planned_parts="planned_peak"),
            "largest": [vars(holder) for holder in trace.holders[: 4 * _MOST_HOLDERS]],
        },
        "collectives": [{**vars(calls.line), "count": calls.count, "bytes": calls.bytes} for calls in trace.calls],
        "flops": picked(trace, traced="flops", planned="planned_flops"),
        "compared": [
            picked(figure, "what", "planned", "traced", "difference", "negligible", "defect")
            for figure in trace.compared
        ],
    }


# -- a verification, and its progress ----------------------------------------------------------------


_WORDS = {"loss": "loss", "gradient": "gradients", "weight": "weights at the end", "gradient_norm": "gradient norm"}


@paged
def verification_page(asked: Job, verification: Verification) -> Iterator[Piece | str]:
    """How the job that ran differs from the one asked for, then a table of the worst deviations."""
    run = verification.job
    if run.strategy.world != asked.strategy.world:
        yield f"{asked.strategy.world} ranks are reduced to {run.strategy.world}: {_degrees(run)}, the same order."
    if run.model != asked.model:
        yield (f"{asked.model.name} is shrunk to {counted(run.model.layers, 'layer')} of {run.model.hidden} features.")
    if asked.training.precision != run.training.precision and not verification.in_fp8:
        yield f"Precision is {run.training.precision}: {asked.training.precision} would hide differences."
    words = strategy_words(run.strategy)
    title = f"{run.model.name}, {words}, against one process, {counted(verification.steps, 'step')}"
    rows = [
        (
            _WORDS[kind],
            f"{deviation.value:.1e}",
            "equal" if deviation.value <= verification.tolerance else "DIFFERS",
            deviation.where,
        )
        for kind, deviation in verification.worst.items()
    ]
    yield table(title, ("", "worst deviation", "", "where"), rows, numbers_from=9)
    if verification.in_fp8:
        yield _narrow(asked, verification)
    verdict = (
        "The layout computes what one process computes" if verification.ok else "The layout computes a different result"
    )
    yield (
        f"{verdict}: tolerance {verification.tolerance:g}, relative to the largest element of each tensor, "
        "or one rounding of the largest in its layer."
    )


def _narrow(asked: Job, verification: Verification) -> Piece:
    from shardwise.measure.verify import FP8_BOUNDS

    title = f"the same layout in {asked.training.precision}, against one process in fp32"
    rows = [
        (
            _WORDS[kind],
            f"{deviation.value:.1e}",
            f"{FP8_BOUNDS[kind]:g}",
            "within" if deviation.value <= FP8_BOUNDS[kind] else "OFF",
            deviation.where,
        )
        for kind, deviation in verification.in_fp8.items()
    ]
    return table(title, ("", "deviation", "bound", "", "where"), rows, numbers_from=9)


@contextmanager
def verification_progress(steps: int, shown: bool) -> Iterator[Callable[[str, Callable[[], int]], None]]:
    """Progress bars on standard error, if it is a terminal; removed when the processes are done."""
    if not (shown and sys.stderr.isatty()):
        yield lambda phase, done: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    with _Counting(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:

        def watch(phase: str, done: Callable[[], int]) -> None:
            bars.counts[bars.add_task(phase, total=steps, count="starting")] = done

        yield watch


class _Counting(Progress):
    """Progress bars that ask every phase for its count whenever they are drawn."""

    def __init__(self, *columns: ProgressColumn, **settings: Any) -> None:
        self.counts: dict[TaskID, Callable[[], int]] = {}
        super().__init__(*columns, **settings)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task, count in list(self.counts.items()):
            done = count()
            if done:
                self.update(task, completed=done, count=f"{done} of {self.tasks[task].total:g} steps")
        yield from super().get_renderables()


def _degrees(job: Job) -> str:
    degrees = {name: job.strategy.degree(name) for name in job.strategy.order} | {"ep": job.strategy.ep}
    used = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return " × ".join(used) or "one rank"


# -- a calibration, and a rebalanced pipeline --------------------------------------------------------


@paged
def calibration_page(calibration: Calibration, before: Cluster, written: Path) -> Iterator[Piece | str]:
    yield table("Device", ("", "before", "measured"), _device_rows(before, calibration.cluster))
    own = calibration.cluster.device.efficiency.own
    if own is not None:
        yield table("Our engine's kernels", ("", "eager", "compiled"), _mode_rows(own))
        yield table("", ("", "measured"), _engine_rows(own))
    pairs = [(old, new) for old, new in zip(before.levels, calibration.cluster.levels) if new.width > 1]
    if pairs:
        yield table_of("Network", (level for pair in pairs for level in _levels(*pair)), _LEVEL_COLUMNS, numbers_from=2)
    rows = [
        (
            residual.what,
            str(residual.figures),
            readable_share(residual.median_error),
            readable_share(residual.worst_error),
        )
        for residual in calibration.residuals
    ]
    if rows:
        yield table("How well the model explains what was measured", ("", "figures", "median", "worst"), rows)
    for slow in calibration.far_off:
        yield f"Slow: {slow}."
    yield f"Written: {written}. shardwise plan --cluster {written} plans with it."


def _device_rows(before: Cluster, after: Cluster) -> list[tuple[str, str, str]]:
    measured_kernels = after.device.efficiency.own is not None  # these have a table of their own

    def shown(cluster: Cluster) -> list[tuple[str, str]]:
        device, own = cluster.device, cluster.device.efficiency
        data_type = "bf16" if device.vendor != "generic" else "fp32"
        reached = device.peak_flops(data_type) * own.gemm_share(data_type)
        rows = [
            (f"large matmuls, {data_type}", f"{readable_flops(reached)}/s"),
            ("inner dimension at half that rate", f"{own.gemm_rolloff:.0f}"),
            ("attention, forward", f"{readable_flops(own.attention_forward * device.peak_flops(data_type))}/s"),
            ("per attention score, beside the matmuls", readable_flops(own.score_flops)),
            ("memory", readable_rate(device.memory_bandwidth * own.memory)),
            ("fixed cost of a step", readable_seconds(own.step_seconds)),
            ("compute units taken by overlapped collectives", f"{device.units_taken.collectives:.0%}"),
        ]
        if not measured_kernels:
            rows.append(("elementwise traffic, times the minimum", f"{own.elementwise_traffic:.2f}"))
            rows.append(("kernel launch", readable_seconds(own.operator_seconds)))
        if device.vendor != "generic":
            rows.append(("matmuls slowed down by the power limit, at most", f"{own.power_slowdown - 1:.0%}"))
        rows.append(("host memory, copies", readable_rate(cluster.host.copied_bytes)))
        rows.append(("optimizer on the host", f"{cluster.host.updates / 1e9:.3g}B parameters/s"))
        for out, way in ((False, "read"), (True, "written")) if cluster.storage else ():
            first = cluster.storage[0]
            rows.append((f"{first.name}, {way}", readable_rate(first.bandwidth(1, out=out))))
        return rows

    return [(name, old, new) for (name, old), (_, new) in zip(shown(before), shown(after))]


def _mode_rows(own: EngineKernels) -> list[tuple[str, str, str]]:
    rows = [
        (f"{name}, times the bytes of one kernel", f"{own.eager.get(name, 1):.1f}", f"{own.compiled.get(name, 1):.1f}")
        for name in PASSES
    ]
    for name, seconds in (
        ("kernel start-up of a layer, on the device", own.device_starts),
        ("kernel launches of a layer, on the host", own.host_launches),
    ):
        eager, compiled = (readable_seconds(seconds(mode, rotary=True, moe=False)) for mode in MODES)
        rows.append((name, eager, compiled))
    eager, compiled = (f"{own.routing.get(mode, 0.0):.1f}" for mode in MODES)
    rows.append(("sorting tokens by expert, times one read and write", eager, compiled))
    return rows


def _engine_rows(own: EngineKernels) -> list[tuple[str, str]]:
    rows = [
        ("optimizer, times the bytes of its states", f"{own.update_traffic:.2f}"),
        ("loss, times 10 bytes of a logit", f"{own.loss_traffic:.2f}"),
        ("sliding-window attention, speed relative to full", f"{own.windowed_attention:.2f}"),
        ("attention with capped scores, speed relative to full", f"{own.capped_attention:.2f}"),
    ]
    rows += [(f"FP8 matmuls, a scale per {name}", f"{share:.0%} of the peak") for name, share in own.scaled.items()]
    return rows


def _levels(before: NetworkLevel, after: NetworkLevel) -> Iterator[tuple[str, NetworkLevel]]:
    yield "before", before
    yield "backend", after
    if after.schedules is not None:
        yield "our schedules", after.run_by_schedules()


_LEVEL_COLUMNS: dict[str, Callable[[tuple[str, NetworkLevel]], str]] = {
    "level": lambda row: row[1].name,
    "collectives": lambda row: row[0],
    "bandwidth": lambda row: readable_rate(row[1].bandwidth_per_direction * row[1].reached_share),
    "latency of a step": lambda row: readable_seconds(row[1].latency_per_step),
    "latency of a call": lambda row: readable_seconds(row[1].startup),
    "half the bandwidth at": lambda row: readable_bytes(row[1].ramp),
}


SLOW = 1.1  # times the median rank's time for a layer: faster ranks are not mentioned


@paged
def recut_page(recut: Recut, written: Path) -> Iterator[Piece | str]:
    before, after = recut.layers
    rows = [
        (str(stage), str(old), str(new), f"{new - old:+d}" if new != old else "")
        for stage, (old, new) in enumerate(zip(before, after))
    ]
    yield table("Layers of every stage", ("stage", "measured run", "new cut", ""), rows)
    slow = [(rank, times) for rank, times in enumerate(recut.slowness) if times >= SLOW]
    if slow:
        words = ", ".join(f"rank {rank} {times:.2f} times" for rank, times in slow)
        yield f"Slow ranks, by time for a layer against the median rank: {words}."
    if recut.job.strategy.order != recut.old.strategy.order:
        order = ", ".join(recut.job.strategy.order)
        yield f"Ranks are moved: order [{order}] puts slow ranks into the same stages."
    if recut.job == recut.old:
        yield "The stages are as even as whole layers allow: no other split is faster."
    else:
        old, new = readable_seconds(recut.step_seconds), readable_seconds(recut.expected_seconds)
        yield f"Step time {old} → {new} expected, {recut.gain:.2f} times faster."
    yield f"Written: {written}"


# -- generated text: on a terminal as it comes, and as a page ----------------------------------------


OnText = Callable[[int, str], None]


@paged
def generation_page(generation: Generation) -> Iterator[Piece | str]:
    """Every text, numbered if there are several, then how fast they came."""
    for number, (result, text) in enumerate(zip(generation.results, generation.texts), 1):
        if len(generation.results) > 1:
            yield Line(f"prompt {number}", style="bold")
        # Nothing is folded: it is the model's text, to be copied.
        yield Line(" ".join(map(str, result.tokens)) if text is None else text, fixed=True)
    yield figures(generation)


def figures(generation: Generation) -> str:
    times = generation.times
    where = "" if generation.out is None else f" -> {generation.out}"
    ranks = "" if generation.tp == 1 else f" on {generation.tp} ranks"
    return (
        f"{counted(generation.prompts, 'prompt')}{where}, {counted(times.tokens, 'token')} "
        f"by {generation.model}{ranks}: "
        f"{times.tokens_per_second:.1f} tokens/s, first token after {times.first_token_seconds:.3f} s "
        f"(weights read in {times.load_seconds:.1f} s)"
    )


@contextmanager
def shown_text(prompts: list[str], *, shown: bool) -> Iterator[OnText | None]:
    """Yields a function to call with every piece of text, or None unless standard output is a terminal.

    The text of a single prompt is printed as it grows. Several prompts get a line each, which shows the end of their
    text; the lines are removed at the end, since the page has the texts.
    """
    if not shown or not sys.stdout.isatty():
        yield None
        return
    console = Console(highlight=False)
    if len(prompts) == 1:
        waiting = [Text(prompts[0], style="dim")]  # printed with the first piece: errors come before it

        def write(number: int, piece: str) -> None:
            while waiting:
                console.print(waiting.pop(), end="", soft_wrap=True)
            console.print(Text(piece), end="", soft_wrap=True)

        yield write
        console.print()
        return
    texts = ["" for _ in prompts]

    def drawn() -> Group:
        width = max(20, console.width - 5)
        lines = (text.replace("\n", " ")[-width:] for text in texts)
        return Group(*(Text(f"{number:>3} {line}", no_wrap=True) for number, line in enumerate(lines, 1)))

    def add(number: int, piece: str) -> None:
        texts[number] += piece

    with Live(get_renderable=drawn, console=console, transient=True, refresh_per_second=10):
        yield add
