"""FLOPs, MFU, pipeline bubbles and scaling efficiency, explained with numbers."""

from __future__ import annotations

from shardwise.cost.communication.pipeline import bubble_share
from shardwise.cost.flops import CONVENTIONS, flops_per_token
from shardwise.cost.in_flight import SOURCES
from shardwise.report.console import bar
from shardwise.report.explain.explanation import Explanation, Grid
from shardwise.spec.hardware import Device
from shardwise.spec.model import Model
from shardwise.spec.parameters import active_parameter_count, parameter_count
from shardwise.spec.strategy import SCHEDULES
from shardwise.spec.units import readable_count, readable_flops, readable_seconds


def explain_flops(model: Model, seq: int, tokens: float, device: Device) -> Explanation:
    """Training FLOPs by every published convention."""
    peak = device.peak_flops("bf16")
    rows = []
    for convention in CONVENTIONS:
        per_token = flops_per_token(model, seq, convention.name)
        rows.append(
            (
                convention.name,
                convention.formula,
                readable_flops(per_token),
                readable_flops(per_token * tokens),
                readable_seconds(per_token * tokens / peak),
            )
        )
    return Explanation(
        title=f"Training FLOPs of {model.name} at sequence length {seq}",
        formula=("forward: 2 per weight and token, plus attention; backward: twice the forward pass",),
        numbers=(
            ("N", "parameters", readable_count(parameter_count(model))),
            ("", "parameters a token passes through", readable_count(active_parameter_count(model))),
            ("L, h, a", "layers, hidden, heads", f"{model.layers}, {model.hidden}, {model.heads}"),
            ("T", "tokens trained on", readable_count(tokens)),
            ("", f"peak of one {device.name}, bf16", readable_flops(peak) + "/s"),
        ),
        result=(),
        tables=(
            Grid(
                "by convention",
                ("convention", "per token", "FLOPs/token", "FLOPs in all", "one device at peak"),
                tuple(rows),
                words=2,
            ),
        ),
        remarks=(
            "MFU divides model FLOPs by peak × time, idle time included; recomputed FLOPs count only in HFU.",
            "Conventions differ by causal attention (counted once or fully) and by the embedding: convert, never mix.",
        ),
        source=tuple(f"{c.name}: {c.source}" for c in CONVENTIONS),
    )


def explain_bubble(stages: int, microbatches: int, chunks: int) -> Explanation:
    """Pipeline bubble of every schedule at F = B = W."""
    rows = []
    for schedule in SCHEDULES:
        share = bubble_share(schedule, stages, microbatches, chunks)
        rows.append((schedule, bar(share, 16), SOURCES[schedule], f"{share:.1%}", f"{share / (1 + share):.1%}"))
    return Explanation(
        title=f"Pipeline bubble of {stages} stages and {microbatches} microbatches",
        formula=(
            "1F1B and GPipe: (p−1)/m of the busy time, (p−1)/(m+p−1) of the step; interleaved: divided by v",
            "ZB-H1: (p−1)(F+B−W); ZB-H2: (p−1)(F+B−2W); here F = B = W and no communication",
        ),
        numbers=(
            ("p", "stages", str(stages)),
            ("m", "microbatches", str(microbatches)),
            ("v", "chunks per rank (interleaved)", str(chunks)),
        ),
        result=(),
        tables=(
            Grid(
                "by schedule",
                ("schedule", "", "activations it keeps, by", "of busy time", "of the step"),
                tuple(rows),
                words=3,
            ),
        ),
        remarks=("Unequal stages and communication between stages need a simulation of the schedule's actions.",),
        source=(
            "Narayanan et al. 2021 (arXiv 2104.04473), section 2.2",
            "Qi et al. 2023 (arXiv 2401.10241); Qi et al. 2024 (arXiv 2405.15362); DeepSeek DualPipe README",
        ),
    )


def explain_mfu(flops: float, seconds: float, devices: int, peak: float, recomputed: float) -> Explanation:
    """Model and hardware FLOPs utilisation of a measured step."""
    mfu = flops / (seconds * devices * peak)
    return Explanation(
        title="Model FLOPs utilisation",
        formula=(
            "MFU = model FLOPs / (seconds · N · peak)",
            "HFU = (model FLOPs + recomputed FLOPs) / (seconds · N · peak)",
        ),
        numbers=(
            ("", "model FLOPs of one step", readable_flops(flops)),
            ("", "recomputed FLOPs of one step", readable_flops(recomputed)),
            ("", "seconds of one step", readable_seconds(seconds)),
            ("N", "devices", str(devices)),
            ("", "peak of one device", readable_flops(peak) + "/s"),
        ),
        result=(
            ("MFU", f"{mfu:.1%}"),
            ("HFU", f"{(flops + recomputed) / (seconds * devices * peak):.1%}"),
        ),
        remarks=("More than the peak: check the step time, the batch and the devices.",) if mfu > 1 else (),
        source=("Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B",),
    )


def explain_scaling(devices: int, first_seconds: float, strong_seconds: float, weak_seconds: float) -> Explanation:
    """Strong and weak scaling efficiency from step times."""
    return Explanation(
        title="Scaling efficiency",
        formula=("strong (fixed batch): T1/(N·TN)", "weak (batch grows with N): T1/TN"),
        numbers=(
            ("N", "how many times as many devices", str(devices)),
            ("T1", "step on the smaller machine", readable_seconds(first_seconds)),
            ("TN", "step on the larger machine, same batch", readable_seconds(strong_seconds)),
            ("TN", "step on the larger machine, N times the batch", readable_seconds(weak_seconds)),
        ),
        result=(
            ("strong-scaling efficiency", f"{first_seconds / (devices * strong_seconds):.1%}"),
            ("weak-scaling efficiency", f"{first_seconds / weak_seconds:.1%}"),
        ),
        source=("Amdahl 1967; Gustafson 1988",),
    )
