"""FLOPs, MFU, pipeline bubbles and scaling efficiency, explained with numbers."""

from __future__ import annotations

from shardwise.cost.compute.flops import CONVENTIONS, flops_per_token, flops_symbols
from shardwise.cost.traffic.pipeline import bubble_share
from shardwise.pipeline import bubble_formula, build, draw_timeline, equal_stages, simulate
from shardwise.report.console import bar
from shardwise.report.explain.explanation import (
    Explanation,
    Formula,
    GridTable,
    flop_rate,
    flops,
    number,
    seconds,
    share,
)
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count
from shardwise.spec.schedules import schedule_record, schedule_records
from shardwise.spec.units import counted, readable_count

_MOST_DRAWN = 256  # passes of one kind


def explain_flops(model: Model, seq: int, tokens: float, device: Device) -> Explanation:
    """Training FLOPs by every published convention."""
    peak = device.peak_flops("bf16")
    total = parameter_count(model)
    per_token = [(convention, flops_per_token(model, seq, convention.name)) for convention in CONVENTIONS]
    rows = tuple(
        (convention.name, convention.formula, flops(each), flops(each * tokens), seconds(each * tokens / peak))
        for convention, each in per_token
    )
    columns = {
        "convention": "convention",
        "formula": "formula",
        "f, FLOPs/token": "flops_per_token",
        "FLOPs in all": "flops",
        "one device at peak": "one_device_at_peak_seconds",
    }
    return Explanation(
        title=f"Training FLOPs of {model.name} at sequence length {seq}",
        formula=("FLOPs in all = f·T", "one device at peak = f·T/P"),
        numbers=(
            ("", "parameters", number(total, readable_count(total))),
            *(
                (symbol, meaning, number(value, readable_count(value) if value >= 1e6 else ""))
                for symbol, meaning, value in flops_symbols(model, seq)
            ),
            ("T", "tokens trained on", number(tokens, readable_count(tokens))),
            ("P", f"peak of one {device.name}, bf16", flop_rate(peak)),
        ),
        tables=(GridTable("by convention", columns, rows, words=2),),
        remarks=(
            "Forward: 2 FLOPs per weight and token, plus attention; backward: twice the forward pass.",
            "MFU divides model FLOPs by peak × time, idle time included; recomputed FLOPs count only in HFU.",
            "Conventions differ by causal attention (counted once or fully) and by the embedding: convert, never mix.",
        ),
        source=tuple(f"{c.name}: {c.source}" for c in CONVENTIONS),
    )


def explain_bubble(stages: int, microbatches: int, chunks: int, *, drawn: str | None = None) -> Explanation:
    """The bubble of every pipeline schedule if all passes take equally long, and the timeline of the ``drawn`` one."""
    rows, left_out = [], []
    for record in schedule_records():
        if record.in_jobs and microbatches % record.rounds(stages):
            left_out.append(f"{record.name} takes multiples of {record.rounds(stages)} microbatches.")
        elif record.in_jobs:
            idle = bubble_share(record.name, stages, microbatches, chunks)
            rows.append(
                (
                    record.name,
                    bubble_formula(record),
                    bar(idle, 16),
                    record.source,
                    share(idle),
                    share(idle / (1 + idle)),
                )
            )
    columns = {
        "schedule": "schedule",
        "formula": "formula",
        "": "",
        "activations it keeps, by": "source",
        "x, of busy time": "share_of_busy_time",
        "of the step": "share_of_the_step",
    }
    return Explanation(
        title=f"Pipeline bubble of {counted(stages, 'stage')} and {counted(microbatches, 'microbatch')}",
        formula=("of the step = x/(1 + x)",),
        numbers=(
            ("p", "stages", number(stages)),
            ("m", "microbatches", number(microbatches)),
            ("v", "chunks per rank (interleaved)", number(chunks)),
        ),
        tables=(GridTable("by schedule", columns, tuple(rows), words=4),),
        remarks=(
            "All passes take equally long: forward, input gradient and weight gradient; messages take no time. A "
            "schedule without a formula is simulated.",
            "Unequal stages and communication between stages need a simulation of the schedule's actions.",
            *left_out,
        ),
        drawing=_timeline(drawn, stages, microbatches, chunks) if drawn else "",
        source=(
            "Narayanan et al. 2021 (arXiv 2104.04473), section 2.2",
            "Qi et al. 2023 (arXiv 2401.10241); Qi et al. 2024 (arXiv 2405.15362); DeepSeek DualPipe README",
        ),
    )


def _timeline(name: str, stages: int, microbatches: int, chunks: int) -> str:
    if stages * microbatches > _MOST_DRAWN:
        problem = f"{stages} stages × {microbatches} microbatches are too many to draw"
        raise SpecError("--schedule", problem, "use fewer, such as --pp 4 --microbatches 8")
    schedule = build(name, stages, microbatches, chunks if schedule_record(name).chooses_chunks else None)
    return draw_timeline(simulate(schedule, equal_stages(schedule.stages)))


def explain_mfu(job: Job, step_seconds: float, model_flops: float, recomputed: float) -> Explanation:
    """Model and hardware FLOPs utilisation of a measured step."""
    devices, data_type = job.cluster.devices, job.training.recipe.compute
    peak = job.cluster.device.peak_flops(data_type)
    values = {"F": model_flops, "R": recomputed, "t": step_seconds, "N": devices, "p": peak}
    formulas = tuple(
        Formula(f"{name}, of the {data_type} peak", text)
        for name, text in (("MFU", "F/(t·N·p)"), ("HFU", "(F + R)/(t·N·p)"))
    )
    mfu = formulas[0].value(values)
    return Explanation(
        title="Model FLOPs utilisation",
        formula=tuple(map(str, formulas)),
        numbers=(
            ("F", "model FLOPs of one step", flops(model_flops)),
            ("R", "recomputed FLOPs of one step", flops(recomputed)),
            ("t", "seconds of one step", seconds(step_seconds)),
            ("N", "devices", number(devices)),
            ("p", f"peak of one device, {data_type}", flop_rate(peak)),
        ),
        result=tuple((formula.name, share(formula.value(values))) for formula in formulas),
        remarks=("More than the peak: check the step time, the batch and the devices.",) if mfu > 1 else (),
        source=("Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B",),
    )


def explain_scaling(devices: int, first_seconds: float, strong_seconds: float, weak_seconds: float) -> Explanation:
    """Strong and weak scaling efficiency from step times."""
    strong = Formula("strong-scaling efficiency", "T1/(N·T_s)")
    weak = Formula("weak-scaling efficiency", "T1/T_w")
    values = {"N": devices, "T1": first_seconds, "T_s": strong_seconds, "T_w": weak_seconds}
    return Explanation(
        title="Scaling efficiency",
        formula=(str(strong), str(weak)),
        numbers=(
            ("N", "how many times as many devices", number(devices)),
            ("T1", "step on the smaller machine", seconds(first_seconds)),
            ("T_s", "step on the larger machine, same batch", seconds(strong_seconds)),
            ("T_w", "step on the larger machine, N times the batch", seconds(weak_seconds)),
        ),
        result=tuple((formula.name, share(formula.value(values))) for formula in (strong, weak)),
        source=("Amdahl 1967; Gustafson 1988",),
    )
