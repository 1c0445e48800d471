"""ZeRO and activations, explained with numbers."""

from __future__ import annotations

from shardwise.cost.activations import (
    embedding_activation_bytes,
    head_activation_bytes,
    layer_activation_bytes,
    layer_saved_tensors,
)
from shardwise.cost.states import state_bytes
from shardwise.report.console import bar
from shardwise.report.explain.explanation import Explanation, Grid
from shardwise.spec.job import Job
from shardwise.spec.training import OPTIMIZERS, RECIPES
from shardwise.spec.units import readable_bytes, readable_count


def explain_zero(parameters: float, shards: int, precision: str, optimizer: str) -> Explanation:
    """States of one device under ZeRO 0 to 3."""
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
        rows.append(
            (
                f"ZeRO-{stage}" if stage else "none",
                formula,
                bar(part.total / whole, 24),
                _gigabytes(part.weights),
                _gigabytes(part.gradients),
                _gigabytes(part.optimizer),
                _gigabytes(part.total),
            )
        )
    return Explanation(
        title=f"Model states of {readable_count(parameters)} parameters over {shards} devices "
        f"({precision}, {optimizer})",
        formula=tuple(f"{row[0]}: {row[1]}" for row in rows),
        numbers=(
            ("P", "parameters", f"{parameters:,.0f}"),
            ("N", "devices that share the states", str(shards)),
            ("", f"bytes per parameter: weights ({recipe.name})", f"{weight:g}"),
            ("", "bytes per parameter: gradients", f"{gradient:g}"),
            (
                "",
                f"bytes per parameter: master weights and {optimizer} states",
                f"{recipe.master:g} + {states.matrices:g}",
            ),
        ),
        result=(),
        tables=(
            Grid(
                "bytes of one device",
                ("stage", "formula", "", "weights", "gradients", "optimizer", "total"),
                tuple(rows),
                words=3,
            ),
        ),
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


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number < 1e11 else f"{number / 1e9:.0f} GB"


def explain_activations(job: Job) -> Explanation:
    """What one layer of the job's model keeps for the backward pass, tensor by tensor."""
    moe = job.model.moe is not None
    strategy = job.strategy
    tensors = layer_saved_tensors(job, moe=moe)
    total = layer_activation_bytes(job, moe=moe, recompute="none")
    rows = tuple(
        (t.name, bar(t.bytes / total, 24), t.recomputed_by, readable_bytes(t.bytes), f"{t.bytes / total:.1%}")
        for t in tensors
    )
    model = job.model
    return Explanation(
        title=f"Activations of one {'mixture-of-experts ' if moe else ''}layer of {model.name}, one microbatch",
        formula=(
            "published case (GELU 4h, MHA, dropout, stored scores, 16 bit): s·b·h·(34 + 5·a·s/h)",
            "with TP: s·b·h·(10 + 24/t + 5·a·s/(h·t)); with TP and SP: s·b·h/t·(34 + 5·a·s/h)",
            "selective recompute drops 5·a·s/h; full recompute keeps 2·s·b·h (SP: /t)",
        ),
        numbers=(
            ("s", "tokens of a sequence", str(job.training.seq)),
            ("b", "sequences of a microbatch", str(strategy.microbatch)),
            ("h", "hidden size", str(model.hidden)),
            ("a", "query heads", str(model.heads)),
            ("t", "tensor parallel degree", f"{strategy.tp}{' with SP' if strategy.sequence_parallel else ''}"),
            ("c", "context parallel degree", str(strategy.cp)),
        ),
        result=(
            ("nothing recomputed", readable_bytes(total)),
            (
                "selective recompute (attention)",
                readable_bytes(layer_activation_bytes(job, moe=moe, recompute="selective")),
            ),
            ("full recompute", readable_bytes(layer_activation_bytes(job, moe=moe, recompute="full"))),
            ("in units of s·b·h", f"{total / (job.training.seq * strategy.microbatch * model.hidden):.2f}"),
            ("embedding, first stage", readable_bytes(embedding_activation_bytes(job))),
            ("head and loss, last stage", readable_bytes(head_activation_bytes(job))),
        ),
        tables=(Grid("saved tensors", ("tensor", "", "recomputed by", "bytes", "share"), rows, words=3),),
        source=(
            "Korthikanti et al. 2022 (arXiv 2205.05198), section 4 and Table 2",
            "Dao et al. 2022, FlashAttention (arXiv 2205.14135): one log-sum-exp per head and query",
        ),
    )
