"""ZeRO and activations, explained with numbers."""

from __future__ import annotations

from shardwise.cost.memory.activations import (
    embedding_activation_bytes,
    head_activation_bytes,
    layer_activation_bytes,
    layer_saved_tensors,
)
from shardwise.cost.memory.states import state_bytes
from shardwise.report.console import bar
from shardwise.report.explain.explanation import Explanation, Formula, GridTable, Quantity, number, share, size
from shardwise.spec.job import Job
from shardwise.spec.training import OPTIMIZERS, RECIPES
from shardwise.spec.units import counted, readable_count, readable_decimal_bytes


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
    moe = job.model.moe is not None
    strategy = job.strategy
    tensors = layer_saved_tensors(job, moe=moe)
    total = layer_activation_bytes(job, moe=moe, recompute="none")
    rows = tuple(
        (t.name, bar(t.bytes / total, 24), t.recomputed_by, size(t.bytes), share(t.bytes / total)) for t in tensors
    )
    model = job.model
    units = Formula("in units of s·b·h", "A/(s·b·h)")
    sizes = {"A": total, "s": job.training.seq, "b": strategy.microbatch, "h": model.hidden}
    per_element = units.value(sizes)
    columns = {"tensor": "tensor", "": "", "recomputed by": "recomputed_by", "bytes": "bytes", "share": "share"}
    return Explanation(
        title=f"Activations of one {'mixture-of-experts ' if moe else ''}layer of {model.name}, one microbatch",
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
                size(layer_activation_bytes(job, moe=moe, recompute="selective")),
            ),
            ("full recompute", size(layer_activation_bytes(job, moe=moe, recompute="full"))),
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
