"""What one device holds and computes, explained with numbers: ZeRO, activations, FLOPs, MFU, bubbles."""

from __future__ import annotations

from shardwise.cost.compute.flops import CONVENTIONS, flops_per_token, flops_symbols
from shardwise.cost.memory.activations import (
    embedding_activation_bytes,
    head_activation_bytes,
    layer_activation_bytes,
    layer_saved_tensors,
)
from shardwise.cost.memory.states import state_bytes
from shardwise.cost.traffic.pipeline import bubble_share
from shardwise.pipeline import bubble_formula, build, draw_timeline, equal_stages, simulate
from shardwise.report.console import bar
from shardwise.report.explain.explanation import (
    Explanation,
    Formula,
    GridTable,
    Quantity,
    flop_rate,
    flops,
    number,
    seconds,
    share,
    size,
)
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count
from shardwise.spec.schedules import schedule_record, schedule_records
from shardwise.spec.training import OPTIMIZERS, RECIPES
from shardwise.spec.units import counted, readable_count, readable_decimal_bytes

# -- ZeRO and activations ----------------------------------------------------------------------------


def explain_zero(parameters: float, shards: int, precision: str, optimizer: str) -> Explanation:
    recipe, states = RECIPES[precision], OPTIMIZERS[optimizer]
    weight, gradient = recipe.weight + recipe.copies, recipe.gradient
    kept = recipe.master + states.matrices
    formulas = (
        f"({weight:g} + {gradient:g} + {kept:g})·P",
        f"({weight:g} + {gradient:g})·P + {kept:g}·P/N",
        f"{weight:g}·P + ({gradient:g} + {kept:g})·P/N",
        f"({weight:g} + {gradient:g} + {kept:g})·P/N",
    )
    whole = state_bytes(parameters, precision=precision, optimizer=optimizer).total
    rows = []
    for stage, formula in enumerate(formulas):
        part = state_bytes(parameters, precision=precision, optimizer=optimizer, zero=stage, shards=shards)
        held = (part.weights, part.gradients, part.optimizer, part.total)
        sizes = (Quantity(value, "bytes", readable_decimal_bytes(value)) for value in held)  # decimal, as in the paper
        rows.append((f"ZeRO-{stage}" if stage else "none", formula, bar(part.total / whole, 24), *sizes))
    parts = {name: f"{name}_bytes" for name in ("weights", "gradients", "optimizer", "total")}
    columns = {"stage": "stage", "formula": "formula", "": "", **parts}
    return Explanation(
        title=f"Model states of {readable_count(parameters)} parameters over {counted(shards, 'device')} "
        f"({precision}, {optimizer})",
        formula=("total = weights + gradients + optimizer",),
        numbers=(
            ("P", "parameters", number(parameters)),
            ("N", "devices that share the states", number(shards)),
            ("", f"bytes per parameter: weights ({recipe.name})", number(weight)),
            ("", "bytes per parameter: gradients", number(gradient)),
            ("", "bytes per parameter: master weights", number(recipe.master)),
            ("", f"bytes per parameter: {optimizer} states", number(states.matrices)),
        ),
        tables=(GridTable("bytes of one device", columns, tuple(rows), words=3),),
        remarks=(
            "These already hold weights, gradients and optimizer states; activations come on top.",
            "ZeRO divides states, never activations.",
            "Stages 1 and 2 move the bytes of one all-reduce, stage 3 moves 1.5 times that.",
        ),
        source=(
            "Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), section 5 and Figure 1",
            recipe.source,
            states.source,
        ),
    )


def explain_activations(job: Job) -> Explanation:
    """What one layer of the job's model keeps for the backward pass, tensor by tensor."""
    kind, strategy = job.model.kinds[-1], job.strategy  # with experts, if the model has any
    what = "mixture-of-experts layer" if job.model.moe else "layer"
    tensors = layer_saved_tensors(job, kind)
    total = layer_activation_bytes(job, kind, recompute="none")
    rows = tuple(
        (t.name, bar(t.bytes / total, 24), t.recomputed_by, size(t.bytes), share(t.bytes / total)) for t in tensors
    )
    model = job.model
    units = Formula("in units of s·b·h", "A/(s·b·h)")
    sizes = {"A": total, "s": job.training.seq, "b": strategy.microbatch, "h": model.hidden}
    per_element = units.value(sizes)
    columns = {"tensor": "tensor", "": "", "recomputed by": "recomputed_by", "bytes": "bytes", "share": "share"}
    return Explanation(
        title=f"Activations of one {what} of {model.name}, one microbatch",
        formula=(str(units),),
        numbers=(
            ("s", "tokens of a sequence", number(job.training.seq)),
            ("b", "sequences of a microbatch", number(strategy.microbatch)),
            ("h", "hidden size", number(model.hidden)),
            ("a", "query heads", number(model.heads)),
            ("t", f"tensor parallel degree{' (with SP)' if strategy.sequence_parallel else ''}", number(strategy.tp)),
            ("c", "context parallel degree", number(strategy.cp)),
            ("A", "bytes that nothing recomputed keeps: the sum of the saved tensors", size(total)),
        ),
        result=(
            ("nothing recomputed", size(total)),
            (
                f"selective recompute ({', '.join(job.selective_operators)})",
                size(layer_activation_bytes(job, kind, recompute="selective")),
            ),
            ("full recompute", size(layer_activation_bytes(job, kind, recompute="full"))),
            (units.name, number(per_element, f"{per_element:.2f}")),
            ("embedding, first stage", size(embedding_activation_bytes(job))),
            ("head and loss, last stage", size(head_activation_bytes(job))),
        ),
        tables=(GridTable("saved tensors", columns, rows, words=3),),
        remarks=(
            "Published for GELU 4h, MHA, dropout, stored scores and 16 bit, which this layer need not have: "
            "s·b·h·(34 + 5·a·s/h); with TP s·b·h·(10 + 24/t + 5·a·s/(h·t)); with TP and SP s·b·h/t·(34 + 5·a·s/h).",
            "There selective recompute drops 5·a·s/h, and full recompute keeps 2·s·b·h (SP: /t).",
        ),
        source=(
            "Korthikanti et al. 2022 (arXiv 2205.05198), section 4 and Table 2",
            "Dao et al. 2022, FlashAttention (arXiv 2205.14135): one log-sum-exp per head and query",
        ),
    )


# -- FLOPs, MFU, pipeline bubbles and scaling efficiency ---------------------------------------------

_MOST_DRAWN = 256  # passes of one kind


def explain_flops(model: Model, seq: int, tokens: float, device: Device) -> Explanation:
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
        raise SpecError("⟨schedule⟩", problem, "use fewer, such as ⟨pp=4⟩ ⟨microbatches=8⟩")
    schedule = build(name, stages, microbatches, chunks if schedule_record(name).chooses_chunks else None)
    return draw_timeline(simulate(schedule, equal_stages(schedule.stages)))


def explain_mfu(job: Job, step_seconds: float, model_flops: float, recomputed: float) -> Explanation:
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
